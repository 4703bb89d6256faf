"""The whole command, in processes of its own, on a tiny model: outcome, caching, signals, eight devices, disk full."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import orbax.checkpoint as ocp
import pytest

from portlab_jax import cli as train_cli
from portlab_spec import cli, files

STEPS = 8


def command(model, out, *extra):
    return [
        sys.executable, "-m", "portlab_jax", "--model", str(model), "--out", str(out), "--steps", str(STEPS),
        "--batch-size", "16", "--save-every", "2", "--max-new-tokens", "4", *extra,
    ]  # fmt: skip


def run(model, out, *extra, env=None):
    return subprocess.run(
        command(model, out, *extra), capture_output=True, text=True, env={**os.environ, **(env or {})}, check=False
    )


def losses(out: Path):
    return json.loads((out / "report.json").read_text())["loss"]


def metrics(out: Path):
    path = out / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope="module")
def whole(tiny_chat_folder, tmp_path_factory):
    """An uninterrupted run."""
    out = tmp_path_factory.mktemp("whole") / "run"
    done = run(tiny_chat_folder, out)
    assert done.returncode == 0, done.stderr
    return out, done


def test_it_leaves_every_result(whole):
    out, done = whole
    names = ["report.json", "loss.png", "before.json", "after.json", "merged/model.safetensors"]
    names += ["merged/tokenizer.json", "adapter/adapter_model.safetensors", "adapter/adapter_config.json"]
    for name in names:
        assert (out / name).stat().st_size > 0
    assert not [p for p in out.rglob("*") if "partial" in p.name or p.name.endswith(".new")]
    assert "Question:" in done.stdout
    assert "call_exact" in done.stdout
    assert "Traceback" not in done.stderr


def test_report_follows_the_schema(whole):
    out, _ = whole
    report = json.loads((out / "report.json").read_text())
    assert report["backend"] == "jax"
    assert len(report["loss"]) == STEPS
    assert set(report["seconds"]) == {"prepare", "before", "train", "after", "export"}
    for when in ("before", "after"):
        metric = report[when]["metrics"]["call_exact"]
        assert set(metric) == {"value", "low", "high", "hits", "count"}
        assert metric["count"] == 63
    assert report["recipe"]["steps"] == STEPS
    assert report["peak_rss_bytes"] > 0


def test_metrics_have_a_line_for_each_step(whole):
    lines = metrics(whole[0])
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in lines] == losses(whole[0])


def test_a_second_run_reuses_every_stage(whole, tiny_chat_folder):
    out, _ = whole
    before = losses(out)
    again = run(tiny_chat_folder, out)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("(cached)") == 4
    assert losses(out) == before


def test_a_damaged_export_is_made_again(whole, tiny_chat_folder):
    out, _ = whole
    good = (out / "merged/model.safetensors").read_bytes()
    (out / "merged/model.safetensors").write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    again = run(tiny_chat_folder, out)
    assert again.returncode == 0, again.stderr
    assert "exported" in again.stdout
    assert (out / "merged/model.safetensors").read_bytes() == good


def test_other_settings_in_the_same_folder_are_refused(whole, tiny_chat_folder):
    out, _ = whole
    done = run(tiny_chat_folder, out, "--seed", "7")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "other settings (seed)" in done.stderr


def has_checkpoint(run):
    """Early steps soon make way for later ones, so any complete one will do."""
    return any(path.name.isdecimal() for path in (run / "checkpoints").glob("*"))


def test_kill_minus_nine_loses_nothing_of_the_curve(whole, tiny_chat_folder, tmp_path):
    out = tmp_path / "run"
    process = subprocess.Popen(command(tiny_chat_folder, out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not has_checkpoint(out) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (out / "report.json").exists(), "the run ended before it was killed"
    done = run(tiny_chat_folder, out)
    assert done.returncode == 0, done.stderr
    assert losses(out) == losses(whole[0])
    assert (out / "adapter/adapter_model.safetensors").read_bytes() == (
        whole[0] / "adapter/adapter_model.safetensors"
    ).read_bytes()


def test_sigterm_saves_and_the_same_command_goes_on(whole, tiny_chat_folder, tmp_path):
    out = tmp_path / "run"
    process = subprocess.Popen(
        command(tiny_chat_folder, out), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while not metrics(out) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 143, stderr
    assert stderr.count("\n") == 1
    step = int(re.search(r"stopped by SIGTERM after step (\d), which is saved", stderr)[1])
    assert (out / "checkpoints" / str(step)).is_dir()
    done = run(tiny_chat_folder, out)
    assert done.returncode == 0, done.stderr
    assert f"trained {STEPS - step} steps from step {step}" in done.stdout
    assert losses(out) == losses(whole[0])
    assert [line["step"] for line in metrics(out)] == list(range(1, STEPS + 1))


def test_the_same_command_gives_the_same_bytes(whole, tiny_chat_folder, tmp_path):
    done = run(tiny_chat_folder, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    for name in ("adapter/adapter_model.safetensors", "merged/model.safetensors", "after.json"):
        ours, theirs = (tmp_path / "run" / name), (whole[0] / name)
        if name == "after.json":
            assert json.loads(ours.read_text())["outputs"] == json.loads(theirs.read_text())["outputs"]
        else:
            assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize(
    "mesh", [[], ["--mesh.data", "2", "--mesh.fsdp", "2", "--mesh.tp", "2"]], ids=["data", "2x2x2"]
)
def test_eight_devices_give_the_same_curve(whole, tiny_chat_folder, tmp_path, mesh):
    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = run(tiny_chat_folder, tmp_path / "run", *mesh, env=env)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["device"]["count"] == 8
    np.testing.assert_allclose(report["loss"], losses(whole[0]), rtol=1e-5)


def test_ctrl_c_is_one_line_and_leaves_nothing_half_written(tiny_chat_folder, tmp_path):
    out = tmp_path / "run"
    process = subprocess.Popen(
        command(tiny_chat_folder, out, "--steps", "500"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while not has_checkpoint(out) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    try:
        _, stderr = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130
    assert stderr.count("\n") == 1
    assert "interrupted" in stderr
    assert not [p for p in out.rglob("*") if "tmp" in p.name or "partial" in p.name]


@pytest.fixture
def refused(tiny_chat_folder, tmp_path, capsys):
    """Run train-jax in this process and return its one line of complaint."""

    def call():
        arguments = command(tiny_chat_folder, tmp_path / "run")[3:]
        with pytest.raises(SystemExit) as end:
            cli.run("train-jax", train_cli.main, arguments)
        error = capsys.readouterr().err
        assert end.value.code == 2, error
        assert error.count("\n") == 1
        return error

    return call


def test_a_disk_too_small_is_refused_before_anything_is_written(refused, tmp_path, monkeypatch):
    monkeypatch.setattr(files.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    assert "GB free" in refused()
    assert not (tmp_path / "run").exists()


def test_a_disk_that_fills_up_while_saving_is_one_line(refused, tmp_path, monkeypatch):
    """Orbax reports it as a ValueError, from a later call than the one that failed."""
    closed = ocp.CheckpointManager.close

    def fail(manager):
        closed(manager)
        (tmp_path / "run/checkpoints/9.orbax-checkpoint-tmp").mkdir()
        raise ValueError("RESOURCE_EXHAUSTED: Error writing local file: No space left on device")

    monkeypatch.setattr(ocp.CheckpointManager, "close", fail)
    assert "the disk is full, the checkpoint could not be written" in refused()
    assert not list((tmp_path / "run/checkpoints").glob("*tmp*"))


def test_a_failed_export_is_one_line_with_its_own_exit_code(refused, tmp_path, monkeypatch):
    told = subprocess.CompletedProcess([], 2, "", "merge-ckpt: error: out: the disk is full. Free some space\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: told)
    assert refused() == "train-jax: error: merge-ckpt merge: out: the disk is full. Free some space\n"
    assert not (tmp_path / "run" / "merged").exists()
