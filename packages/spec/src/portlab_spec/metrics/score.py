"""From judgements to metrics."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from portlab_spec.conversation import Conversation
from portlab_spec.errors import UserError
from portlab_spec.metrics.intervals import Metric, metric, ratio
from portlab_spec.metrics.judge import judge
from portlab_spec.metrics.records import (
    CALL_METRICS,
    EXAMPLE_METRICS,
    LENIENT,
    ExampleScore,
    Prediction,
    call_names,
    expected_calls,
)

NO_CALL = "(no call)"
ANY_CALL = "(any call)"
MALFORMED = "(malformed)"


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
    """Metrics of the predictions for `conversations`, by the names that `portlab_spec.metrics` defines.

    Args:
        conversations: the examples to score; each ends with the expected assistant message, or says in
            `meta["expects"]` that any call will do. Accepted alternatives are read from `meta["accepted"]`.
        predictions: exactly one per conversation, in any order; all with the lenient parse or none.
        train: training conversations; without them `most_frequent_tool` is left out.

    Raises:
        UserError: no example, predictions and conversations do not match one to one, or only some predictions
            have the lenient parse.
    """
    lenient = sum(prediction.lenient is not None for prediction in predictions)
    if lenient not in (0, len(predictions)):
        what = f"{lenient} of {len(predictions)} predictions have a lenient parse"
        raise UserError(what, fix="Give it to all of them or to none")
    judgements = per_example(conversations, predictions)
    metrics = summarise(judgements)
    if train is not None:
        guess = _most_frequent_names(train)
        expected = [calls for c in conversations if (calls := expected_calls(c)) is not None]
        if expected:
            metrics["most_frequent_tool"] = metric(sum(call_names(e) == guess for e in expected), len(expected))
    return metrics


def per_example(conversations: Sequence[Conversation], predictions: Sequence[Prediction]) -> list[ExampleScore]:
    """Every judgement of every example, in the order of `conversations`.

    Raises:
        UserError: as `score`.
    """
    return [judge(conversation, prediction) for conversation, prediction in _pair(conversations, predictions)]


def summarise(judgements: Sequence[ExampleScore]) -> dict[str, Metric]:
    """The metrics of judged examples; a metric for which nothing counts is left out.

    Raises:
        UserError: no example.
    """
    if not judgements:
        raise UserError("there is no example to score", fix="Choose a split that has rows")
    metrics = {}
    for name in (*EXAMPLE_METRICS, *(name + LENIENT for name in EXAMPLE_METRICS)):
        if flags := [judgement.flags[name] for judgement in judgements if name in judgement.flags]:
            metrics[name] = metric(sum(flags), len(flags))
    for name in CALL_METRICS:
        pairs = [judgement.calls[name] for judgement in judgements]
        if any(count for _, count in pairs):
            metrics[name] = ratio(pairs)
    return metrics


def confusion(conversations: Sequence[Conversation], predictions: Sequence[Prediction]) -> list[Confusion]:
    """Counts of (expected, predicted) names, the most frequent first; right answers are included.

    Raises:
        UserError: as `score`.
    """
    counts = Counter(
        (_expected_label(c), _label(call_names(p.calls)) if p.error is None else MALFORMED)
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


def _most_frequent_names(train: Sequence[Conversation]) -> tuple[str, ...]:
    if not train:
        raise UserError("there is no training example for the baseline", fix="Leave out `train`")
    counts = Counter(call_names(conversation.target.tool_calls) for conversation in train)
    return min(counts, key=lambda names: (-counts[names], names))


def _expected_label(conversation: Conversation) -> str:
    expected = expected_calls(conversation)
    return ANY_CALL if expected is None else _label(call_names(expected))


def _label(names: Sequence[str]) -> str:
    return " + ".join(names) or NO_CALL
