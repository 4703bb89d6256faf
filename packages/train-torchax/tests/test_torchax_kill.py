"""Signals at random moments: no checkpoint is ever lost, and the curve is that of the uninterrupted run to the bit."""

import json
import random
import re
import signal
import time

import pytest
from tiny_run import report, saved_steps
from torchax_runs import Lab

STEPS, SAVE_EVERY = 60, 3
SETTINGS = {
    "steps": STEPS,
    "save_every": SAVE_EVERY,
    "accumulate": 2,
    "max_new_tokens": 1,
    "lora": {"rank": 2, "targets": ["q_proj", "down_proj"], "dropout": 0.2},
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture(scope="module")
def expected(lab):
    """Losses of the uninterrupted run."""
    return lab.train(lab.folder / "whole", **SETTINGS)[1].log.losses


def wait_for_a_step_past(process, out, newest):
    """Wait until a run has saved another step."""
    deadline = time.monotonic() + 240
    while not [step for step in saved_steps(out) if step > newest]:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("kills", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_again_and_again_ends_as_the_whole_one(lab, expected, tmp_path, kills):
    rng, newest, arguments = random.Random(kills), 0, lab.arguments(tmp_path, **SETTINGS)
    for _ in range(kills):
        process = lab.start(arguments)
        wait_for_a_step_past(process, tmp_path, newest)
        time.sleep(rng.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        steps = saved_steps(tmp_path)
        assert steps[-1] > newest, "a checkpoint was lost"
        newest = steps[-1]
        assert newest < STEPS, "the run ended before it was killed so often"

    process = lab.start(arguments)
    wait_for_a_step_past(process, tmp_path, newest)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate()
    assert process.returncode == 143, stderr
    assert stderr.count("\n") == 1
    step = int(re.search(r"stopped by SIGTERM after step (\d+), which is saved. Run the same command", stderr)[1])
    assert saved_steps(tmp_path)[-1] == step

    done = lab.run(arguments)
    assert done.returncode == 0, done.stderr
    assert f"trained {STEPS - step} steps from step {step}" in done.stdout
    assert report(tmp_path)["loss"] == expected
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == list(enumerate(expected, 1))
    assert not [path for path in tmp_path.rglob("*") if re.search(r"partial|removed|\.new$", path.name)]
