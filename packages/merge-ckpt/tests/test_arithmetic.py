"""A block of the output is base + update in f32, rounded once: whatever the dtypes, however the tensor is cut."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from portlab_merge.arithmetic import ChangeStats, LowRankUpdate, RowReplacement, Scratch, convert, update_block
from portlab_spec.safetensors_header import DTYPES

ROWS, COLUMNS, RANK = 12, 10, 3
FLOAT_TYPES = st.sampled_from(["F32", "F16", "BF16"])
# Small multiples of a power of two: sums and products are exact in f32, so that every order of adding gives the same.
exact_values = st.integers(-64, 64).map(lambda n: n / 16)


def factors(*shape: int) -> st.SearchStrategy[np.ndarray]:
    return arrays(np.float32, shape, elements=exact_values)


def nearest_even(value: float, dtype: str) -> float:
    """The value that numpy's or ml_dtypes' own cast gives: the definition to hold ours to."""
    return float(np.float32(value).astype(DTYPES[dtype]))


def merged(weight, update, source, target, cuts=()) -> tuple[np.ndarray, ChangeStats]:
    """The whole tensor, computed in the blocks between the cuts."""
    stored, scratch = weight.astype(DTYPES[source]), Scratch()
    edges = [0, *sorted(cuts), len(weight)]
    parts, total = [], ChangeStats()
    for first, last in pairwise(edges):
        raw = stored[first:last].reshape(-1).view(np.uint8)
        data, change = update_block(raw, weight.shape[1], first, update, source, target, scratch)
        parts.append(np.array(data).view(DTYPES[target]).reshape(-1, weight.shape[1]))
        total += change
    return np.concatenate(parts), total


@given(
    weight=factors(ROWS, COLUMNS),
    a=factors(COLUMNS, RANK),
    b=factors(RANK, ROWS),
    scaling=st.sampled_from([-2.0, 0.5, 1.0]),
    source=FLOAT_TYPES,
    target=FLOAT_TYPES,
    cuts=st.sets(st.integers(1, ROWS - 1)),
)
def test_every_element_is_the_f32_sum_rounded_once(weight, a, b, scaling, source, target, cuts):
    base = weight.astype(DTYPES[source]).astype(np.float32)
    expected = (base + np.float32(scaling) * (a @ b).T).astype(DTYPES[target])
    result, _ = merged(weight, LowRankUpdate.of(a, b, scaling), source, target, cuts)
    assert result.tobytes() == expected.tobytes()


@settings(max_examples=500)
@given(value=st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_bfloat16_is_rounded_to_nearest_even(value):
    weight = np.full((1, 2), value, np.float32)
    expected = nearest_even(value, "BF16")
    nothing = LowRankUpdate.of(np.zeros((2, 1), np.float32), np.zeros((1, 1), np.float32), 1.0)
    if np.isinf(expected):
        with pytest.raises(FloatingPointError):
            merged(weight, nothing, "F32", "BF16")
    else:
        result, _ = merged(weight, nothing, "F32", "BF16")
        assert result.astype(np.float32).tolist() == [[expected, expected]]


@pytest.mark.parametrize("bits", [0x3F808000, 0x3F818000, 0x3F80FFFF, 0x3F808001, 0x3F817FFF, 0x00008000, 0x80018000])
def test_ties_go_to_the_even_neighbour(bits):
    weight = np.full((1, 1), bits, np.uint32).view(np.float32)
    nothing = LowRankUpdate.of(np.zeros((1, 1), np.float32), np.zeros((1, 1), np.float32), 1.0)
    result, _ = merged(weight, nothing, "F32", "BF16")
    assert result.tobytes() == weight.astype(DTYPES["BF16"]).tobytes()


@pytest.mark.parametrize("bits", [0x7F800001, 0xFFFFFFFF, 0x7F800000, 0xFF800000])
@pytest.mark.parametrize("target", ["F32", "F16", "BF16"])
def test_a_base_that_is_not_finite_is_refused(bits, target):
    weight = np.zeros((2, 3), np.float32)
    weight.view(np.uint32)[1, 1] = bits
    nothing = LowRankUpdate.of(np.zeros((3, 1), np.float32), np.zeros((1, 2), np.float32), 1.0)
    with pytest.raises(FloatingPointError):
        merged(weight, nothing, "F32", target)


def test_large_finite_weights_are_not_taken_for_infinite():
    weight = np.full((4, 4), 1.7014118e38, np.float32)  # whose square overflows
    half = LowRankUpdate.of(np.full((4, 1), 1e37, np.float32), np.ones((1, 4), np.float32), 1.0)
    result, change = merged(weight, half, "F32", "BF16")
    assert np.isfinite(result.astype(np.float32)).all()
    assert change.changed == 16


@given(
    weight=factors(ROWS, COLUMNS),
    a=factors(COLUMNS, RANK),
    b=factors(RANK, ROWS),
    target=FLOAT_TYPES,
    cuts=st.sets(st.integers(1, ROWS - 1)),
)
def test_statistics_are_sums_over_the_blocks(weight, a, b, target, cuts):
    result, change = merged(weight, LowRankUpdate.of(a, b, 1.0), "F32", target, cuts)
    delta, stored = (a @ b).T.astype(np.float64), result.astype(np.float64)
    assert change.elements == weight.size
    assert change.changed == np.count_nonzero(stored != weight)
    assert change.base_square == pytest.approx(np.sum(weight.astype(np.float64) ** 2), rel=1e-6)
    assert change.delta_square == pytest.approx(np.sum(delta**2), rel=1e-6)
    assert change.loss_square == pytest.approx(np.sum((stored - (weight + delta)) ** 2), rel=1e-6)


@given(a=factors(2, COLUMNS, RANK), b=factors(2, RANK, ROWS), weight=factors(2 * ROWS, COLUMNS))
def test_matrices_of_a_stack_get_their_own_update(a, b, weight):
    update = LowRankUpdate.of(a, b, 0.5)
    result, _ = merged(weight, update, "F32", "F32", cuts={5, ROWS, ROWS + 1})
    expected = weight.reshape(2, ROWS, COLUMNS) + np.float32(0.5) * (a @ b).mT
    np.testing.assert_array_equal(result.reshape(2, ROWS, COLUMNS), expected)


@given(
    weight=factors(ROWS, COLUMNS),
    ids=st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=4, unique=True),
    target=FLOAT_TYPES,
    cuts=st.sets(st.integers(1, ROWS - 1)),
)
def test_replaced_rows_are_the_values_and_the_rest_is_the_base(weight, ids, target, cuts):
    values = np.arange(len(ids) * COLUMNS, dtype=np.float32).reshape(len(ids), COLUMNS)
    result, change = merged(weight, RowReplacement(np.array(ids), values), "F32", target, cuts)
    expected = weight.copy()
    expected[ids] = values
    np.testing.assert_array_equal(result, expected.astype(DTYPES[target]))
    assert change.elements == values.size


@pytest.mark.parametrize("source", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("target", ["F32", "F16", "BF16"])
def test_tensors_without_an_update_keep_values_that_are_not_finite(source, target):
    values = np.array([np.inf, -np.inf, np.nan, -0.0, 1.5], DTYPES[source])
    converted = convert(values.view(np.uint8), source, target).view(DTYPES[target])
    np.testing.assert_array_equal(converted.astype(np.float32), values.astype(np.float32))
    assert np.signbit(converted[3])
