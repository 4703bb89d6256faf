"""Progress bars on stderr: shown on a terminal, silent elsewhere."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Advance = Callable[[float, str], None]


@contextlib.contextmanager
def bar(title: str, total: float | None) -> Iterator[Advance]:
    """A bar for one piece of work.

    Args:
        title: what is done.
        total: units of work; None while unknown shows a pulse.

    Yields:
        advance(units_done_so_far, note).
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description:<28}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(title, total=total, note="")

        def advance(done: float, note: str = "") -> None:
            progress.update(task, completed=done, note=note)

        yield advance
        if total is not None:
            progress.update(task, completed=total)
