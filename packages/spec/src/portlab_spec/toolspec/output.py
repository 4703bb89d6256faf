"""How the commands print."""

import json
import sys
from typing import Any

from rich.console import Console, RenderableType

WIDTH = 120  # of output that does not go to a terminal


def show(view: RenderableType, *, stderr: bool = False) -> None:
    """Print a view; plain text where there is no terminal."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else WIDTH
    Console(file=stream, width=width, highlight=False, soft_wrap=True, emoji=False, markup=False).print(view)


def print_json(value: Any) -> None:
    """One JSON value on stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_line(value: Any) -> None:
    """One JSON value on one line of stdout."""
    print(json.dumps(value, ensure_ascii=False))


def note(text: str) -> None:
    """A line for people, on stderr, so that stdout stays data."""
    print(text, file=sys.stderr)
