"""A model that runs in the application's own process: prompt ids in, new ids out as they are known.

Packages do not import each other. Whoever can run a model folder names a `Load` as an entry point of the group
`portlab.decoder`, under the framework's name,

    [project.entry-points."portlab.decoder"]
    jax = "portlab_jax.streaming:load"

and `fitnesscoach --runtime jax` asks what it returns.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Protocol

GROUP = "portlab.decoder"


class Decoder(Protocol):
    """A loaded model that takes the likeliest token at each step: float32 on a CPU, bfloat16 on an accelerator.

    It serves one question at a time, from one thread.

    Attributes:
        positions: tokens that prompt and answer may have together.
    """

    positions: int

    def prepare(self, length: int, limit: int) -> None:
        """Compile what a prompt of `length` ids with an answer of at most `limit` needs, if that is not yet there.

        `decode` does so too; this is for those who do not want it counted as time of an answer.
        """

    def decode(self, prompt: Sequence[int], stop_ids: Collection[int], limit: int) -> Iterator[int]:
        """Continue a prompt, computing a token when it is asked for: who asks no more has stopped it.

        Args:
            prompt: ids, BOS included; at least one.
            stop_ids: ids that end an answer.
            limit: most ids of an answer; with the prompt no more than `positions`.

        Yields:
            New ids, up to and including a stop id, or `limit` of them.
        """


# Loads a model folder. Raises UserError if it is damaged, UnsupportedModel if the model is of another kind.
Load = Callable[[Path], Decoder]


def find_decoder(runtime: str) -> EntryPoint | None:
    """Who runs models with a framework, None if it is not installed; its `load` gives a `Load`."""
    return next(iter(entry_points(group=GROUP, name=runtime)), None)
