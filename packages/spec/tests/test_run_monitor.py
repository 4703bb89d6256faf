"""Watching a run: losses that are no numbers, patience, rates."""

import pytest

from portlab_spec.errors import CheckFailed
from portlab_spec.run.monitor import Throughput, Work, patience_is_over, require_finite

NAN, INF = float("nan"), float("inf")


def test_finite_numbers_pass():
    require_finite(0.0, 1e30, 1, ["a"])


@pytest.mark.parametrize(
    ("loss", "norm", "says"),
    [
        (NAN, 1.0, "the loss of step 4 is nan"),
        (INF, NAN, "the loss of step 4 is inf"),
        (2.5, INF, "the gradient norm of step 4 is inf, with a loss of 2.5"),
    ],
)
def test_anything_else_names_the_step_and_its_rows(loss, norm, says):
    with pytest.raises(CheckFailed) as failed:
        require_finite(loss, norm, 4, ["steps-01", "steps-07"])
    assert says in str(failed.value)
    assert "look at its rows: steps-01, steps-07" in str(failed.value)


def test_a_large_batch_is_not_named_whole():
    with pytest.raises(CheckFailed, match=r"r31 and 68 more$"):
        require_finite(NAN, 1.0, 1, [f"r{i}" for i in range(100)])


@pytest.mark.parametrize(
    ("losses", "patience", "over"),
    [
        ([], 2, False),
        ([3, 2, 1], 1, False),
        ([3, 2, 2], 1, True),  # a tie is no improvement
        ([3, 2, 4, 5], 3, False),
        ([3, 2, 4, 5], 2, True),
        ([3, 4, 2, 5], 2, False),
        ([3, 4, 5, 6], 0, False),
    ],
)
def test_patience(losses, patience, over):
    assert patience_is_over(list(enumerate(losses)), patience) is over


def test_rates_leave_out_the_steps_that_compiled():
    throughput = Throughput(devices=2, device_kind="TPU v5 lite")
    throughput.add(Work(32, 9000, 1300, 10**12), 60.0, compiled=True)
    assert throughput.rates() == {}
    for seconds in (0.5, 1.5):
        throughput.add(Work(32, 9000, 1300, 197 * 10**12), seconds, compiled=False)
    assert throughput.rates() == {
        "seconds_per_step": 1.0,
        "examples_per_second": 32,
        "tokens_per_second": 9000,
        "computed_tokens_per_second": 1300,
        "mfu": 0.5,
    }


def test_an_unknown_device_gets_no_mfu():
    throughput = Throughput(devices=1, device_kind="cpu")
    throughput.add(Work(1, 1, 1, 1), 1.0, compiled=False)
    assert "mfu" not in throughput.rates()
