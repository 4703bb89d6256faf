"""The transcript of what a session did: JSON Lines, one object per step, written as it happens.

{"turn": 1, "step": "question", "text": ...}
{"turn": 1, "step": "model", "model": ..., "prompt": ..., "raw": ..., "calls": [...], "text": ..., "error": null, ...}
{"turn": 1, "step": "tool", "call": {...}, "status": "ok", "response": {...}, "seconds": ...}
{"turn": 1, "step": "finish", "outcome": "answered", "text": ..., "detail": "", "seconds": ...}

Nothing is shortened: the file holds what the model was sent, and so what was recorded of the person.
"""

import json
from pathlib import Path
from typing import Any, Self, TextIO

from fitnesscoach.backends import Answer
from fitnesscoach.loop import Finish
from fitnesscoach.tools import ToolResult


class Trace:
    """Writes a transcript, and remembers the last turn; without a file it only remembers."""

    def __init__(self, stream: TextIO | None = None, *, session: int = 0) -> None:
        self._stream, self._session = stream, session
        self._turn = self._sessions = 0
        self._rows: list[dict[str, Any]] = []

    @classmethod
    def open(cls, path: Path | None) -> Self:
        """A transcript at the end of a file; none for None.

        Raises:
            OSError: the file cannot be written.
        """
        if path is None:
            return cls()
        path.parent.mkdir(parents=True, exist_ok=True)
        return cls(path.open("a", encoding="utf-8"))

    def for_session(self) -> "Trace":
        """A transcript in the same file for one of several conversations, told apart by `session`."""
        self._sessions += 1
        return Trace(self._stream, session=self._sessions)

    def question(self, text: str) -> None:
        """A turn begins."""
        self._turn += 1
        self._rows = []
        self._write("question", text=text)

    def model(self, name: str, answer: Answer, seconds: float) -> None:
        """The model answered."""
        said = answer.usable
        self._write(
            "model",
            model=name,
            prompt=answer.prompt,
            raw=answer.raw,
            calls=[call.model_dump() for call in said.calls],
            text=said.text,
            error=said.error,
            lenient=said is not answer.strict,
            seconds=round(seconds, 4),
        )

    def tool(self, result: ToolResult) -> None:
        """A call was checked, and ran unless it was refused."""
        self._write(
            "tool",
            call=result.call.model_dump(),
            status=result.status,
            response=result.response,
            seconds=round(result.seconds, 4),
        )

    def finish(self, finish: Finish, seconds: float) -> None:
        """The turn is over."""
        self._write(
            "finish", outcome=finish.outcome, text=finish.spoken, detail=finish.detail, seconds=round(seconds, 4)
        )

    def last_turn(self) -> list[str]:
        """The steps of the last turn, a line each."""
        return [_line(row) for row in self._rows]

    def close(self) -> None:
        """Close the file."""
        if self._stream:
            self._stream.close()

    def _write(self, step: str, **fields: Any) -> None:
        row = {**({"session": self._session} if self._session else {}), "turn": self._turn, "step": step, **fields}
        self._rows.append(row)
        if self._stream:
            self._stream.write(json.dumps(row, ensure_ascii=False) + "\n")
            self._stream.flush()  # whoever watches the file sees the step; a crash keeps it


def _line(row: dict[str, Any]) -> str:
    seconds = f"{row['seconds']:.2f} s" if "seconds" in row else ""
    match row["step"]:
        case "model":
            raw = " ".join(row["raw"].split())
            text = f"{seconds}, prompt of {len(row['prompt']):,} characters, answered {raw[:400]}"
        case "tool":
            text = f"{seconds}, {row['call']['name']} {row['status']}: {json.dumps(row['response'])[:400]}"
        case "finish":
            text = f"{seconds}, {row['outcome']}" + (f": {row['detail']}" if row["detail"] else "")
        case _:
            text = " ".join(row["text"].split())[:400]
    return f"{row['step']:<10}{text}"
