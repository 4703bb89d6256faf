"""Splits are stable, stratified, and free of leakage."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from portlab_spec.conversation import Conversation, Message, Split
from portlab_spec.data.split import check_leakage, normalise, stratified_split
from portlab_spec.errors import UserError

SIZES: dict[Split, int] = {"test": 2, "validation": 1}

# Three or more rows in each of one to three strata.
tables = st.lists(st.integers(3, 12), min_size=1, max_size=3).map(
    lambda sizes: [(f"{s}-{i}", f"stratum {s}") for s, size in enumerate(sizes) for i in range(size)]
)


def split_of(table: list[tuple[str, str]], seed: int = 0) -> dict[str, Split]:
    return stratified_split([key for key, _ in table], [stratum for _, stratum in table], SIZES, seed)


@given(tables, st.integers(0, 99))
def test_every_stratum_is_partitioned_by_the_sizes(table, seed):
    splits = split_of(table, seed)
    assert list(splits) == [key for key, _ in table]
    for stratum in {stratum for _, stratum in table}:
        counts = Counter(splits[key] for key, s in table if s == stratum)
        assert (counts["test"], counts["validation"]) == (2, 1)


@given(tables, st.randoms())
def test_row_order_does_not_matter(table, random):
    shuffled = random.sample(table, len(table))
    assert split_of(table) == split_of(shuffled)


def test_another_stratum_does_not_matter():
    one, two = [(f"a{i}", "a") for i in range(9)], [(f"b{i}", "b") for i in range(5)]
    assert split_of(one + two).items() >= split_of(one).items()


def test_the_seed_matters():
    table = [(f"a{i}", "a") for i in range(50)]
    assert split_of(table, seed=0) != split_of(table, seed=1)


def test_known_assignment():
    """Pinned: a change here would move rows between the splits of every data set."""
    assert split_of([(key, "s") for key in "abcdef"]) == {
        "a": "validation",
        "b": "train",
        "c": "train",
        "d": "test",
        "e": "train",
        "f": "test",
    }


def test_duplicate_ids_are_refused():
    with pytest.raises(UserError, match="two rows have the id a"):
        stratified_split(["a", "a"], ["s", "s"], {})


def test_small_strata_are_refused():
    with pytest.raises(UserError, match="stratum s has 2 rows, and 3 are to be held out"):
        stratified_split(["a", "b"], ["s", "s"], SIZES)


def asks(id: str, text: str, split: Split) -> Conversation:
    messages = (Message(role="user", content=text), Message(role="assistant", content="Yes."))
    return Conversation(id=id, split=split, messages=messages)


def test_the_same_question_in_two_splits_names_both_rows():
    rows = [asks("one", "How many steps?", "train"), asks("two", "how MANY steps", "test")]
    with pytest.raises(UserError, match="rows: one in train and two in test ask the same"):
        check_leakage(rows, where="rows")


def test_the_same_question_in_one_split_is_no_leak():
    check_leakage([asks("one", "Steps?", "train"), asks("two", "steps", "train")])


@pytest.mark.parametrize("left", ["Steps, so far?", "steps so far", " STEPS\tso-far\n", "ｓteps so far…"])
def test_normalise_removes_case_space_and_punctuation(left):
    assert normalise(left) == "stepssofar"


@pytest.mark.parametrize(("left", "right"), [("1 > 2", "1 < 2"), ("की", "का"), ("?", "!")])
def test_normalise_keeps_what_carries_meaning(left, right):
    assert normalise(left) != normalise(right)
