"""Batches as tensors, and masks by their definition."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from portlab_hf.masks import attention_masks
from portlab_spec.data.tokens import Row
from portlab_spec.packing import Packing, pack_batch, plan
from portlab_xla.inputs import micro_batches

short_ids = st.lists(st.integers(1, 3), min_size=2, max_size=7)


@st.composite
def batches(draw):
    """A packed batch of rows with few different tokens, so that many starts are shared."""
    ids = draw(st.lists(short_ids, min_size=1, max_size=5))
    rows = [Row(f"r{i}", tuple(row), (False,) * (len(row) - 1) + (True,)) for i, row in enumerate(ids)]
    window = draw(st.none() | st.integers(1, 4))
    packing = Packing(groups=draw(st.integers(1, 2)), accumulate=draw(st.integers(1, 2)), window=window, min_shared=1)
    planned = plan([rows], packing, min_block=8, min_saving=0.0)
    return pack_batch(rows, planned.layouts[0]), window


@given(batches())
@settings(max_examples=60, deadline=None)
def test_a_token_sees_its_ancestors_within_the_window_and_itself(drawn):
    batch, window = drawn
    for micro, ends, positions in zip(micro_batches(batch), batch.rows.ends, batch.rows.positions, strict=True):
        masks = attention_masks(micro["ends"], micro["positions"], window)
        assert masks.keys() == {"full_attention"} | ({"sliding_attention"} if window else set())
        for r, (row_ends, row_positions) in enumerate(zip(flat(ends), flat(positions), strict=True)):
            for i in range(len(row_ends)):
                ancestors = {j for j in range(i + 1) if i < row_ends[j]} | {i}
                near = {j for j in ancestors if window is None or row_positions[i] - row_positions[j] < window} | {i}
                assert set(np.flatnonzero(masks["full_attention"][r, 0, i])) == ancestors
                if window:
                    assert set(np.flatnonzero(masks["sliding_attention"][r, 0, i])) == near


def flat(array):
    return array.reshape(-1, array.shape[-1])


@given(batches())
@settings(max_examples=30, deadline=None)
def test_micro_batches_hold_what_was_packed(drawn):
    batch, _ = drawn
    for number, micro in enumerate(micro_batches(batch)):
        for name, array in zip(("input_ids", "positions", "ends"), batch.rows, strict=True):
            np.testing.assert_array_equal(micro[name], flat(array[number]))
        for name in ("slots", "targets", "weights"):
            np.testing.assert_array_equal(micro[name], getattr(batch, name)[number])
        assert micro["total"] == batch.weights.sum()


def test_types_are_those_that_indexing_wants(make_rows, packed):
    (batch,), _ = packed(make_rows(), type("Config", (), {"window": None}))
    kinds = {name: tensor.dtype for name, tensor in batch._asdict().items()}
    floats = {name for name, kind in kinds.items() if kind == torch.float32}
    assert floats == {"weights", "total"}
    assert set(kinds.values()) == {torch.float32, torch.int64}


def test_without_supervised_tokens_the_loss_is_zero_and_not_a_quotient_by_zero(make_rows, packed):
    rows = [Row(row.id, row.ids, (False,) * len(row.ids)) for row in make_rows()]
    (batch,), _ = packed(rows, type("Config", (), {"window": None}))
    assert batch.total == 1
    assert batch.weights.sum() == 0


@pytest.mark.parametrize("window", [None, 4])
def test_padding_sees_itself_alone(window):
    ends, positions = torch.tensor([[2, 2, 0, 0]]), torch.tensor([[0, 1, 0, 0]])
    for mask in attention_masks(ends, positions, window).values():
        assert mask[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
