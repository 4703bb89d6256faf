"""Exports by merge-ckpt, which no trainer imports: it runs in a process of its own."""

import importlib.util
import subprocess
import sys

from portlab_spec.errors import CheckFailed, UserError
from portlab_spec.progress import bar


def require_merge_ckpt() -> None:
    """Refuse to export without merge-ckpt.

    Raises:
        UserError: it is not installed.
    """
    if importlib.util.find_spec("portlab_merge") is None:
        raise UserError("merge-ckpt is not installed", fix="Install packages/merge-ckpt beside this trainer")


def run_merge_ckpt(command: str, *arguments: str) -> None:
    """Run `merge-ckpt COMMAND ARGUMENTS`; its complaint and exit code become ours.

    Raises:
        UserError: it refused its input, or broke down.
        CheckFailed: a check of its result failed.
    """
    with bar(f"merge-ckpt {command}", None):
        done = subprocess.run(
            [sys.executable, "-m", "portlab_merge", command, *arguments], capture_output=True, text=True, check=False
        )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"ended with exit code {done.returncode}"]
        kind = CheckFailed if done.returncode == CheckFailed.exit_code else UserError
        raise kind(lines[-1].removeprefix("merge-ckpt: error: "), where=f"merge-ckpt {command}")
