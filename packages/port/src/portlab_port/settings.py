"""What a GPU recipe says, whatever its dialect: named settings, each with its value and where it was read."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Style = Literal["trl", "axolotl", "llama-factory", "unsloth", "script", "command"]

_SECRET = re.compile(r"(^|_)(token|api_?key|secret|password)(_|$)|webhook", re.IGNORECASE)
_MOST = 80


@dataclass(frozen=True)
class Computed:
    """A value that only running the script would tell.

    Attributes:
        text: the expression as it stands.
        why: what about it is not known.
    """

    text: str
    why: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Setting:
    """One setting.

    Attributes:
        name: dialect-neutral name, a key of `rules.RULES`.
        value: the value, of the rule's kind.
        key: the name it has in its dialect.
        where: file and line, or file and key.
        default_of: the library whose default this is; empty if the file says it.
        raw: the value as it stands there, before conversion.
    """

    name: str
    value: Any
    key: str
    where: str
    default_of: str = ""
    raw: Any = None

    @property
    def text(self) -> str:
        """The value as the report shows it: as it was read; secrets are not shown."""
        return shown(self.key, self.value if self.raw is None else self.raw)


@dataclass(frozen=True)
class Unknown:
    """A key that no table of the dialect has."""

    key: str
    value: Any
    where: str

    @property
    def text(self) -> str:
        """The value as the report shows it."""
        return shown(self.key, self.value)


@dataclass(frozen=True)
class GpuRecipe:
    """A GPU recipe, read but not judged; at most one setting of a name."""

    style: Style
    source: str
    settings: tuple[Setting, ...]
    unknown: tuple[Unknown, ...] = ()

    def named(self) -> Mapping[str, Setting]:
        """Settings by neutral name."""
        return {setting.name: setting for setting in self.settings}


def shown(key: str, value: Any) -> str:
    """A value in a line of a report: YAML's words, no secrets, at most 80 characters."""
    if _is_secret(key, value):
        return "(hidden)"
    text = " ".join(_plain(value).split())
    return text if len(text) <= _MOST else f"{text[: _MOST - 3]}..."


def _plain(value: Any, depth: int = 0) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    if depth > 4:  # aliases of YAML can nest without end
        return "..."
    if isinstance(value, Mapping):
        parts = (
            f"{key}: {'(hidden)' if _is_secret(str(key), inner) else _plain(inner, depth + 1)}"
            for key, inner in value.items()
        )
        return "{" + _joined(parts) + "}"
    if isinstance(value, Iterable) and not isinstance(value, str):
        return "[" + _joined(_plain(inner, depth + 1) for inner in value) + "]"
    return str(value)


def _joined(parts: Iterable[str]) -> str:
    """As many parts as a line shows."""
    kept: list[str] = []
    length = 0
    for part in parts:
        kept.append(part)
        length += len(part)
        if length > _MOST:
            break
    return ", ".join(kept)


def _is_secret(key: str, value: Any) -> bool:
    return bool(_SECRET.search(key)) and isinstance(value, str) and bool(value) and not value.startswith("<")
