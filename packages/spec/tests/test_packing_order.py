"""The order of the rows: each once an epoch, balanced, the same whenever it is asked for."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from portlab_spec.data.tokens import Row
from portlab_spec.packing import BatchOrder, Packing, plan


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
