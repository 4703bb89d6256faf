"""kill -9 at random moments: no complete checkpoint is ever lost, and the curve is that of the uninterrupted run."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TARGET = Path(__file__).with_name("kill_target.py")
SAVE_EVERY = 3


def start(model, run):
    return subprocess.Popen(
        [sys.executable, str(TARGET), str(model), str(run)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(model, run):
    process = start(model, run)
    _, stderr = process.communicate(timeout=600)
    assert process.returncode == 0, stderr
    return json.loads((run / "losses.json").read_text())


def complete_steps(run):
    return sorted(int(p.name) for p in (run / "checkpoints").glob("[0-9]*") if p.name.isdecimal())


def logged_steps(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines if line.endswith("}")]


@pytest.fixture(scope="module")
def whole(tiny_model, tmp_path_factory):
    model = tiny_model("gemma3, two kv heads").folder
    run = tmp_path_factory.mktemp("whole")
    return model, finish(model, run)


@pytest.mark.parametrize("rounds", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_runs_lose_at_most_the_steps_since_the_last_save(whole, tmp_path, rounds):
    model, expected = whole
    rng = random.Random(rounds)
    kills, newest = 0, 0
    while kills < rounds:
        process = start(model, tmp_path)
        before = time.monotonic()
        while len(complete_steps(tmp_path)) == 0 or complete_steps(tmp_path)[-1] <= newest:
            if process.poll() is not None or time.monotonic() - before > 120:
                break
            time.sleep(0.02)
        if process.poll() is not None:
            assert process.returncode == 0, process.stderr.read()
            break  # it finished: the rest of the rounds would have nothing to kill
        time.sleep(rng.uniform(0, 0.15))
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
        steps = complete_steps(tmp_path)
        assert steps[-1] >= newest, "a checkpoint was lost"
        # Saves are asynchronous: while one is being written the next few steps are taken, and two saves never overlap.
        assert max(logged_steps(tmp_path)) - steps[-1] <= 2 * SAVE_EVERY + 1
        newest = steps[-1]
    assert kills == rounds, "the run ended before it was killed so often"
    assert finish(model, tmp_path) == expected
    assert logged_steps(tmp_path) == list(range(1, len(expected) + 1))
    assert not list((tmp_path / "checkpoints").glob("*damaged*"))
