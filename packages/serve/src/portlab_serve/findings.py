"""What a check found: one line each, with how to mend it."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from portlab_spec.errors import UserError

Level = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """One finding.

    Attributes:
        level: error (the server would fail, or serve something else), warning (it may) or note.
        check: which check, in a word.
        what: the fault, a plain sentence without a full stop.
        where: file or flag.
        fix: what to do.
    """

    level: Level
    check: str
    what: str
    where: str = ""
    fix: str = ""

    def __str__(self) -> str:
        line = f"{self.where}: {self.what}" if self.where else self.what
        return f"{self.level:<7} {self.check:<12} {line}" + (f". {self.fix}" if self.fix else "")

    def to_json(self) -> dict[str, Any]:
        """As an object for a machine."""
        return asdict(self)


def error(check: str, what: str, where: str = "", fix: str = "") -> Finding:
    """A finding that stops the server."""
    return Finding("error", check, what, where, fix)


def warning(check: str, what: str, where: str = "", fix: str = "") -> Finding:
    """A finding that may not matter."""
    return Finding("warning", check, what, where, fix)


def note(check: str, what: str, where: str = "", fix: str = "") -> Finding:
    """What is good to know."""
    return Finding("note", check, what, where, fix)


def of_error(check: str, raised: UserError) -> Finding:
    """The finding that an error is."""
    return Finding("error", check, raised.what, raised.where, raised.fix)


def errors_of(findings: Iterable[Finding]) -> list[Finding]:
    """Those that stop the server."""
    return [finding for finding in findings if finding.level == "error"]
