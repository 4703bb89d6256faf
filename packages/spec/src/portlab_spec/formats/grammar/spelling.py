"""How each format spells a value: what differs between their grammars."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from portlab_spec.errors import UserError
from portlab_spec.formats import gemma3_python as python
from portlab_spec.formats.grammar.lark import literal
from portlab_spec.formats.grammar.numbers import NUMBER, NUMBER_WITHOUT_BOTH
from portlab_spec.formats.markers import Markers
from portlab_spec.formats.segments import plain
from portlab_spec.formats.values import fixed_point


@dataclass(frozen=True)
class Key:
    """How a key is written: between `before` and `after`, if the format has a spelling for it.

    `free` is a regular expression of the keys to offer where a schema leaves them open.
    """

    before: str
    after: str
    allows: Callable[[str], bool]
    free: str = "[a-zA-Z_][a-zA-Z0-9_.-]{0,63}"
    fix: str = "Use letters, digits, _ . -"
    escape: Callable[[str], str] = str

    def write(self, name: str, where: str) -> str:
        """The key's text, up to its value.

        Raises:
            UserError: the format has no spelling for it.
        """
        if not self.allows(name):
            raise UserError(f"the key {name!r} cannot be written", where=where, fix=self.fix)
        return f"{self.before}{self.escape(name)}{self.after}"


@dataclass(frozen=True)
class Spelling:
    """How values are written.

    Attributes:
        refused: control tokens, which no text may spell.
        quote: the item of a grammar that opens and closes a string.
        character: regular expression of one character of a string.
        escape: the contents of a string as they are written.
        key: how the keys of an object are written.
        argument: how the names of arguments are written; like keys in most formats.
        comma: between items.
        true, false, null: literals; `null` is "" where the format cannot write one.
        number: regular expression of a number.
        write_float: text of a finite float.
        any_order: keys come in any order; otherwise sorted without regard to case.
    """

    refused: tuple[str, ...]
    quote: str
    character: str
    escape: Callable[[str], str]
    key: Key
    argument: Key
    comma: str = ","
    true: str = "true"
    false: str = "false"
    null: str = "null"
    number: str = NUMBER
    write_float: Callable[[float], str] = field(default=repr)
    any_order: bool = False

    def check(self, text: str, where: str) -> None:
        """Refuse text that no format can write.

        Raises:
            UserError: it holds a control token.
        """
        plain(text, where, self.refused)


def native(markers: Markers, key: re.Pattern[str], null: str, *, fixed: bool) -> Spelling:
    """The spelling of FunctionGemma and Gemma 4.

    Args:
        markers: the dialect's tokens.
        key: what a key must match.
        null: the text of a null, or "".
        fixed: numbers have a fraction or an exponent, not both.
    """

    bare = Key("", ":", lambda name: key.fullmatch(name) is not None)
    return Spelling(
        refused=markers.refused,
        quote=markers.quote,
        character="(?s:.)",
        escape=str,
        key=bare,
        argument=bare,
        null=null,
        number=NUMBER_WITHOUT_BOTH if fixed else NUMBER,
        write_float=fixed_point if fixed else repr,
    )


# One character of a string in JSON's spelling as `json.dumps` writes it; Python reads every one of them alike.
_JSON_CHARACTER = r'([^"\\\x00-\x1f]|\\["\\bfnrt]|\\u00[01][0-9a-f])'


def _json_body(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


_JSON_KEY = Key('"', '": ', lambda name: True, escape=_json_body)
_KEYWORD = Key(
    "", "=", python.is_identifier, "[a-zA-Z_][a-zA-Z0-9_]{0,63}", fix="Rename it, or use the format gemma3-json"
)


def json_calls(refused: tuple[str, ...]) -> Spelling:
    """The spelling of `gemma3-json`."""
    return Spelling(
        refused=refused,
        quote=literal('"'),
        character=_JSON_CHARACTER,
        escape=_json_body,
        key=_JSON_KEY,
        argument=_JSON_KEY,
        comma=", ",
        any_order=True,
    )


def python_calls(refused: tuple[str, ...]) -> Spelling:
    """The spelling of `gemma3-python`: JSON's strings and keys, Python's arguments and literals."""
    return replace(json_calls(refused), argument=_KEYWORD, true="True", false="False", null="None")
