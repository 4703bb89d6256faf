"""Exports by merge-ckpt, which no trainer imports: it runs in a process of its own."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from portlab_spec.data.tokens import Row
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


def export_merged(base: Path, adapter: Path, merged: Path) -> None:
    """Merge the adapter into the base with merge-ckpt, and verify the result against both."""
    common = ("--base", str(base), "--ckpt", str(adapter))
    fresh = merged.with_name(f"{merged.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    run_merge_ckpt("merge", *common, "--out", str(fresh))
    shutil.rmtree(merged, ignore_errors=True)
    fresh.rename(merged)
    run_merge_ckpt("verify", *common, "--merged", str(merged))


def golden_logits(row: Row, topk_ids: np.ndarray, topk_logits: np.ndarray) -> dict[str, Any]:
    """Logits of a row at its supervised tokens, for merge-ckpt and others to verify an export by.

    Args:
        row: of the data.
        topk_ids: integers (S, K), the likeliest tokens at each of the S tokens that predict a supervised one, in order.
        topk_logits: float (S, K), theirs.
    """
    return {
        "token_ids": [int(i) for i in row.ids],
        "positions": [i - 1 for i, held in enumerate(row.loss) if held],
        "topk_ids": topk_ids.tolist(),
        "topk_logits": [[round(float(v), 6) for v in line] for line in topk_logits],
    }
