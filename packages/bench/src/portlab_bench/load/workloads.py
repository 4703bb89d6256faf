"""What is asked. Every prompt of a run is different, so that no server answers from what it has seen; what a workload
shares on purpose (tools and instructions, as an application would) is counted and told to the prefix-cache guard.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, Literal

import numpy as np
import orjson

from portlab_spec.conversation import Conversation
from portlab_spec.data import load_dataset
from portlab_spec.errors import UserError

Name = Literal["tool-calls", "chat", "prefill-heavy", "random"]

# Common words, each one token of Gemma's vocabulary with the space before it.
_WORDS = resources.files("portlab_bench").joinpath("data/words.txt").read_text(encoding="utf-8").split()


@dataclass(frozen=True)
class Workload:
    """A kind of request.

    Attributes:
        name: what it is like.
        input_tokens: median length of a prompt, of made-up text; None for data.
        output_tokens: most tokens of an answer.
        spread: of the lengths, the sigma of a log-normal; 0 for prompts and answers of one length.
        fixed: answers must be exactly so long (`ignore_eos`), whatever the model would say.
        data: built-in data set or file of the tool calls.
        cold: put something unique before everything, so that nothing at all is shared.
    """

    name: Name
    input_tokens: int | None
    output_tokens: int
    spread: float = 0.0
    fixed: bool = True
    data: str = ""
    cold: bool = False
    rows: Sequence[Conversation] = field(default=(), repr=False)

    def bodies(self, model: str, count: int, seed: int) -> list[bytes]:
        """The first requests as JSON, of one seed always the same."""
        return [self.body(model, seed, index) for index in range(count)]

    def body(self, model: str, seed: int, index: int) -> bytes:
        """One request of a seed, as JSON."""
        rng = np.random.default_rng([seed, index])
        # 64 random bits: no two requests of any two cells begin alike.
        mark = f"{rng.integers(2**63):016x}"
        if self.rows:
            row = self.rows[_order(len(self.rows), seed)[index % len(self.rows)]]
            body = _tool_request(row, mark, self.cold)
        else:
            words = _length(rng, self.input_tokens or 1, self.spread)
            text = " ".join([mark, *(_WORDS[j] for j in rng.integers(len(_WORDS), size=max(words - 10, 1)))])
            body = {"messages": [{"role": "user", "content": text}]}
        body |= {
            "model": model,
            "max_tokens": _length(rng, self.output_tokens, self.spread if self.fixed else 0.0),
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.fixed:
            body["ignore_eos"] = True
        return orjson.dumps(body)

    def describe(self) -> dict[str, Any]:
        """What the run's record says of it."""
        found = {k: v for k, v in vars(self).items() if k != "rows" and v not in (None, "")}
        return found | ({"rows": len(self.rows)} if self.rows else {})


@cache
def _order(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng([seed, 2**32]).permutation(count)


def _tool_request(row: Conversation, mark: str, cold: bool) -> dict[str, Any]:
    """A held-out question with its tools. The mark stands in the question, behind what all rows share."""
    messages = [{"role": m.role, "content": m.content or ""} for m in row.prompt.messages]
    if cold and messages[0]["role"] != "user":
        messages[0]["content"] = f"{mark} {messages[0]['content']}"
    messages[-1]["content"] = f"{messages[-1]['content']} (request {mark})"
    return {"messages": messages, "tools": [tool.to_openai() for tool in row.tools]}


def _length(rng: np.random.Generator, median: int, spread: float) -> int:
    return median if not spread else max(1, round(median * math.exp(rng.normal(0, spread))))


_PRESETS: dict[Name, Workload] = {
    "tool-calls": Workload("tool-calls", None, 128, fixed=False, data="fitness-213"),
    # Medians and spread of public traces of assistants: short questions, answers of some hundred tokens.
    "chat": Workload("chat", 256, 192, spread=0.6),
    "prefill-heavy": Workload("prefill-heavy", 4096, 16),
    "random": Workload("random", 512, 128),
}


def workload(
    name: Name,
    *,
    input_tokens: int | None = None,
    output_tokens: int | None = None,
    data: str | None = None,
    cold: bool = False,
) -> Workload:
    """A workload by name, with lengths or data of the user's.

    Raises:
        UserError: lengths that are not positive, an option that the workload has no use for, or data without a
            prompt that ends in a question.
    """
    preset = _PRESETS[name]
    for option, value in (("--input-tokens", input_tokens), ("--output-tokens", output_tokens)):
        if value is not None and value < 1:
            raise UserError(f"{option} {value} is no length", fix="Give a positive number")
    tools = name == "tool-calls"
    if tools and input_tokens is not None:
        raise UserError("--input-tokens does not fit tool-calls", fix="Its prompts are as long as its data's")
    if not tools and (data is not None or cold):
        raise UserError(f"--data and --cold do not fit {name}", fix="They are of tool-calls")
    rows: tuple[Conversation, ...] = ()
    chosen = data or preset.data
    if tools:
        rows = tuple(
            row for row in load_dataset(chosen) if row.split == "test" and row.prompt.messages[-1].role == "user"
        )
        if not rows:
            raise UserError("has no held-out question", where=chosen, fix="Give data with a test split")
    return Workload(
        name,
        input_tokens or preset.input_tokens,
        output_tokens or preset.output_tokens,
        preset.spread,
        preset.fixed,
        chosen,
        cold,
        rows,
    )


def shared_share(bodies: Sequence[bytes]) -> float:
    """Upper bound of what a prefix cache can rightly hold: text that prompts share, as a share of all their text.

    Every prompt is compared with its neighbours in sorted order, which share most with it. Tools stand before the
    messages in Gemma's templates, the first message before the others.
    """
    texts = sorted(_as_rendered(body) for body in bodies)
    shared = total = 0
    for i, text in enumerate(texts):
        neighbours = texts[max(i - 1, 0) : i] + texts[i + 1 : i + 2]
        shared += max((_common(text, other) for other in neighbours), default=0)
        total += len(text)
    return shared / total if total else 0.0


def _as_rendered(body: bytes) -> bytes:
    request = orjson.loads(body)
    messages = request["messages"]
    first = messages[:1] if messages[0]["role"] in ("developer", "system") else []
    return orjson.dumps([first, request.get("tools", []), messages[len(first) :]])


def _common(a: bytes, b: bytes) -> int:
    """Length of the common beginning."""
    size = min(len(a), len(b))
    differs = np.frombuffer(a, np.uint8, size) != np.frombuffer(b, np.uint8, size)
    return int(differs.argmax()) if differs.any() else size
