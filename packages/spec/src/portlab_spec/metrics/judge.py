"""The judgement of one answer: every flag, every count of calls, and the reason why it is wrong."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from portlab_spec.conversation import Conversation, ToolCall
from portlab_spec.errors import UserError
from portlab_spec.formats import FORMATS
from portlab_spec.metrics.ast_match import Accepted, accepted_calls, match_calls
from portlab_spec.metrics.records import LENIENT, ExampleScore, Prediction, call_names, expected_calls
from portlab_spec.tools import same_json, validate_arguments

# A call whose markers are missing reaches the client as text.
_CALL_HEAD = r"\bcall:[A-Za-z_][\w.-]*\{"


@dataclass(frozen=True)
class Reading:
    """One parser's view of an output.

    `usable` is whether there is an answer to judge: for the strict parser a well-formed output; for the lenient
    one also calls that it could read in a malformed output. No calls in a malformed output is no decision
    against calling, or a broken format would do well where no call is wanted.
    """

    calls: tuple[ToolCall, ...]
    names: tuple[str, ...]
    usable: bool


def judge(conversation: Conversation, prediction: Prediction) -> ExampleScore:
    """Everything that can be said of one answer; the metrics are sums of it.

    Raises:
        UserError: the conversation does not say what is expected.
    """
    expected = expected_calls(conversation)
    strict = Reading(prediction.calls, _seen(prediction.calls, prediction.names), prediction.error is None)
    flags = _verdicts(conversation, expected, strict)
    flags["parse_rate"] = prediction.error is None
    flags["hallucinated_tool_rate"] = not _offered(conversation).issuperset(strict.names + call_names(strict.calls))
    flags["stopped_rate"] = prediction.stopped
    if expected is not None:
        flags["over_call"] = len(strict.names) > len(expected)
        flags["under_call"] = len(strict.names) < len(expected)
    flags["format_leak_rate"] = _leaks(prediction)
    if lenient := prediction.lenient:
        seen = _seen(lenient.calls, lenient.names)
        reading = Reading(lenient.calls, seen, lenient.error is None or bool(lenient.calls))
        flags["parse_rate" + LENIENT] = lenient.error is None
        flags |= {name + LENIENT: flag for name, flag in _verdicts(conversation, expected, reading).items()}
    return ExampleScore(
        id=conversation.id,
        category=str(conversation.meta.get("category", "")),
        flags=flags,
        calls=_call_counts(conversation, strict),
        reason=_reason(conversation, expected, strict, prediction),
    )


def _verdicts(conversation: Conversation, expected: tuple[ToolCall, ...] | None, reading: Reading) -> dict[str, bool]:
    """The flags that depend on which parser reads the output."""
    calls, usable = reading.calls, reading.usable
    wanted = expected is None or bool(expected)
    flags = {"schema_valid_rate": usable and (bool(calls) or not wanted) and _all_valid(conversation, calls)}
    if expected is not None:
        names_equal = call_names(calls) == call_names(expected)
        flags["call_exact"] = usable and names_equal and all(map(_same_call, calls, expected))
        flags["call_exact_unordered"] = usable and _same_calls(calls, expected)
        flags["name_accuracy"] = usable and names_equal
    if expected:
        flags["args_exact"] = flags["call_exact_unordered"]
        flags["args_ast"] = usable and match_calls(calls, accepted_of(conversation), conversation.tools)
    if wanted:
        flags["relevance_accuracy"] = usable and bool(calls)
    else:
        flags["irrelevance_accuracy"] = usable and not reading.names and not calls
    return flags


def accepted_of(conversation: Conversation) -> Sequence[Accepted]:
    """The accepted values of the expected calls: `meta["accepted"]`, or else the expected calls themselves.

    Raises:
        UserError: `meta["accepted"]` does not have the form.
    """
    accepted = conversation.meta.get("accepted")
    if accepted is None:
        return accepted_calls(conversation.target.tool_calls, conversation.tools)
    if not isinstance(accepted, list) or not all(map(_is_accepted, accepted)):
        fix = 'Write one {"name": {"parameter": [accepted values]}} per call'
        raise UserError("meta.accepted is no list of accepted calls", where=conversation.id, fix=fix)
    return cast(Sequence[Accepted], accepted)


def _is_accepted(call: Any) -> bool:
    """Whether this is one name with a list of values per parameter."""
    if not isinstance(call, Mapping) or len(call) != 1:
        return False
    (parameters,) = call.values()
    return isinstance(parameters, Mapping) and all(isinstance(values, list) for values in parameters.values())


def _call_counts(conversation: Conversation, reading: Reading) -> dict[str, tuple[int, int]]:
    offered = {tool.name: tool.parameters for tool in conversation.tools}
    known = [(offered[call.name], call.arguments) for call in reading.calls if call.name in offered]
    return {
        "hallucinated_call_rate": (sum(name not in offered for name in reading.names), len(reading.names)),
        "unknown_arg_rate": (sum(bool(_unknown(*pair)) for pair in known), len(known)),
        "missing_required_rate": (sum(bool(_missing(*pair)) for pair in known), len(known)),
    }


def _unknown(parameters: Mapping[str, Any], arguments: Mapping[str, Any]) -> list[str]:
    if parameters.get("additionalProperties"):
        return []
    return [name for name in arguments if name not in (parameters.get("properties") or {})]


def _missing(parameters: Mapping[str, Any], arguments: Mapping[str, Any]) -> list[str]:
    return [name for name in parameters.get("required") or [] if name not in arguments]


def _all_valid(conversation: Conversation, calls: Sequence[ToolCall]) -> bool:
    offered = {tool.name: tool for tool in conversation.tools}
    return all(call.name in offered and not validate_arguments(offered[call.name], call.arguments) for call in calls)


def _same_call(left: ToolCall, right: ToolCall) -> bool:
    return left.name == right.name and same_json(left.arguments, right.arguments)


def _same_calls(calls: Sequence[ToolCall], expected: Sequence[ToolCall]) -> bool:
    """Equal as multisets; sameness is an equivalence, so that taking the first match is enough."""
    left = list(expected)
    for call in calls:
        match = next((i for i, other in enumerate(left) if _same_call(call, other)), None)
        if match is None:
            return False
        del left[match]
    return not left


def _offered(conversation: Conversation) -> set[str]:
    return {tool.name for tool in conversation.tools}


def _seen(calls: tuple[ToolCall, ...], names: tuple[str, ...]) -> tuple[str, ...]:
    """Names in call position: those of a malformed call too, and at least those of the calls."""
    return max(names, call_names(calls), key=len)


@cache
def _leak_pattern() -> re.Pattern[str]:
    tokens = {token for form in FORMATS.values() for token in form.control_tokens}
    return re.compile("|".join([*map(re.escape, sorted(tokens)), _CALL_HEAD]))


def _leaks(prediction: Prediction) -> bool:
    texts = [prediction.text, prediction.lenient.text if prediction.lenient else ""]
    return any(_leak_pattern().search(text) for text in texts)


def _reason(
    conversation: Conversation, expected: tuple[ToolCall, ...] | None, reading: Reading, prediction: Prediction
) -> str:
    """The first of: malformed, invented tool, call or no call, wrong tools, wrong arguments, wrong order."""
    got, want = call_names(reading.calls), call_names(expected or ())
    if not reading.usable:
        where = "" if prediction.stopped else ", cut off at the length limit"
        return f"malformed{where}: {' '.join(str(prediction.error).split())}"
    if invented := [name for name in reading.names if name not in _offered(conversation)]:
        return f"calls {invented[0]}, which is not offered"
    if expected is None:
        return "" if got else "no call, where one is wanted"
    if not expected:
        return f"calls {_listed(got)}, where no call is wanted" if got else ""
    if not got:
        return f"no call, expected {_listed(want)}"
    if Counter(got) != Counter(want):
        return f"calls {_listed(got)}, expected {_listed(want)}"
    if _same_calls(reading.calls, expected):
        return "" if all(map(_same_call, reading.calls, expected)) else "the expected calls in another order"
    return _argument_reason(reading.calls, expected)


def _argument_reason(calls: Sequence[ToolCall], expected: Sequence[ToolCall]) -> str:
    """The first difference between a call and the expected one of that name that no other call answers."""
    left = list(expected)
    wrong = []
    for call in calls:
        match = next((i for i, other in enumerate(left) if _same_call(call, other)), None)
        if match is None:
            wrong.append(call)
        else:
            del left[match]
    call = wrong[0]
    other = next(other for other in left if other.name == call.name)
    for name in other.arguments:
        if name not in call.arguments:
            return f"{call.name}: {name} is missing"
    for name, value in call.arguments.items():
        if name not in other.arguments:
            return f"{call.name}: {name} is not expected"
        if not same_json(value, other.arguments[name]):
            return f"{call.name}: {name} is {value!r}, expected {other.arguments[name]!r}"
    raise AssertionError("the calls are the same")


def _listed(names: Sequence[str]) -> str:
    return " + ".join(names)
