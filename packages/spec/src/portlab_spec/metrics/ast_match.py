"""Whether calls are right under the rules of the Berkeley Function Calling Leaderboard (BFCL v4).

BFCL compares calls with *accepted values*: for each call of the right answer a list of acceptable values per
parameter, in which the empty string also says that the parameter may be left out. The rules, as its AST checker
applies them (bfcl-eval 2026.3.23, `eval_checker/ast_eval/ast_checker.py`):

- As many calls as expected, in any order, one to one. The tool's name is exact.
- Every required parameter is given; every other one too, unless its accepted values hold the empty string. A
  parameter that is not declared or has no accepted values is refused.
- The value has the declared type (an integer passes for a number, a boolean for neither, an undeclared type
  means string) or else the type of the first accepted value, which then must be met to the letter. The same holds
  for the items of an array, except that no integer passes for a number there.
- Strings are equal if they are so without case, spaces and `,./-_*^`, and with `'` for `"`. This reaches into
  the items of an array and the values of an object, but not deeper.
- An object has accepted values per key; an array of objects has them per item, in order. Deeper down values are
  compared as Python does: 1, 1.0 and true are equal.
- An empty array is accepted where a parameter may be left out.

bench/bfcl_agreement.py runs both checkers over BFCL's data and counts the verdicts that agree.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from portlab_spec.conversation import Tool, ToolCall
from portlab_spec.tools import json_type

OMITTED = ""  # among accepted values: the parameter may be left out

Accepted = Mapping[str, Mapping[str, Sequence[Any]]]
"""One expected call: its name, and the accepted values of each parameter."""

_IGNORED = re.compile(r"[ ,./\-_*^]")


def match_calls(calls: Sequence[ToolCall], accepted: Sequence[Accepted], tools: Sequence[Tool]) -> bool:
    """Whether the calls answer the expected ones, one to one in any order."""
    if len(calls) != len(accepted):
        return False
    declared = {tool.name: tool for tool in tools}
    fits = [[_fits(call, expected, declared) for call in calls] for expected in accepted]
    return _can_pair(fits)


def accepted_calls(calls: Sequence[ToolCall], tools: Sequence[Tool]) -> list[Accepted]:
    """Expected calls with their own values as the only accepted ones, for data without alternatives."""
    declared = {tool.name: tool.parameters for tool in tools}
    result: list[Accepted] = []
    for call in calls:
        properties = _properties(declared.get(call.name, {}))
        result.append({call.name: {k: [_alone(v, properties.get(k, {}))] for k, v in call.arguments.items()}})
    return result


def refusal(tool: Tool, arguments: Mapping[str, Any], accepted: Mapping[str, Sequence[Any]]) -> str:
    """Why arguments are not accepted, on one line; empty if they are."""
    properties = _properties(tool.parameters)
    for name in tool.parameters.get("required") or []:  # type: ignore[union-attr]
        if name not in arguments:
            return f"{name} is missing"
    for name, value in arguments.items():
        if name not in properties or name not in accepted:
            return f"{name} is not expected"
        if not accepts(properties[name], value, accepted[name]):
            return f"{name} is {value!r}, accepted: {', '.join(map(repr, accepted[name]))}"
    for name, values in accepted.items():
        if name not in arguments and OMITTED not in values:
            return f"{name} is missing"
    return ""


def accepts(schema: Mapping[str, Any], value: Any, accepted: Sequence[Any]) -> bool:
    """Whether one value is among the accepted ones of a parameter."""
    declared = schema.get("type", "string")
    given = json_type(value)
    if declared == "number" and given == "integer":
        given = "number"
    exemplar = next((json_type(option) for option in accepted if option != OMITTED), None)
    if given not in (declared, exemplar):
        return False
    if given == declared == "array" and not _items_typed(schema, value, accepted):
        return False
    if given != declared or exemplar not in (None, declared):
        return value in accepted
    if declared == "object":
        return any(_same_object(value, option) for option in accepted if option != OMITTED)
    if declared == "array" and _items(schema).get("type") == "object":
        return any(_same_objects(value, option) for option in accepted)
    if declared in ("array", "string"):
        return _plain(value) in [_plain([] if declared == "array" and o == OMITTED else o) for o in accepted]
    return value in accepted


def alternatives_of(values: Any) -> list[Any]:
    """The accepted values of a name; a bare value, which a few rows have, stands for itself alone."""
    return values if isinstance(values, list) else [values]


def _fits(call: ToolCall, expected: Accepted, declared: Mapping[str, Tool]) -> bool:
    ((name, accepted),) = expected.items()
    return call.name == name and name in declared and not refusal(declared[name], call.arguments, accepted)


def _can_pair(fits: Sequence[Sequence[bool]]) -> bool:
    """Whether every row can be given a column of its own in which it is true (augmenting paths)."""
    owner: dict[int, int] = {}

    def place(row: int, tried: set[int]) -> bool:
        for column, fit in enumerate(fits[row]):
            if fit and column not in tried:
                tried.add(column)
                if column not in owner or place(owner[column], tried):
                    owner[column] = row
                    return True
        return False

    return all(place(row, set()) for row in range(len(fits)))


def _items_typed(schema: Mapping[str, Any], value: list[Any], accepted: Sequence[Any]) -> bool:
    """Whether the items have the declared type, or that of the items of one accepted array."""
    if "items" not in schema:
        return True
    declared = _items(schema).get("type", "string")
    for option in accepted:
        if not isinstance(option, list):
            return True
        exemplar = next((json_type(item) for item in option if item != OMITTED), None)
        if all(json_type(item) in (declared, exemplar) for item in value):
            return True
    return False


def _same_object(value: Mapping[str, Any], option: Any) -> bool:
    if not isinstance(value, Mapping) or not isinstance(option, Mapping) or not value.keys() <= option.keys():
        return False
    return all(
        _plain_text(value[key]) in map(_plain_text, values) if key in value else OMITTED in values
        for key, values in ((key, alternatives_of(item)) for key, item in option.items())
    )


def _same_objects(value: Sequence[Any], option: Any) -> bool:
    return len(value) == len(option) and all(map(_same_object, value, option))


def _plain(value: Any) -> Any:
    """A string, or the strings directly in an array, as they are compared."""
    return [_plain_text(item) for item in value] if isinstance(value, list) else _plain_text(value)


def _plain_text(value: Any) -> Any:
    return _IGNORED.sub("", value).lower().replace("'", '"') if isinstance(value, str) else value


def _alone(value: Any, schema: Mapping[str, Any]) -> Any:
    """A value as its own accepted form: objects hold lists of accepted values per key."""
    if isinstance(value, Mapping) and schema.get("type") == "object":
        return {key: [item] for key, item in value.items()}
    if isinstance(value, list) and _items(schema).get("type") == "object":
        return [{k: [v] for k, v in item.items()} if isinstance(item, Mapping) else item for item in value]
    return value


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    return schema.get("properties") or {}


def _items(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    return schema.get("items") or {}
