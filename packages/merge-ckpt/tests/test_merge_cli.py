"""The command line: exit codes, one-line errors, and folders that are whole or absent."""

import errno
import json
import os
import subprocess
import sys

import pytest

from portlab_merge import overlay
from portlab_merge.overlay import MergeOptions, merge

CODE = "from portlab_merge.cli import entry; entry()"


def test_nothing_heavy_is_imported():
    code = (
        "import sys, portlab_merge.cli, portlab_merge.overlay, portlab_merge.verify, portlab_merge.orbax_store, "
        "portlab_merge.report; "
        "print([m for m in ('jax', 'torch', 'transformers', 'orbax', 'safetensors', 'peft') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_help_loads_no_numerics():
    code = "import sys, portlab_merge.cli; print([m for m in ('numpy', 'tensorstore', 'pydantic') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_the_whole_way(run, command, tmp_path):
    """Plan, merge, adapter and verify with the base found through the metadata."""
    plan = command("plan", "--ckpt", run.folder)
    assert plan.returncode == 0, plan.stderr
    assert "22 of 41 tensors change" in plan.stdout
    assert command("merge", "--ckpt", run.folder, "--out", tmp_path / "m").returncode == 0
    assert command("adapter", "--ckpt", run.step, "--base", run.base, "--out", tmp_path / "a").returncode == 0
    verified = command("verify", "--ckpt", run.folder, "--merged", tmp_path / "m", "--adapter", tmp_path / "a")
    assert verified.returncode == 0, verified.stderr
    assert verified.stdout == "Verified against step 7: every tensor is what it should be.\n"


def test_rows_go_into_the_base_where_a_server_applies_none(run, command, tmp_path):
    both = ("--out", tmp_path / "a", "--rows-into", tmp_path / "rows", "--check-server", "vllm")
    refused = command("adapter", "--ckpt", run.folder, "--out", tmp_path / "a", "--check-server", "vllm")
    assert (refused.returncode, "--rows-into DIR" in refused.stderr) == (1, True)
    written = command("adapter", "--ckpt", run.folder, *both)
    assert written.returncode == 0, written.stderr
    assert f"vllm serve {tmp_path / 'rows'} --enable-lora" in written.stdout
    verify = ("verify", "--ckpt", run.folder, "--adapter", tmp_path / "a")
    assert command(*verify, "--rows-into", tmp_path / "rows").returncode == 0
    assert command(*verify).returncode == 1  # an adapter on the base as it was would be another model
    whole = command("verify", "--ckpt", run.folder, "--merged", tmp_path / "rows")
    assert whole.returncode == 1
    card = (tmp_path / "rows" / "README.md").read_text()
    assert "A part of what was trained" in card
    assert "Metrics" not in card
    same = command("adapter", "--ckpt", run.folder, "--out", tmp_path / "x", "--rows-into", tmp_path / "x")
    assert (same.returncode, "Choose two folders" in same.stderr) == (2, True)


def test_merge_prints_a_line_per_target(run, command, tmp_path):
    result = command("merge", "--ckpt", run.folder, "--out", tmp_path / "m")
    changes = json.loads((tmp_path / "m" / "merge_manifest.json").read_text())["tensors"]
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [line[0] for line in lines] == ["target", *run.tree["lora"], "model.embed_tokens.weight", "Merged"]
    norms = [changes[f"model.layers.{i}.mlp.up_proj.weight"]["relative_norm"] for i in range(3)]
    [up] = [line for line in lines if line[0] == "mlp.up_proj"]
    assert up[1:5] == ["3", "layers", f"{sum(norms) / 3:.2e}", f"{max(norms):.2e}"]
    assert lines[-2][1:3] == ["3", "rows"]


def test_merge_verbose_prints_a_line_per_tensor(run, command, tmp_path):
    result = command("merge", "--ckpt", run.folder, "--out", tmp_path / "m", "--verbose")
    changes = json.loads((tmp_path / "m" / "merge_manifest.json").read_text())["tensors"]
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["tensor", *changes, "Merged"]


def test_json_is_for_machines(run, command, tmp_path):
    plan = json.loads(command("plan", "--ckpt", run.folder, "--json").stdout)
    assert len(plan["tensors"]) == 21
    assert plan["token_rows"]["ids"] == [46, 5, 90]
    merged = json.loads(command("merge", "--ckpt", run.folder, "--out", tmp_path / "m", "--json").stdout)
    assert merged["checkpoint"]["step"] == 7
    (tmp_path / "m" / "tokenizer.json").unlink()
    verified = command("verify", "--ckpt", run.folder, "--merged", tmp_path / "m", "--json")
    assert verified.returncode == 1
    assert json.loads(verified.stdout)["faults"] == [f"{tmp_path / 'm'}: file tokenizer.json is missing"]
    assert "error" in verified.stderr


@pytest.mark.parametrize(
    "args",
    [
        ["plan"],
        ["merge", "--ckpt", "nowhere"],
        ["plan", "--ckpt", "nowhere"],
        ["plan", "--ckpt", ".", "--step", "soon"],
        ["verify", "--ckpt", "."],
        ["fly"],
    ],
)
def test_bad_usage_is_2(command, args):
    result = command(*args)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


def test_an_error_is_one_line(run, command, tmp_path):
    result = command("plan", "--ckpt", run.folder, "--base", tmp_path)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("merge-ckpt: error: ")


def test_all_problems_are_printed(make_run, base, command):
    def spoil(tree, metadata):
        metadata["lora"]["scaling"] = 3.0
        metadata["lora"]["targets"].append("lm_head")

    result = command("plan", "--ckpt", make_run(base, spoil).folder)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 3
    assert "  - scaling 3 is not" in result.stderr
    assert "  - target lm_head" in result.stderr


def test_an_unknown_base_path_asks_for_one(make_run, base, command):
    run = make_run(base, lambda tree, m: m["base"].update(path="/gone"))
    result = command("plan", "--ckpt", run.folder)
    assert result.returncode == 2
    assert "Pass --base DIR" in result.stderr


def test_skipped_steps_are_mentioned(run, command):
    (run.step.parent / "8").mkdir()
    result = command("plan", "--ckpt", run.folder)
    assert result.returncode == 0
    assert result.stderr == "merge-ckpt: passed over step 8: no _CHECKPOINT_METADATA\n"


def test_a_full_disk_leaves_nothing(run, tmp_path, monkeypatch, capsys):
    write, written = os.write, 0

    def until_full(handle, data):
        nonlocal written
        written += len(data)
        if written > 50_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, data)

    monkeypatch.setattr(overlay.os, "write", until_full)
    with pytest.raises(OSError, match=r"model\.safetensors") as caught:
        merge(run.plan(), tmp_path / "new" / "out", MergeOptions())
    assert caught.value.errno == errno.ENOSPC
    assert list((tmp_path / "new").iterdir()) == []


def test_too_small_a_disk_is_refused_before_writing(run, command, tmp_path, monkeypatch):
    from portlab_spec import files

    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(files.UserError, match="Free some space"):
        merge(run.plan(), tmp_path / "new" / "out", MergeOptions())
    assert not (tmp_path / "new").exists()
