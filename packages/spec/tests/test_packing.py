"""Tree packing, read back: every packed batch says of its rows what the rows themselves say."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from portlab_spec.data.tokens import Row, common_prefix
from portlab_spec.errors import UserError
from portlab_spec.packing import Packing, pack_batch, plan

EVERY_TOKEN = 1  # min_shared


@st.composite
def batches(draw, max_rows=12):
    """Rows over three tokens, so that they share beginnings of all kinds, equal one another or extend one another."""
    token = st.integers(3, 5)
    stems = draw(st.lists(st.lists(token, max_size=6), min_size=1, max_size=3))
    rows = []
    for i in range(draw(st.integers(1, max_rows))):
        ids = [*draw(st.sampled_from(stems)), *draw(st.lists(token, min_size=1, max_size=8))]
        loss = [False, *(draw(st.booleans()) for _ in ids[1:])]
        rows.append(Row(f"r{i}", tuple(ids), tuple(loss)))
    return rows


packings = st.builds(
    Packing,
    groups=st.integers(1, 3),
    accumulate=st.integers(1, 2),
    window=st.sampled_from([None, 1, 3, 100]),
    share_prefix=st.booleans(),
    pack=st.booleans(),
    max_row_length=st.sampled_from([None, 16, 24]),
    min_shared=st.integers(1, 4),
)


def packed(rows, packing, **options):
    layout = plan([rows], packing, min_saving=0.0, **options).layout(0)
    return layout, pack_batch(rows, layout)


def packed_rows(batch):
    """(tokens, positions, ends) of every packed row of a batch."""
    length = batch.rows.tokens.shape[-1]
    return zip(*(x.reshape(-1, length) for x in batch.rows), strict=True)


def sees(ends, positions, window=None):
    """(T, T): token i sees token j."""
    i, j = np.indices((len(ends), len(ends)))
    seen = (j <= i) & (i < ends[j])
    return seen if window is None else seen & (positions[i] - positions[j] < window)


def paths(tokens, positions, ends):
    """Index -> what a token sees, itself last, for the real tokens of a packed row."""
    seen = sees(ends, positions)
    return {i: np.flatnonzero(seen[i]) for i in np.flatnonzero(ends)}


@settings(deadline=None)
@given(batches(), packings)
def test_what_a_token_sees_is_the_beginning_of_a_row(rows, packing):
    """From its first token to the token itself, at the positions of that row."""
    beginnings = {row.ids[:n] for row in rows for n in range(1, len(row.ids) + 1)}
    _, batch = packed(rows, packing)
    found = set()
    for tokens, positions, ends in packed_rows(batch):
        for path in paths(tokens, positions, ends).values():
            assert positions[path].tolist() == list(range(len(path)))
            found.add(tuple(tokens[path].tolist()))
    assert found == beginnings


@settings(deadline=None)
@given(batches(), packings)
def test_every_supervised_token_is_predicted_after_what_stands_before_it(rows, packing):
    expected = Counter((row.ids[:i], row.ids[i]) for row in rows for i in np.flatnonzero(row.loss))
    _, batch = packed(rows, packing)
    found = Counter()
    shape = batch.rows.tokens.shape
    for part in np.ndindex(shape[:2]):
        tokens, positions, ends = (x[part] for x in batch.rows)
        entries = [x[part] for x in (batch.slots, batch.targets, batch.weights)]
        pairs = []
        for slot, target, weight in zip(*entries, strict=True):
            if weight:
                r, t = divmod(int(slot), shape[-1])
                path = paths(tokens[r], positions[r], ends[r])[t]
                found[tuple(tokens[r][path].tolist()), int(target)] += int(weight)
                pairs.append((slot, target))
        assert len(set(pairs)) == len(pairs), "equal predictions are one entry with their weight"
    assert found == expected


@settings(deadline=None)
@given(batches(), packings, st.sampled_from([4, 8]))
def test_blocks_hold_exactly_what_is_seen(rows, packing, block):
    layout, batch = packed(rows, packing, min_block=block)
    width = layout.block
    for name, window in (("full", None), ("sliding", packing.window)):
        tables = getattr(batch.blocks, name)
        tables = tables.reshape(-1, *tables.shape[-2:])
        for table, (_, positions, ends) in zip(tables, packed_rows(batch), strict=True):
            quota = len(ends) // width
            seen = sees(ends, positions, window).reshape(quota, width, quota, width).any((1, 3))
            if name == "sliding" and window is None:
                seen[:] = False
            for entries, wanted in zip(table.tolist(), seen, strict=True):
                wanted = np.flatnonzero(wanted).tolist()
                assert entries == wanted + [-1] * (len(entries) - len(wanted))


@settings(deadline=None)
@given(batches(), packings)
def test_no_sharing_is_one_tree_for_each_row(rows, packing):
    layout, batch = packed(rows, Packing(packing.groups, packing.accumulate, share_prefix=False, pack=packing.pack))
    assert layout.plain
    found = []
    for tokens, positions, ends in packed_rows(batch):
        starts = np.flatnonzero((positions == 0) & (ends > 0))
        found += [tuple(tokens[start : ends[start]].tolist()) for start in starts]
    assert sorted(found) == sorted(row.ids for row in rows)


@settings(deadline=None)
@given(batches(), packings)
def test_plain_and_one_segment_are_what_they_say(rows, packing):
    layout, batch = packed(rows, packing)
    trees, branching = [], False
    for _, positions, ends in packed_rows(batch):
        real = ends > 0
        trees.append(int((real & (positions == 0)).sum()))
        number = np.cumsum(positions[real] == 0)
        branching |= len(set(zip(number.tolist(), ends[real].tolist(), strict=True))) > trees[-1]
    assert layout.plain == (not branching)
    assert layout.one_segment == (max(trees) <= 1)


@settings(deadline=None)
@given(batches())
def test_a_trie_saves_at_least_what_one_common_prefix_saves(rows):
    prefix = common_prefix([row.ids for row in rows])
    planned = plan([rows], Packing(min_shared=EVERY_TOKEN), min_saving=0.0)
    assert planned.row_tokens - planned.held_tokens >= prefix * (len(rows) - 1)


def row(name, ids, supervised=()):
    return Row(name, tuple(ids), tuple(i in supervised for i in range(len(ids))))


def only_tree(rows):
    """Tokens, positions and ends of the real tokens, and (slot, target, weight) of a batch of one packed row."""
    layout, batch = packed(rows, Packing(min_shared=EVERY_TOKEN))
    assert layout.rows == 1
    tokens, positions, ends = (x[0, 0, 0] for x in batch.rows)
    real = ends > 0
    entries = zip(*(x[0, 0].tolist() for x in (batch.slots, batch.targets, batch.weights)), strict=True)
    return *(x[real].tolist() for x in (tokens, positions, ends)), [e for e in entries if e[2]]


def test_a_prefix_is_held_once():
    tokens, positions, ends, _ = only_tree([row("a", [1, 2, 3, 4]), row("b", [1, 2, 5]), row("c", [1, 2, 5, 6, 7])])
    assert tokens == [1, 2, 3, 4, 5, 6, 7]
    assert positions == [0, 1, 2, 3, 2, 3, 4]
    assert ends == [7, 7, 4, 4, 7, 7, 7]


def test_answers_that_differ_at_once_are_predicted_by_the_same_token():
    *_, entries = only_tree([row("a", [1, 2, 3], {2}), row("b", [1, 2, 4], {2}), row("c", [1, 2, 4, 5], {2, 3})])
    assert entries == [(1, 3, 1.0), (1, 4, 2.0), (3, 5, 1.0)]


def test_a_shared_token_counts_for_the_rows_that_supervise_it():
    *_, entries = only_tree([row("a", [1, 2, 3], {1, 2}), row("b", [1, 2, 4], {2}), row("c", [1, 2, 5], {1})])
    assert entries == [(0, 2, 2.0), (1, 3, 1.0), (1, 4, 1.0)]


def test_equal_rows_are_one_branch_of_weight_two():
    tokens, *_, entries = only_tree([row("a", [1, 2, 3], {2}), row("b", [1, 2, 3], {2})])
    assert tokens == [1, 2, 3]
    assert entries == [(1, 3, 2.0)]


def test_a_supervised_first_token_is_refused():
    with pytest.raises(UserError, match=r"^wrong: the first token of the row is supervised"):
        packed([row("fine", [1, 2], {1}), row("wrong", [1, 2], {0, 1})], Packing())


def test_a_row_longer_than_a_packed_row_is_refused():
    with pytest.raises(UserError, match=r"^long: the row has 40 tokens, and a packed row at most 32"):
        packed([row("long", range(3, 43), {39})], Packing(max_row_length=32))


def test_rows_that_were_not_planned_for_are_refused():
    layout, _ = packed([row("a", range(3, 20), {9})], Packing())
    with pytest.raises(UserError, match=r"needs 6\d tokens in a packed row and its layout has 32"):
        pack_batch([row("b", range(3, 70), {9})], layout)


def test_a_long_tree_is_cut_and_repeats_what_is_shared():
    rows = [row(f"r{i}", [*range(100, 120), 10 + i, 20, 21, 22], {23}) for i in range(9)]
    layout, batch = packed(rows, Packing(max_row_length=32))
    assert layout.row_length == 32
    assert layout.rows == 3, "a packed row has room for the 20 shared tokens and three times 4"
    assert (batch.rows.tokens[0, 0, :, :20] == np.arange(100, 120)).all()


def test_few_tokens_in_common_are_not_worth_a_tree():
    rows = [row(f"r{i}", [2, 105, 10 + i, 20], {3}) for i in range(9)]
    assert packed(rows, Packing())[0].plain
    assert not packed(rows, Packing(min_shared=2))[0].plain
