"""The order of the rows, and the iterator over packed batches that a checkpoint can hold."""

import itertools
import json
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from portlab_jax.packing import BatchOrder, Packing, plan
from portlab_jax.packing.batches import PackedBatches
from portlab_spec.data.tokens import Row
from portlab_spec.errors import UserError


def make_rows(n, *, keys=1, strata=2):
    return [
        Row(
            f"r{i}",
            (2, *(50 + 10 * (i % keys) + j for j in range(20)), 100 + i, 7),
            (False,) * 21 + (True,) * 2,
            stratum="abcdef"[i % strata],
            prefix_key=f"k{i % keys}",
        )
        for i in range(n)
    ]


def ids(batches):
    return [[row.id for row in batch] for batch in batches]


@given(st.integers(1, 30), st.integers(1, 12), st.integers(0, 3), st.integers(1, 5), st.booleans())
def test_every_row_is_used_once_per_epoch(n, batch_size, seed, keys, group_by_prefix):
    rows = make_rows(n, keys=keys)
    order = BatchOrder(rows, batch_size, 3 * n, seed, group_by_prefix=group_by_prefix)
    stream = list(itertools.chain(*ids(order)))
    for epoch in range(3):
        assert sorted(stream[epoch * n : (epoch + 1) * n]) == sorted(row.id for row in rows)


def test_every_batch_is_balanced_by_stratum():
    for batch in BatchOrder(make_rows(20), 5, 8, seed=3):
        assert 1 <= sum(row.stratum == "a" for row in batch) <= 4


def test_a_step_is_the_same_whenever_it_is_asked_for():
    rows = make_rows(20)
    order = BatchOrder(rows, 6, 30, seed=3)
    forwards = ids(order)
    assert ids(order[step] for step in reversed(range(30))) == forwards[::-1]
    assert ids(BatchOrder(rows, 6, 99, seed=3)[10:30]) == forwards[10:]
    assert ids(BatchOrder(rows, 6, 30, seed=4)) != forwards
    assert list(BatchOrder(rows, 6, 30, seed=3)) == list(order)


@pytest.mark.parametrize("n", [24, 23, 29])
def test_grouped_batches_are_of_one_prefix_wherever_the_numbers_allow(n):
    """Of 3 keys, at most 3 rests per epoch are mixed: with the rests of the epochs beside it, 3 batches."""
    rows = make_rows(n, keys=3, strata=1)
    epochs = 5
    batches = list(BatchOrder(rows, 4, epochs * n // 4, seed=0, group_by_prefix=True))
    mixed = [batch for batch in batches if len({row.prefix_key for row in batch}) > 1]
    assert len(mixed) <= (0 if n == 24 else 3 * epochs)
    assert len({batch[0].prefix_key for batch in batches[:4]}) > 1, "keys come in random order, not one after the other"


def test_grouped_batches_share_more():
    rows = make_rows(60, keys=5)
    held = [
        plan(BatchOrder(rows, 12, 10, seed=0, group_by_prefix=grouped), Packing()).held_tokens
        for grouped in (False, True)
    ]
    assert held[1] < 0.5 * held[0]


# ------------------------------------------------------------------------------------------------------- iterator


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
