"""Splits are stable, stratified, and free of leakage."""

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from portlab_spec.conversation import Conversation, Message, Split, ToolCall
from portlab_spec.data.leakage import find_leakage
from portlab_spec.data.split import (
    assign_splits,
    check_leakage,
    normalise,
    split_by_hash,
    stratified_split,
)
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


# -------------------------------------------------------------------------------------------- by fractions

FRACTIONS: dict[Split, float] = {"test": 0.2, "validation": 0.1}
keys = st.lists(st.text(max_size=5), unique=True, max_size=20)


@given(keys, keys)
def test_adding_rows_moves_none(old, new):
    before = split_by_hash(old, FRACTIONS)
    both = list(dict.fromkeys(new + old))
    assert split_by_hash(both, FRACTIONS).items() >= before.items()


def test_shares_hold_on_average():
    counts = Counter(split_by_hash([str(i) for i in range(10_000)], FRACTIONS).values())
    # Four standard deviations of Binomial(10000, f).
    assert abs(counts["test"] - 2000) < 160
    assert abs(counts["validation"] - 1000) < 120


def test_known_hash_assignment():
    """Pinned: a change here would move rows between the splits of every data set."""
    assert split_by_hash(list("abcdef"), {"test": 0.3, "validation": 0.3}) == {
        "a": "train",
        "b": "train",
        "c": "train",
        "d": "validation",
        "e": "train",
        "f": "test",
    }


@pytest.mark.parametrize("fractions", [{"test": 1.2}, {"test": -0.1}, {"test": 0.6, "validation": 0.6}, {"train": 0.5}])
def test_fractions_that_are_no_shares_are_refused(fractions):
    with pytest.raises(UserError, match="no split has the fractions"):
        split_by_hash(["a"], fractions)


def test_two_equal_keys_are_refused():
    with pytest.raises(UserError, match="two rows have the id a"):
        split_by_hash(["a", "b", "a"], FRACTIONS)


def calls(id: str, text: str, tool: str) -> Conversation:
    call = Message(role="assistant", tool_calls=(ToolCall(name=tool),))
    return Conversation(id=id, messages=(Message(role="user", content=text), call))


many_rows = st.lists(st.tuples(st.integers(0, 30), st.sampled_from(["get_a", "get_b"])), max_size=40).map(
    lambda rows: [calls(str(n), f"question {question}", tool) for n, (question, tool) in enumerate(rows)]
)


def splits(rows, **options):
    return {row.id: row.split for row in assign_splits(rows, FRACTIONS, **options)}


@given(many_rows, st.booleans())
def test_equal_questions_stay_together(rows, stratified):
    options = {} if stratified else {"stratify": None}
    check_leakage(assign_splits(rows, FRACTIONS, **options))


@given(many_rows, st.randoms())
def test_order_does_not_matter_to_fractions(rows, random):
    assert splits(rows) == splits(random.sample(rows, len(rows)))


def test_nothing_but_the_split_changes():
    rows = [calls(str(i), f"question {i}", "get_a") for i in range(20)]
    assigned = assign_splits(rows, FRACTIONS)
    assert [row.model_copy(update={"split": "train"}) for row in assigned] == rows


@pytest.mark.parametrize("rows_per_tool", [1, 4, 5, 10, 37])
def test_every_tool_is_split_by_the_fractions(rows_per_tool):
    rows = [calls(f"{tool}{i}", f"{tool} question {i}", tool) for tool in "abc" for i in range(rows_per_tool)]
    assigned = assign_splits(rows, FRACTIONS)
    for tool in "abc":
        counts = Counter(row.split for row in assigned if row.id.startswith(tool))
        for split, fraction in FRACTIONS.items():
            assert abs(counts[split] - fraction * rows_per_tool) < 1


def test_many_tools_of_one_row_are_split_by_the_fractions_together():
    rows = [calls(str(i), f"question {i}", f"tool_{i}") for i in range(2000)]
    counts = Counter(row.split for row in assign_splits(rows, FRACTIONS))
    # Four standard deviations of Binomial(2000, f).
    assert abs(counts["test"] - 400) < 72
    assert abs(counts["validation"] - 200) < 54


def test_without_strata_adding_rows_moves_none():
    rows = [calls(str(i), f"question {i}", "get_a") for i in range(60)]
    assert splits(rows, stratify=None).items() >= splits(rows[:30], stratify=None).items()


def test_any_key_may_be_the_stratum():
    rows = [calls(str(i), f"question {i}", "get_a") for i in range(40)]
    assigned = assign_splits(rows, FRACTIONS, stratify=lambda row: str(int(row.id) % 4))
    assert all(sum(r.split == "test" for r in assigned if int(r.id) % 4 == rest) == 2 for rest in range(4))


def test_similar_questions_stay_together_if_asked():
    """A chain: each differs from the next by a character, the ends by many."""
    text = "how many steps did i walk yesterday, and how many in the week before"
    rows = [calls(str(i), text[i : i + 40], "get_a") for i in range(28)]
    assert set(splits(rows).values()) == {"train", "validation", "test"}
    assert len(set(splits(rows, similarity=0.7).values())) == 1
    assert find_leakage(assign_splits(rows, FRACTIONS, similarity=0.7), threshold=0.7).leaks == ()


def test_a_similarity_must_be_one():
    with pytest.raises(UserError, match="similarity of 0 is not above 0"):
        splits([], similarity=0)


# ------------------------------------------------------------------------------------------------- leakage


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


def test_all_leaking_pairs_are_listed():
    rows = [
        asks("a", "How many steps?", "train"),
        asks("b", "how many STEPS", "test"),
        asks("c", "How many steps", "train"),
        asks("d", "How many steps?", "validation"),
    ]
    found = find_leakage(rows, threshold=1)
    assert {frozenset(leak.ids) for leak in found.leaks} == {frozenset(pair) for pair in ("ab", "bc", "ad", "cd", "bd")}
    assert all(leak.exact and leak.similarity == 1 for leak in found.leaks)
    assert set(found.held_out) == {"b", "d"}
    assert found.summary() == "5 pairs ask the same in two splits, 0 nearly the same; 2 held-out rows are concerned"


def test_near_duplicates_are_listed_with_their_similarity():
    rows = [
        asks("a", "Please tell me how many steps I walked today", "train"),
        asks("b", "Please tell me how many steps I walked today!!", "train"),
        asks("c", "Please tell me how many steps I walked to day, ok", "test"),
        asks("d", "Set an alarm", "test"),
    ]
    found = find_leakage(rows)
    assert [(leak.ids, leak.splits, leak.exact) for leak in found.leaks] == [
        (("a", "c"), ("train", "test"), False),
        (("b", "c"), ("train", "test"), False),
    ]
    # 36 characters make 34 trigrams; "ok" adds two characters and two trigrams.
    assert [leak.similarity for leak in found.leaks] == [34 / 36, 34 / 36]


def trigrams(text):
    text = normalise(text)
    return {text[i : i + 3] for i in range(max(len(text) - 2, 1))}


def jaccard(one, two):
    return len(one & two) / len(one | two)


questions = st.lists(
    st.tuples(st.text("ab c", max_size=9), st.sampled_from(["train", "validation", "test"])), max_size=12
).map(lambda items: [asks(str(n), text, split) for n, (text, split) in enumerate(items)])


@given(questions, st.sampled_from([0.3, 0.5, 0.57, 0.8, 1.0]))
def test_the_search_misses_and_invents_no_pair(rows, threshold):
    expected = {
        frozenset((one.id, two.id))
        for one, two in combinations(rows, 2)
        if one.split != two.split
        and jaccard(trigrams(one.messages[0].content), trigrams(two.messages[0].content)) >= threshold
    }
    found = find_leakage(rows, threshold=threshold)
    assert {frozenset(leak.ids) for leak in found.leaks} == expected
    assert len(found.leaks) == found.exact_pairs + found.near_pairs == len(expected)
    assert set(found.held_out) == {
        row.id for row in rows if row.split != "train" and row.id in {*sum(map(tuple, expected), ())}
    }


def test_what_is_not_listed_is_counted():
    rows = [
        asks(f"{split}{i}", f"how many steps on day {i % 2}", split) for split in ("train", "test") for i in range(8)
    ]
    found = find_leakage(rows, threshold=0.7, max_listed=5)
    assert (found.exact_pairs, found.near_pairs, len(found.leaks)) == (32, 32, 10)
    assert len(found.held_out) == 8


def test_without_a_question_the_developer_text_is_compared():
    def told(id, text, split):
        messages = (Message(role="developer", content=text), Message(role="assistant", content="Yes."))
        return Conversation(id=id, split=split, messages=messages)

    check_leakage([told("a", "Open the door.", "train"), told("b", "Close the window.", "test")])
