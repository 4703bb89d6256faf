"""The iterator over packed batches: in order, packed ahead, and restored from where a checkpoint stood."""

import json
import time

import numpy as np
import pytest

from portlab_jax.batches import PackedBatches
from portlab_spec.data.tokens import Row
from portlab_spec.errors import UserError
from portlab_spec.packing import BatchOrder, Packing, plan


def make_rows(n, *, strata=2):
    return [
        Row(
            f"r{i}",
            (2, *range(50, 70), 100 + i, 7),
            (False,) * 21 + (True,) * 2,
            stratum="abcdef"[i % strata],
            prefix_key="k0",
        )
        for i in range(n)
    ]


def ids(batches):
    return [[row.id for row in batch] for batch in batches]


def as_it_is(step):
    return step


@pytest.fixture
def open_batches():
    """Opens the batches of a run of 9 steps over some rows."""

    def start(rows, *, steps=9, batch_size=4, seed=0):
        order = BatchOrder(rows, batch_size, steps, seed)
        return PackedBatches(order, plan(order, Packing()), as_it_is)

    return start


def test_batches_come_in_order_and_packed(open_batches):
    rows = make_rows(10)
    steps = list(open_batches(rows))
    assert [step.number for step in steps] == list(range(9))
    assert ids(step.rows for step in steps) == ids(BatchOrder(rows, 4, 9, 0))
    for step in steps:
        assert step.batch.weights.sum() == sum(sum(row.loss) for row in step.rows)


@pytest.mark.parametrize("taken", [0, 1, 4, 9])
def test_a_restored_iterator_neither_repeats_nor_skips(open_batches, taken):
    rows = make_rows(10)
    whole = list(open_batches(rows))
    first = open_batches(rows)
    for _ in range(taken):
        next(first)
    state = json.loads(json.dumps(first.get_state()))
    resumed = open_batches(rows)
    resumed.set_state(state)
    rest = list(resumed)
    assert [step.number for step in rest] == [step.number for step in whole[taken:]]
    for a, b in zip(rest, whole[taken:], strict=True):
        assert a.rows == b.rows
        np.testing.assert_array_equal(a.batch.rows.tokens, b.batch.rows.tokens)


def test_a_longer_run_goes_on(open_batches):
    rows = make_rows(10)
    batches = open_batches(rows)
    state = [batches.get_state() for _ in batches][-1]
    longer = open_batches(rows, steps=11)
    longer.set_state(state)
    assert [step.number for step in longer] == [9, 10]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"rows": make_rows(9)}, r"^the training rows differ from those the checkpoint .* \(10 rows then, 9 now\)"),
        ({"rows": make_rows(10)[::-1]}, r"^the training rows differ"),
        ({"rows": make_rows(10, strata=3)}, r"^the training rows differ"),
        ({"batch_size": 5}, r"^batch_size is 5, and the checkpoint was written with 4"),
        ({"seed": 1}, r"^seed is 1, and the checkpoint was written with 0"),
    ],
)
def test_a_state_of_other_rows_is_refused(open_batches, change, error):
    state = open_batches(make_rows(10)).get_state()
    other = open_batches(**{"rows": make_rows(10)} | change)
    with pytest.raises(UserError, match=error):
        other.set_state(state)


def test_a_step_is_prepared_before_it_is_asked_for():
    prepared = []

    def prepare(step):
        prepared.append(step.number)
        return step

    order = BatchOrder(make_rows(8), 4, 6, 0)
    batches = PackedBatches(order, plan(order, Packing()), prepare, ahead=2)
    next(batches)
    deadline = time.monotonic() + 10
    while len(prepared) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert prepared[:3] == [0, 1, 2]
    assert batches.get_state()["grain"] == {"next_index": 1}, "what waits was not handed out"


def test_a_fault_of_packing_reaches_the_caller():
    rows = make_rows(8)
    order = BatchOrder(rows, 4, 2, 0)
    planned = plan([[Row("short", (2, 5), (False, True))]] * 2, Packing())
    with pytest.raises(UserError, match="Plan the layout over these rows"):
        next(PackedBatches(order, planned, as_it_is))
