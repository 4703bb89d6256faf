"""JSON in prompts and calls, for the formats that write it: checked before it is written, and read strictly."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from portlab_spec.conversation import ToolCall
from portlab_spec.errors import UserError
from portlab_spec.formats.call_values import CallSyntaxError, checked_call, faults, finite, integer, no_number
from portlab_spec.formats.segments import plain
from portlab_spec.formats.values import MAX_DEPTH

# ------------------------------------------------------------------------------------------------ writing


def write_json(value: Any, where: str, refused: Sequence[str]) -> str:
    """A value on one line, as the `tojson` of transformers' chat templates writes it: keys in their order.

    Raises:
        UserError: it does not come back from JSON, or a text in it holds a refused token; names the part.
    """
    for path, what in faults(value):
        raise UserError(what, where=ascii(f"{where}{path}")[1:-1], fix="Mend the data")
    return plain(json.dumps(value, ensure_ascii=False), where, refused).text


def check_call(call: ToolCall, where: str, refused: Sequence[str]) -> None:
    """Refuse a call that a format cannot write.

    Raises:
        UserError: a value does not come back from JSON, or a text holds a refused token; names the argument.
    """
    for path, what in faults(call.arguments):
        raise UserError(what, where=f"{where}.arguments{path}".encode(errors="replace").decode(), fix="Mend the data")
    for path, text in (("name", call.name), *_strings(call.arguments, "arguments")):
        for token in refused:
            if token in text:
                what = f"the text holds the control token {token!r}, which the format cannot escape"
                raise UserError(what, where=f"{where}.{path}", fix="Remove or rewrite it in the data")


def _strings(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield path, key
            yield from _strings(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _strings(item, f"{path}[{i}]")


# ------------------------------------------------------------------------------------------------ reading


def read_json(text: str) -> Any:
    """The value that a text, as a whole, is.

    Raises:
        CallSyntaxError: it is no JSON, holds a number that is none, or a key twice in one object.
    """
    try:
        return json.loads(
            text, object_pairs_hook=_object, parse_constant=no_number, parse_float=finite, parse_int=integer
        )
    except RecursionError:
        raise CallSyntaxError(f"lists and objects are nested more than {MAX_DEPTH} deep") from None
    except json.JSONDecodeError as error:
        raise CallSyntaxError(f"no JSON at character {error.pos}: {error.msg}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        raise CallSyntaxError("a key stands twice in one object")
    return out


def call_of(value: Any, argument_keys: Sequence[str]) -> ToolCall:
    """The call that an object `{"name": ..., KEY: {...}}` is.

    Args:
        value: what JSON holds.
        argument_keys: the key of the arguments, and others that are read like it.

    Raises:
        CallSyntaxError: other or further keys, no name, or arguments that are no object.
    """
    keys = set(value) if isinstance(value, dict) else set()
    if not any(keys == {"name", key} for key in argument_keys):
        raise CallSyntaxError(f"a call is an object with the keys name and {argument_keys[0]}")
    name, arguments = value["name"], next(value[key] for key in argument_keys if key in value)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise CallSyntaxError(f"a call's name is text and its {argument_keys[0]} are an object")
    return checked_call(name, arguments)
