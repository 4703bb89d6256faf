"""Buckets are the best there are; prefix groups hold every row once and share what they say."""

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from portlab_spec.data.batching import (
    BucketUse,
    assign_bucket,
    buckets,
    group_by_prefix,
    padding,
    share_saved,
)
from portlab_spec.data.tokens import Row
from portlab_spec.errors import UserError

some_lengths = st.lists(st.integers(1, 60), min_size=1, max_size=12)


def cost(lengths, sizes):
    return sum(min(size for size in sizes if size >= length) for length in lengths)


@given(some_lengths, st.integers(1, 4), st.sampled_from([1, 4, 8]))
def test_no_choice_of_buckets_computes_less(lengths, max_buckets, multiple_of):
    candidates = sorted({-(-length // multiple_of) * multiple_of for length in lengths})
    choices = (
        (*smaller, candidates[-1])
        for n in range(min(max_buckets, len(candidates)))
        for smaller in combinations(candidates[:-1], n)
    )
    assert cost(lengths, buckets(lengths, max_buckets, multiple_of)) == min(cost(lengths, c) for c in choices)


@given(some_lengths, st.integers(1, 4), st.sampled_from([1, 4, 8]))
def test_buckets_are_few_round_ascending_and_used(lengths, max_buckets, multiple_of):
    sizes = buckets(lengths, max_buckets, multiple_of)
    assert len(sizes) <= max_buckets
    assert sizes == sorted(set(sizes))
    assert all(size % multiple_of == 0 for size in sizes)
    assert {assign_bucket(length, sizes) for length in lengths} == set(sizes)


def test_a_known_optimum():
    """Two clusters of lengths, two buckets: one at the top of each."""
    assert buckets([100] * 50 + [120] * 50 + [890] * 40 + [900] * 60, 2) == [128, 1024]
    assert buckets([100] * 50 + [120] * 50 + [890] * 40 + [900] * 60, 2, multiple_of=8) == [120, 904]


def test_the_smallest_bucket_that_holds_a_row():
    assert [assign_bucket(length, [128, 256]) for length in (1, 128, 129, 256)] == [128, 128, 256, 256]


def test_a_row_beyond_the_largest_bucket_is_refused():
    with pytest.raises(UserError, match="a row of 257 tokens is longer than the largest bucket of 256"):
        assign_bucket(257, [128, 256])


@pytest.mark.parametrize(
    ("lengths", "max_buckets", "multiple_of", "message"),
    [
        ([], 1, 1, "no rows"),
        ([0, 4], 1, 1, "a row is 0"),
        ([4], 0, 1, "max_buckets is 0"),
        ([4], 1, 0, "multiple_of is 0"),
    ],
)
def test_impossible_buckets_are_refused(lengths, max_buckets, multiple_of, message):
    with pytest.raises(UserError, match=message):
        buckets(lengths, max_buckets, multiple_of)


def test_padding_counts_real_and_computed_tokens():
    report = padding([100, 28, 200, 256], [128, 256])
    assert report.uses == (BucketUse(128, 2, 128), BucketUse(256, 2, 456))
    assert (report.tokens, report.computed, report.one_bucket) == (584, 768, 1024)
    assert report.waste == pytest.approx(184 / 768)


@given(some_lengths, st.integers(1, 4))
def test_padding_loses_no_row(lengths, max_buckets):
    report = padding(lengths, buckets(lengths, max_buckets, 8))
    assert sum(use.rows for use in report.uses) == len(lengths)
    assert report.tokens == sum(lengths)


# ------------------------------------------------------------------------------------------ shared prefixes


def row(id, key, ids, targets=1):
    return Row(id, tuple(ids), (False,) * (len(ids) - targets) + (True,) * targets, prefix_key=key)


PROMPTS = {"a": [2, 7, 7, 7], "b": [2, 7, 8, 8, 8, 8], "c": [2, 9]}
some_rows = st.lists(
    st.tuples(st.sampled_from(sorted(PROMPTS)), st.lists(st.integers(0, 3), min_size=2, max_size=5)), max_size=12
).map(lambda items: [row(str(n), key, PROMPTS[key] + ids) for n, (key, ids) in enumerate(items)])


@given(some_rows, st.integers(1, 4))
def test_no_row_is_lost_or_doubled(rows, min_rows):
    grouped = [row for group in group_by_prefix(rows, min_rows) for row in group.rows]
    assert Counter(row.id for row in grouped) == Counter(row.id for row in rows)


@given(some_rows, st.integers(1, 4))
def test_the_prefix_is_common_and_leaves_the_token_that_predicts(rows, min_rows):
    for group in group_by_prefix(rows, min_rows):
        assert len({row.ids[: group.prefix] for row in group.rows}) == 1
        assert all(group.prefix < row.first_target for row in group.rows)


@given(some_rows, st.integers(1, 4))
def test_only_the_last_group_mixes_prompts(rows, min_rows):
    keys = [{row.prefix_key for row in group.rows} for group in group_by_prefix(rows, min_rows)]
    assert all(len(found) == 1 for found in keys[:-1])


@given(some_rows)
def test_packing_computes_the_prefix_once_and_each_rest(rows):
    for group in group_by_prefix(rows):
        packed = group.prefix + sum(len(row.ids) - group.prefix for row in group.rows)
        assert group.tokens - group.saved() == packed


def test_each_set_of_tools_shares_its_own_prompt():
    rows = [row(f"{key}{i}", key, PROMPTS[key] + [i, 5, 6]) for i in range(3) for key in ("a", "b")]
    assert [group.prefix for group in group_by_prefix(rows)] == [4, 6]


def test_rare_prompts_share_what_they_can():
    rare = [row("1", "a", [2, 7, 7, 1, 1]), row("2", "b", [2, 7, 8, 1, 1])]
    rows = [*rare, row("3", "c", [2, 9, 5, 5]), row("4", "c", [2, 9, 6, 5])]
    first, mixed = group_by_prefix(rows)
    assert ([r.id for r in first.rows], first.prefix) == (["3", "4"], 2)
    assert ([r.id for r in mixed.rows], mixed.prefix) == (["1", "2"], 2)


def test_rows_that_ask_alike_are_no_group():
    rows = [row(str(i), "a", PROMPTS["a"] + [i % 2, 5, i]) for i in range(6)]
    assert [group.prefix for group in group_by_prefix(rows)] == [4]


def test_the_saving_counts_the_prefix_once_per_batch():
    (group,) = group_by_prefix([row(str(i), "a", PROMPTS["a"] + [i, 5]) for i in range(10)])
    assert (group.tokens, group.saved(), group.saved(4)) == (60, 36, 28)
    assert share_saved([group], 4) == pytest.approx(28 / 60)


def test_no_rows_make_no_group():
    assert group_by_prefix([]) == []
    assert share_saved([]) == 0.0
