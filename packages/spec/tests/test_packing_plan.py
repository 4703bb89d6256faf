"""Static shapes: every step fits, little is wasted, and parts are equal."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from portlab_spec.data.tokens import Row
from portlab_spec.packing import BatchOrder, Packing, pack_batch, plan
from portlab_spec.packing.dealing import deal, first_fit
from portlab_spec.packing.trie import SortedRows


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def make_rows(rng, n, *, prefixes=(40,), suffix=(5, 15), answer=3):
    """Rows that share one of several prefixes."""
    stems = [rng.integers(3, 96, length).tolist() for length in prefixes]
    rows = []
    for i in range(n):
        ids = [*stems[i % len(stems)], *rng.integers(3, 96, rng.integers(*suffix)).tolist()]
        rows.append(
            Row(f"r{i}", tuple(ids), (False,) * (len(ids) - answer) + (True,) * answer, prefix_key=str(i % len(stems)))
        )
    return rows


def part_tokens(batch):
    """Real tokens of each part."""
    return (batch.rows.ends > 0).sum((2, 3)).ravel()


def shapes(batch):
    return tuple(x.shape for x in (*batch.rows, *batch.blocks, batch.slots, batch.targets, batch.weights))


@pytest.mark.parametrize("max_shapes", [1, 3])
@pytest.mark.parametrize("max_row_length", [None, 128])
def test_every_step_of_a_run_has_one_of_few_shapes(rng, max_shapes, max_row_length):
    batches = list(BatchOrder(make_rows(rng, 30, suffix=(5, 60)), 8, 12, seed=0))
    planned = plan(batches, Packing(groups=2, window=16, max_row_length=max_row_length), max_shapes=max_shapes)
    found = {shapes(pack_batch(batch, planned.layout(i))) for i, batch in enumerate(batches)}
    assert len(found) == len(planned.layouts) <= max_shapes


def test_more_shapes_compute_less(rng):
    short, long = make_rows(rng, 8, suffix=(5, 10)), make_rows(rng, 8, suffix=(90, 99))
    batches = [short, long, short, short]
    one, two = (plan(batches, Packing(), max_shapes=n) for n in (1, 2))
    assert len(two.layouts) == 2
    assert two.choice == (0, 1, 0, 0)
    assert two.computed_tokens < 0.6 * one.computed_tokens


def test_the_plan_counts_what_sharing_saves(rng):
    rows = make_rows(rng, 10, prefixes=(40,))
    planned = plan([rows, rows], Packing())
    assert planned.row_tokens == 2 * sum(len(row.ids) for row in rows)
    assert planned.row_tokens - planned.held_tokens >= 2 * 9 * 40
    assert planned.computed_tokens >= planned.held_tokens


def test_sharing_that_saves_little_is_left_alone(rng):
    rows = make_rows(rng, 4, prefixes=(20, 20, 20), suffix=(180, 200))
    assert plan([rows], Packing()).layout(0).plain
    assert not plan([rows], Packing(), min_saving=0.0).layout(0).plain


@pytest.mark.parametrize("min_block", [8, 32, 128])
def test_rows_are_whole_blocks_of_at_least_the_least(rng, min_block):
    layout = plan([make_rows(rng, 9)], Packing(), min_block=min_block).layout(0)
    assert layout.block >= min_block
    assert layout.row_length % layout.block == 0


@pytest.mark.parametrize("max_row_length", [128, 256, 384])
def test_rows_keep_to_their_longest(rng, max_row_length):
    layout = plan([make_rows(rng, 60)], Packing(max_row_length=max_row_length)).layout(0)
    assert layout.row_length <= max_row_length


@pytest.mark.parametrize("max_chunk", [64, 128, 512])
def test_chunks_divide_the_slots(rng, max_chunk):
    layout = plan([make_rows(rng, 60, answer=5)], Packing(), max_chunk=max_chunk).layout(0)
    assert layout.slots % layout.chunk == 0
    assert layout.chunk <= max_chunk
    assert 300 <= layout.slots < 300 + 8 * layout.slots // layout.chunk


# -------------------------------------------------------------------------------------------------------- dealing


@pytest.mark.parametrize("packing", [Packing(groups=4), Packing(accumulate=4), Packing(groups=2, accumulate=2)])
def test_one_common_prefix_is_dealt_in_equal_parts(rng, packing):
    rows = make_rows(rng, 32)
    batch = pack_batch(rows, plan([rows], packing).layout(0))
    tokens = part_tokens(batch)
    assert tokens.max() - tokens.min() <= 15, "a row's own tokens"
    assert tokens.sum() <= sum(len(row.ids) for row in rows) - 28 * 40, "the prefix is held by every part, once"


def test_prefix_groups_stay_whole_where_that_is_even(rng):
    rows = make_rows(rng, 32, prefixes=(40, 40, 40, 40), suffix=(9, 10))
    batch = pack_batch(rows, plan([rows], Packing(groups=4)).layout(0))
    whole = sum(len(row.ids) for row in rows) - 28 * 40
    assert part_tokens(batch).sum() == pytest.approx(whole, abs=32)
    assert plan([rows], Packing(groups=4)).layout(0).one_segment


def test_a_large_prefix_group_is_split_when_it_would_hold_the_others_up(rng):
    large, small = make_rows(rng, 30, prefixes=(20,)), make_rows(rng, 3, prefixes=(20,))
    rows = [*large, *small]
    batch = pack_batch(rows, plan([rows], Packing(groups=3)).layout(0))
    tokens = part_tokens(batch)
    assert tokens.max() <= tokens.sum() / 3 + 20


def test_more_groups_than_rows_leave_groups_empty(rng):
    rows = make_rows(rng, 2)
    batch = pack_batch(rows, plan([rows], Packing(groups=4)).layout(0))
    assert (part_tokens(batch) > 0).sum() == 2
    assert (batch.weights.sum(-1) > 0).sum() == 2


def test_dealing_does_not_depend_on_the_order_of_the_rows(rng):
    rows = make_rows(rng, 20, prefixes=(40, 30))
    layout = plan([rows], Packing(groups=4)).layout(0)
    for a, b in zip(pack_batch(rows, layout).rows, pack_batch(rows[::-1], layout).rows, strict=True):
        np.testing.assert_array_equal(a, b)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(3, 4), min_size=1, max_size=9), min_size=1, max_size=14), st.integers(1, 5))
def test_every_row_is_dealt_once_and_no_part_is_larger_than_all_rows(ids, parts):
    rows = [Row(f"r{i}", tuple(x), (False,) * len(x)) for i, x in enumerate(ids)]
    ordered = SortedRows.of(rows, 1)
    dealt = deal(ordered, ordered.trees(), parts)
    assert len(dealt) == parts
    assert sorted(i for part in dealt for span in part for i in range(*span)) == list(range(len(rows)))
    assert max(sum(map(ordered.size, part)) for part in dealt) <= sum(map(ordered.size, ordered.trees()))


@given(st.lists(st.integers(1, 20), max_size=30))
def test_first_fit_fills_bins(sizes):
    bins = first_fit(sizes, 20)
    assert sorted(i for members in bins for i in members) == list(range(len(sizes)))
    loads = [sum(sizes[i] for i in members) for members in bins]
    assert all(load <= 20 for load in loads)
    assert sum(load <= 10 for load in loads) <= 1, "two half-empty bins would be one"


# --------------------------------------------------------------------------------------------------- the demo data


@pytest.mark.real_model
@pytest.mark.parametrize("groups", [1, 4])
def test_a_batch_of_the_fitness_set_is_its_prefix_and_32_questions(groups):
    """267 tokens of declarations, once for each group, and 32 questions with their calls."""
    from portlab_spec.assets import default_model
    from portlab_spec.data import load_dataset
    from portlab_spec.data.tokens import tokenize
    from portlab_spec.formats import find_format
    from portlab_spec.tokenizer import Tokenizer

    conversations = [c for c in load_dataset("fitness-213") if c.split == "train"]
    rows = tokenize(conversations, find_format("functiongemma"), Tokenizer.load(default_model().path), 1024)
    batches = BatchOrder(rows, 32, 30, seed=0)
    layout = plan(batches, Packing(groups=groups, window=512)).layout(0)
    assert layout.rows == 1
    assert layout.row_length <= 267 + 32 // groups * 36 + layout.block
    for batch in batches:
        kept = part_tokens(pack_batch(batch, layout)).sum()
        assert kept <= sum(len(row.ids) for row in batch) - (32 - groups) * 267
