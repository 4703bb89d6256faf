"""Numbers and dates of the grammars, as regular expressions."""

import datetime
import re

from hypothesis import given
from hypothesis import strategies as st

from portlab_spec.formats.grammar.numbers import NUMBER, NUMBER_WITHOUT_BOTH, integer_range
from portlab_spec.formats.grammar.values import STRING_FORMATS
from portlab_spec.formats.values import fixed_point


@given(st.integers(-1200, 1200), st.integers(0, 1300))
def test_a_range_of_integers_is_exactly_that_range(low, span):
    pattern = re.compile(integer_range(low, low + span))
    inside = {n for n in range(-2600, 2601) if pattern.fullmatch(str(n))}
    assert inside == set(range(low, low + span + 1))


def test_a_range_of_integers_has_no_other_numerals():
    pattern = re.compile(integer_range(-12, 1030))
    assert not any(pattern.fullmatch(text) for text in ("-0", "007", "+1", "1.0", "", "-", "0000", "10300"))


def test_an_empty_range_matches_nothing():
    assert integer_range(3, 2) == ""


@given(st.floats(-9.9e307, 9.9e307))
def test_every_float_below_1e308_is_a_number_as_each_format_writes_it(value):
    assert re.fullmatch(NUMBER, repr(value))
    assert re.fullmatch(NUMBER_WITHOUT_BOTH, fixed_point(value))


@given(st.from_regex(re.compile(NUMBER, re.ASCII), fullmatch=True))
def test_every_number_is_finite(text):
    assert abs(float(text)) < float("inf")


def test_dates_are_real_days():
    day = datetime.date(2023, 1, 1)
    written = set()
    while day.year < 2025:
        written.add(day.isoformat())
        day += datetime.timedelta(1)
    candidates = {f"{y}-{m:02}-{d:02}" for y in (2023, 2024) for m in range(14) for d in range(33)}
    assert {text for text in candidates if re.fullmatch(STRING_FORMATS["date"], text)} == written
