"""What an importer is told about the row it reads, and how it says that the row cannot be used."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from portlab_spec.conversation import Split, Tool
from portlab_spec.data.importers.literals import read_json
from portlab_spec.errors import UserError
from portlab_spec.tools import read_tools

CallsWithText = Literal["reject", "drop", "split"]

_SPLITS: dict[str, Split] = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
}


class RowError(Exception):
    """This row cannot be used: what is wrong, and how to mend it."""

    def __init__(self, what: str, fix: str = "Mend the value") -> None:
        self.what, self.fix = what, fix
        super().__init__(f"{what}. {fix}" if fix else what)


@dataclass(frozen=True)
class Context:
    """Where a row comes from and what holds for the whole import.

    Attributes:
        stem: name of the file without suffixes; the start of the ids of rows that have none.
        number: line of a JSON Lines file, else position of the row, from 1.
        source: name of the file.
        split: split of a row that does not say its own.
        read_tools: reads a `tools` value of any shape; raises RowError.
        shared_tools: tools of rows that carry none; called only if there is such a row.
        calls_with_text: what to do with an assistant message that holds both text and calls.
        repairs: names of what was mended in this row, in order, with repetitions.
    """

    stem: str
    number: int
    source: str
    split: Split
    read_tools: Callable[[Any], tuple[Tool, ...]]
    shared_tools: Callable[[], tuple[Tool, ...]]
    calls_with_text: CallsWithText = "reject"
    repairs: list[str] = field(default_factory=list)

    def mended(self, repair: str) -> None:
        """Note that something in the row was mended."""
        self.repairs.append(repair)

    def id_of(self, row: Mapping[str, Any]) -> str:
        """The row's `id`; a number counts rows within a file, so it gets the file's name before it."""
        value = row.get("id")
        if value is None or value == "":
            return f"{self.stem}-{self.number}"
        if isinstance(value, str):
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            return f"{self.stem}-id-{value}"
        raise RowError("id is neither text nor a whole number")

    def split_of(self, row: Mapping[str, Any]) -> Split:
        """The row's `split`, in the names of this project; `eval` is a test split."""
        value = row.get("split")
        if value is None:
            return self.split
        if (split := split_named(value)) is None:
            raise RowError(f"unknown split {value!r}", "Use train, validation or test")
        return split

    def tools_of(self, row: Mapping[str, Any], key: str = "tools") -> tuple[Tool, ...]:
        """The tools that the row offers: its own, or the shared ones if it has no such key."""
        value = row.get(key)
        return self.shared_tools() if value is None else self.read_tools(value)


def split_named(name: Any) -> Split | None:
    """The split that a usual name stands for, as in the `datasets` library; None if it is no such name."""
    return _SPLITS.get(name.lower()) if isinstance(name, str) else None


class ToolReader:
    """Reads `tools` values, each distinct tool once: the rows of a data set offer few tools, in many lists."""

    def __init__(self) -> None:
        self._by_text: dict[str, tuple[Tool, ...]] = {}

    def __call__(self, value: Any) -> tuple[Tool, ...]:
        """The tools that a `tools` value of any shape holds.

        Raises:
            RowError: they cannot be read.
        """
        if isinstance(value, str):
            if (known := self._by_text.get(value)) is None:
                known = self._by_text[value] = self._read(_decoded(value))
            return known
        return self._read(value)

    def _read(self, value: Any) -> tuple[Tool, ...]:
        entries = value if isinstance(value, list) else [value]
        return tuple(tool for i, entry in enumerate(entries) for tool in self._entry(entry, f"tools[{i}]"))

    def _entry(self, entry: Any, where: str) -> tuple[Tool, ...]:
        key = json.dumps(entry, default=repr)
        if (known := self._by_text.get(key)) is None:
            try:
                known = self._by_text[key] = read_tools(entry, where)
            except UserError as error:
                raise RowError(f"{error.where}: {error.what}", error.fix) from None
        return known


def _decoded(text: str) -> Any:
    try:
        return read_json(text) if text.strip() else []
    except ValueError as error:
        raise RowError(f"tools is not JSON ({error})") from None
