"""How well models choose tools: a test split put to each, scored with `portlab_spec.metrics`, and compared.

The models see one prompt of the data set each, without running a tool. Differences between two models are paired:
both answered the same examples, so the interval is that of the difference, much narrower than two intervals side by
side suggest.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

from fitnesscoach.backends import Answer, Backend, BackendError, discard
from portlab_spec.conversation import Conversation
from portlab_spec.errors import CheckFailed
from portlab_spec.metrics import BOOTSTRAP_SEED, CONFIDENCE, RESAMPLES, ExampleScore, Metric, Prediction, per_example
from portlab_spec.metrics.score import summarise

# What the table shows; JSON has all.
SHOWN = (
    "call_exact",
    "name_accuracy",
    "args_ast",
    "schema_valid_rate",
    "parse_rate",
    "hallucinated_tool_rate",
    "irrelevance_accuracy",
)
_LOWER_IS_BETTER = {"hallucinated_tool_rate"}


@dataclass(frozen=True)
class Scored:
    """One model on one split.

    Attributes:
        answers: by id of the conversation.
        seconds: wall-clock time of all requests.
    """

    model: str
    examples: list[ExampleScore]
    metrics: dict[str, Metric]
    answers: dict[str, Answer]
    seconds: float


@dataclass(frozen=True)
class Difference:
    """A metric of the second model less that of the first, with its paired 95 % interval."""

    value: float
    low: float
    high: float


async def score_model(
    backend: Backend, conversations: Sequence[Conversation], concurrency: int, advance: Callable[[], None]
) -> Scored:
    """Put every conversation to a model and score the answers.

    Raises:
        CheckFailed: some got no answer; a score over the rest would flatter the model.
    """
    places = asyncio.Semaphore(concurrency)

    async def one(conversation: Conversation) -> Answer | BackendError:
        async with places:
            try:
                return await backend.answer(conversation.prompt.messages, conversation.tools, discard)
            except BackendError as error:
                return error
            finally:
                advance()

    began = time.perf_counter()
    answers = await asyncio.gather(*map(one, conversations))
    seconds = time.perf_counter() - began
    failed = [answer for answer in answers if isinstance(answer, BackendError)]
    if failed:
        what = f"{len(failed)} of {len(answers)} requests got no answer, the first: {failed[0]}"
        raise CheckFailed(what, fix="Nothing was scored; mend the server or lower --concurrency")
    answered = {c.id: a for c, a in zip(conversations, answers, strict=True) if isinstance(a, Answer)}
    predictions = [Prediction.from_parsed(id, answer.strict, answer.lenient) for id, answer in answered.items()]
    examples = per_example(conversations, predictions)
    return Scored(backend.name, examples, summarise(examples), answered, seconds)


def compare(first: Scored, second: Scored) -> dict[str, Difference]:
    """Every metric over examples that both have: second less first."""
    names = {name for example in first.examples for name in example.flags}
    found = {}
    for name in sorted(names):
        pairs = [
            (a.flags[name], b.flags[name])
            for a, b in zip(first.examples, second.examples, strict=True)
            if name in a.flags and name in b.flags
        ]
        if pairs:
            found[name] = paired_difference(pairs)
    return found


def paired_difference(pairs: Sequence[tuple[bool, bool]]) -> Difference:
    """Mean of second less first, with a percentile bootstrap over the pairs.

    An example adds -1, 0 or 1, so a resample is a draw from a multinomial of three shares.
    """
    steps = Counter(int(b) - int(a) for a, b in pairs)
    shares = np.array([steps[step] for step in (-1, 0, 1)]) / len(pairs)
    drawn = np.random.default_rng(BOOTSTRAP_SEED).multinomial(len(pairs), shares, RESAMPLES)
    differences = drawn @ np.array([-1, 0, 1]) / len(pairs)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(differences, [tail, 1 - tail])
    return Difference((steps[1] - steps[-1]) / len(pairs), float(low), float(high))


def as_json(dataset: str, scored: Sequence[Scored]) -> dict[str, Any]:
    """Everything that was measured, answers included."""
    base, *others = scored
    return {
        "dataset": dataset,
        "split": "test",
        "examples": len(base.examples),
        "models": {
            model.model: {
                "metrics": {name: metric.model_dump() for name, metric in model.metrics.items()},
                "seconds": round(model.seconds, 3),
                "answers": [{"id": e.id, "raw": model.answers[e.id].raw, "reason": e.reason} for e in model.examples],
            }
            for model in scored
        },
        "differences": {
            f"{other.model} - {base.model}": {name: vars(d) for name, d in compare(base, other).items()}
            for other in others
        },
    }


def as_table(dataset: str, scored: Sequence[Scored], *, differences: bool) -> Table:
    """The metrics that matter most, a column per model, and the paired differences from the first."""
    base, *others = scored
    table = Table(title=f"{dataset}, test split, {len(base.examples)} examples", title_justify="left")
    table.add_column("metric")
    for model in scored:
        table.add_column(model.model, justify="right")
    for other in others if differences else ():
        table.add_column(f"{other.model} − {base.model}", justify="right")
    changes = [compare(base, other) for other in others] if differences else []
    for name in SHOWN:
        if not any(name in model.metrics for model in scored):
            continue
        arrow = " ↓" if name in _LOWER_IS_BETTER else ""
        cells = [_share(model.metrics.get(name)) for model in scored]
        table.add_row(name + arrow, *cells, *(_change(change.get(name)) for change in changes))
    table.add_row("seconds", *(f"{model.seconds:.1f}" for model in scored), *("" for _ in changes))
    return table


def _share(metric: Metric | None) -> str:
    if metric is None:
        return "-"
    return f"{100 * metric.value:.1f} % ({100 * metric.low:.1f}–{100 * metric.high:.1f})"


def _change(difference: Difference | None) -> str:
    if difference is None:
        return "-"
    return f"{100 * difference.value:+.1f} ({100 * difference.low:+.1f} to {100 * difference.high:+.1f})"
