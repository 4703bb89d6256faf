"""Tool-call metrics: defined, counted, and with intervals.

Every metric is a share of examples: `hits` examples out of `count` have a property. The interval is the
percentile bootstrap over examples, at 95 %, from 2,000 resamples with a fixed seed. Resampling n zeros and
ones with replacement and adding them up is a draw from Binomial(n, hits / n), so the resamples are drawn as
such. When all examples agree the interval is a point: read `count` beside it.

An example is well formed if the strict parser of its format accepts the whole output (`Prediction.error` is
None). The expected calls are those of the conversation's last message; that may be plain text, and then the
right prediction is a well-formed output without calls.

call_exact
    Well formed, and the same calls in the same order: equal names, equal arguments. Arguments are compared
    as JSON with strict types: `1`, `1.0`, `true` and `"1"` all differ; the order of keys is free.
name_accuracy
    Well formed, and the same names in the same order.
parse_rate
    Well formed.
hallucinated_tool_rate
    A name that the conversation does not offer occurs anywhere in the output, well formed or not.
stopped_rate
    The output ended with a stop token, not at the length limit.
schema_valid_rate
    Well formed, and every call is to an offered tool with arguments valid under its schema. An output
    without calls is valid only where none is expected.
most_frequent_tool
    The baseline: `name_accuracy` of always giving the names that are most frequent in the training split
    (ties: the first in alphabetical order).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from portlab_spec.conversation import Conversation, Record, ToolCall
from portlab_spec.errors import UserError
from portlab_spec.tools import same_json, validate_arguments

RESAMPLES = 2_000
CONFIDENCE = 0.95
BOOTSTRAP_SEED = 0

NO_CALL = "(no call)"
MALFORMED = "(malformed)"


@dataclass(frozen=True)
class Prediction:
    """What a model answered to one conversation.

    Attributes:
        example_id: id of the conversation.
        calls: the parsed calls, in order; empty if the output is malformed or plain text.
        error: why the strict parser refused the output; None if it is well formed.
        stopped: generation ended with a stop token.
        names: every tool name seen in the output, in malformed calls too.
    """

    example_id: str
    calls: tuple[ToolCall, ...]
    error: str | None
    stopped: bool
    names: tuple[str, ...]


class Metric(Record):
    """A share of examples with its 95 % interval; all three are fractions between 0 and 1."""

    value: float
    low: float
    high: float
    hits: int
    count: int


@dataclass(frozen=True)
class Confusion:
    """How often one answer was given where another was expected; calls in sequence are joined by ` + `."""

    expected: str
    got: str
    count: int


def score(
    conversations: Sequence[Conversation],
    predictions: Sequence[Prediction],
    *,
    train: Sequence[Conversation] | None = None,
) -> dict[str, Metric]:
    """Metrics of the predictions for `conversations`, by the names defined above.

    Args:
        conversations: the examples to score; each ends with the expected assistant message.
        predictions: exactly one per conversation, in any order.
        train: training conversations; without them `most_frequent_tool` is left out.

    Raises:
        UserError: no example, or predictions and conversations do not match one to one.
    """
    pairs = _pair(conversations, predictions)
    properties = {
        "call_exact": [_exact(c, p) for c, p in pairs],
        "name_accuracy": [p.error is None and _names(p.calls) == _names(c.target.tool_calls) for c, p in pairs],
        "parse_rate": [p.error is None for _, p in pairs],
        "hallucinated_tool_rate": [_hallucinates(c, p) for c, p in pairs],
        "stopped_rate": [p.stopped for _, p in pairs],
        "schema_valid_rate": [_schema_valid(c, p) for c, p in pairs],
    }
    if train is not None:
        guess = _most_frequent_names(train)
        properties["most_frequent_tool"] = [_names(c.target.tool_calls) == guess for c, _ in pairs]
    return {name: metric(sum(flags), len(flags)) for name, flags in properties.items()}


def metric(hits: int, count: int) -> Metric:
    """A share with its bootstrap interval.

    Raises:
        UserError: `count` is zero.
    """
    if count == 0:
        raise UserError("there is no example to score", fix="Choose a split that has rows")
    resamples = np.random.default_rng(BOOTSTRAP_SEED).binomial(count, hits / count, RESAMPLES) / count
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(resamples, [tail, 1 - tail])
    return Metric(value=hits / count, low=float(low), high=float(high), hits=hits, count=count)


def confusion(conversations: Sequence[Conversation], predictions: Sequence[Prediction]) -> list[Confusion]:
    """Counts of (expected, predicted) names, the most frequent first; right answers are included.

    Raises:
        UserError: as `score`.
    """
    counts = Counter(
        (_label(_names(c.target.tool_calls)), _label(_names(p.calls)) if p.error is None else MALFORMED)
        for c, p in _pair(conversations, predictions)
    )
    rows = [Confusion(expected, got, count) for (expected, got), count in counts.items()]
    return sorted(rows, key=lambda row: (-row.count, row.expected, row.got))


def _pair(
    conversations: Sequence[Conversation], predictions: Sequence[Prediction]
) -> list[tuple[Conversation, Prediction]]:
    by_id = {prediction.example_id: prediction for prediction in predictions}
    expected = [conversation.id for conversation in conversations]
    for kind, ids in (("predictions", [p.example_id for p in predictions]), ("conversations", expected)):
        if len(set(ids)) < len(ids):
            twice = Counter(ids).most_common(1)[0][0]
            raise UserError(f"two {kind} have the id {twice}", fix="Score each example once")
    if unmatched := sorted(by_id.keys() ^ set(expected)):
        lacking = "conversation" if unmatched[0] in by_id else "prediction"
        raise UserError(
            f"example {unmatched[0]} has no {lacking} ({len(unmatched)} such)",
            fix="Give one prediction for each conversation that is scored",
        )
    return [(conversation, by_id[conversation.id]) for conversation in conversations]


def _exact(conversation: Conversation, prediction: Prediction) -> bool:
    expected = conversation.target.tool_calls
    return (
        prediction.error is None
        and _names(prediction.calls) == _names(expected)
        and all(same_json(p.arguments, e.arguments) for p, e in zip(prediction.calls, expected, strict=True))
    )


def _hallucinates(conversation: Conversation, prediction: Prediction) -> bool:
    offered = {tool.name for tool in conversation.tools}
    return not offered.issuperset(prediction.names + _names(prediction.calls))


def _schema_valid(conversation: Conversation, prediction: Prediction) -> bool:
    if prediction.error is not None or (conversation.target.tool_calls and not prediction.calls):
        return False
    offered = {tool.name: tool for tool in conversation.tools}
    return all(
        call.name in offered and not validate_arguments(offered[call.name], call.arguments) for call in prediction.calls
    )


def _most_frequent_names(train: Sequence[Conversation]) -> tuple[str, ...]:
    if not train:
        raise UserError("there is no training example for the baseline", fix="Leave out `train`")
    counts = Counter(_names(conversation.target.tool_calls) for conversation in train)
    return min(counts, key=lambda names: (-counts[names], names))


def _names(calls: Sequence[ToolCall]) -> tuple[str, ...]:
    return tuple(call.name for call in calls)


def _label(names: Sequence[str]) -> str:
    return " + ".join(names) or NO_CALL
