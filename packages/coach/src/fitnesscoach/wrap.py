"""Wraps text at words while it is still arriving."""

import re
import sys

from rich.cells import cell_len, chop_cells

UNLIMITED = sys.maxsize  # a width that breaks nothing
_LONGEST = 24  # cells of a word that is waited for; scripts without spaces arrive in pieces of this size
_PIECES = re.compile(r"\n|[^\S\n]+|\S+")


class WordWrap:
    """Breaks a stream of text between words, so that no line is wider than a terminal.

    A word is held back until its end is known.

    Args:
        width: cells of a line.
        indent: cells before each line; those of the first are already on the screen.
    """

    def __init__(self, width: int, indent: int) -> None:
        self._width, self._indent, self._column = width, indent, indent
        self._held = self._space = self._margin = ""

    def feed(self, text: str) -> str:
        """What can be printed now that `text` has arrived."""
        pieces = _PIECES.findall(self._held + text)
        may_go_on = bool(pieces) and not pieces[-1].isspace() and cell_len(pieces[-1]) < _LONGEST
        self._held = pieces.pop() if may_go_on else ""
        return "".join(map(self._place, pieces))

    def end(self) -> str:
        """What was held back."""
        held, self._held = self._held, ""
        return self._place(held) if held else ""

    def whole(self, text: str) -> str:
        """A text that is all there."""
        return self.feed(text) + self.end()

    def _place(self, piece: str) -> str:
        if piece == "\n":
            return self._new_line()
        if piece.isspace():
            self._space += " " * cell_len(piece.expandtabs(4))
            return ""
        broken = ""
        if self._column > self._indent and cell_len(piece) > self._room():
            broken = self._new_line()
        if self._column == self._indent:  # an indented line of a list, say; however deep, words have room
            self._space = self._space[: max(0, self._width - self._indent) // 2]
        start = self._margin + self._space
        lines = chop_cells(piece, max(1, self._room())) if cell_len(piece) > self._room() else [piece]
        self._column = cell_len(lines[-1]) + (self._indent if len(lines) > 1 else self._column + len(self._space))
        self._space = self._margin = ""
        return broken + start + ("\n" + " " * self._indent).join(lines)

    def _room(self) -> int:
        """Cells left for a word on this line."""
        return self._width - self._column - len(self._space)

    def _new_line(self) -> str:
        self._column, self._space = self._indent, ""
        self._margin = " " * self._indent  # comes with the first word: an empty line has none
        return "\n"
