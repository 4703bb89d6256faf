"""Programs of other environments, run as processes that leave nothing behind."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from portlab_spec.errors import UserError

GRACE_SECONDS = 10.0  # between asking a program to end, and ending it
LAST_LINES = 3  # of a log in the message on a program that failed


@contextlib.contextmanager
def child_process(
    command: Sequence[str], environment: Mapping[str, str], log: IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    """A child in a process group of its own, which is gone afterwards, whatever happens: with its own children.

    Args:
        command: program and arguments.
        environment: variables beside ours.
        log: takes what it prints.

    Raises:
        UserError: the program cannot be run.
    """
    try:
        # Unbuffered, so that the log of one that is ended holds its last words.
        variables = os.environ | {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"} | dict(environment)
        process = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise UserError(f"cannot be run ({error.strerror})", where=command[0], fix="Check --python") from None
    try:
        yield process
    finally:
        for number, patience in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, None)):
            if process.poll() is not None:
                break
            os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience)
        # The leader is gone; what it started and left behind goes too.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def last_words(log: Path) -> str:
    """Why a program failed: the error line of one of ours, else the end of its log."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if ": error: " in line]
    return errors[-1] if errors else " / ".join(lines[-LAST_LINES:]) or "it said nothing"
