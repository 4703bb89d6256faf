"""A model folder run by transformers (extra `transformers`); the only module that imports torch."""

import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from portlab_spec.errors import UserError


class TorchDecoder:
    """A causal language model of transformers, see `portlab_spec.decoding.Decoder`.

    Attributes:
        positions: tokens that prompt and answer may have together.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.positions: int = model.config.get_text_config().max_position_embeddings

    def prepare(self, length: int, limit: int) -> None:
        """See `Decoder`; there is nothing to prepare."""

    def decode(self, prompt: Sequence[int], stop_ids: Collection[int], limit: int) -> Iterator[int]:
        """See `Decoder`."""
        ids, cache = list(prompt), None
        for _ in range(limit):
            token, cache = self._next(ids, cache)
            yield token
            if token in stop_ids:
                return
            ids = [token]

    @torch.inference_mode()
    def _next(self, ids: Sequence[int], cache: Any) -> tuple[int, Any]:
        """The likeliest token after ids that follow those in a cache, and the cache with them in."""
        tokens = torch.tensor([ids], device=self._model.device)
        out = self._model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return int(out.logits[0, -1].argmax()), out.past_key_values


def load(folder: Path) -> TorchDecoder:
    """Load a model folder.

    Raises:
        UserError: transformers does not know the model, or a file is missing or does not fit the others.
    """
    if not sys.stderr.isatty():
        disable_progress_bar()
    on_gpu = torch.cuda.is_available()
    dtype = torch.bfloat16 if on_gpu else torch.float32
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise _refusal(" ".join(str(error).split())[:200], folder) from None
    model, found = loaded
    if missing := sorted(found["missing_keys"]):  # transformers would go on with random numbers
        raise _refusal(f"the tensor {missing[0]} is missing", folder)
    return TorchDecoder(model.to("cuda" if on_gpu else "cpu").eval())


def _refusal(why: str, folder: Path) -> UserError:
    what = f"transformers cannot load the model ({why})"
    return UserError(what, where=str(folder), fix="Choose a complete model folder")
