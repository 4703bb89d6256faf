"""Text broken between words while it arrives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from fitnesscoach.wrap import UNLIMITED, WordWrap

words = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=40)
texts = st.lists(st.one_of(words, st.sampled_from([" ", "\n", "  ", "🏃‍♀️", "日本語" * 9])), max_size=30).map("".join)


@pytest.mark.parametrize(
    ("text", "width", "expected"),
    [
        ("You have walked 5,074 steps.", 18, "You have\n      walked 5,074\n      steps."),
        ("- one\n  - nested", 20, "- one\n        - nested"),
        ("one\n\ntwo", 20, "one\n\n      two"),
        ("https://example.org/path", 18, "https://exam\n      ple.org/path"),
        ("日本語 日本語日本語", 14, "日本語\n      日本語日\n      本語"),
        ("no end of line here", UNLIMITED, "no end of line here"),
    ],
)
def test_lines_break_between_words_and_go_on_under_the_first(text, width, expected):
    assert WordWrap(width, 6).whole(text) == expected


@given(texts, st.integers(10, 60))
def test_no_line_is_wider_than_the_terminal_and_nothing_is_lost(text, width):
    shown = " " * 6 + WordWrap(width, 6).whole(text)
    assert all(cell_len(line.rstrip()) <= width for line in shown.split("\n"))
    assert "".join(shown.split()) == "".join(text.split())


@given(st.lists(words.filter(lambda word: cell_len(word) < 24), max_size=20).map(" ".join), st.data())
def test_it_does_not_matter_in_which_pieces_the_text_comes(text, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    wrap = WordWrap(40, 6)
    pieces = [wrap.feed(text[start:end]) for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert "".join(pieces) + wrap.end() == WordWrap(40, 6).whole(text)


def test_a_word_appears_with_the_space_after_it_and_long_ones_do_not_wait():
    wrap = WordWrap(80, 6)
    assert [wrap.feed("St"), wrap.feed("eps"), wrap.feed(" to"), wrap.end()] == ["", "", "Steps", " to"]
    assert wrap.feed("x" * 30) == "x" * 30
