"""merge-ckpt as a process of its own: its complaint and its exit code become the trainer's."""

import importlib.util
import subprocess
import sys

import pytest

from portlab_spec.errors import CheckFailed, UserError
from portlab_spec.run.export import require_merge_ckpt, run_merge_ckpt


@pytest.fixture
def ends(monkeypatch):
    """Lets merge-ckpt end with an exit code and a complaint; returns the command lines that were run."""
    lines = []

    def end(code, stderr=""):
        def run(command, **_):
            lines.append(command)
            return subprocess.CompletedProcess(command, code, "", stderr)

        monkeypatch.setattr(subprocess, "run", run)
        return lines

    return end


def test_it_runs_beside_the_trainer(ends):
    lines = ends(0)
    run_merge_ckpt("verify", "--base", "b")
    assert lines == [[sys.executable, "-m", "portlab_merge", "verify", "--base", "b"]]


@pytest.mark.parametrize(("code", "kind"), [(1, CheckFailed), (2, UserError)])
def test_its_complaint_becomes_ours(ends, code, kind):
    ends(code, "a warning\nmerge-ckpt: error: base: is not a folder\n")
    with pytest.raises(UserError, match=r"^merge-ckpt merge: base: is not a folder$") as failed:
        run_merge_ckpt("merge")
    assert type(failed.value) is kind


def test_a_silent_end_is_told_by_its_code(ends):
    ends(-9)
    with pytest.raises(UserError, match="ended with exit code -9"):
        run_merge_ckpt("merge")


def test_without_it_there_is_one_line(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"merge-ckpt is not installed\. Install packages/merge-ckpt"):
        require_merge_ckpt()
