"""FLOPs by hand; peaks of devices that are known, and of none that are not."""

import numpy as np
import pytest

from portlab_spec.models.flops import ModelSize, StepSize, attention_size, mfu, peak_flops, step_flops, visible_pairs


def test_the_formula_by_hand():
    model, step = ModelSize(linears=100, adapters=10, head=1000), StepSize(tokens=7, attention=30, slots=3)
    assert step_flops(model, step) == (4 * 100 + 6 * 10) * 7 + 12 * 30 + 4 * 1000 * 3
    assert step_flops(model, step, method="full") == 6 * 100 * 7 + 12 * 30 + 6 * 1000 * 3


def test_attention_is_summed_over_layers():
    assert attention_size([(10, 4, 16), (6, 4, 16), (6, 8, 32)]) == 10 * 64 + 6 * 64 + 6 * 256


def test_a_token_sees_itself_and_what_precedes_it():
    # A row of four and one of two, in a packed row with two places of padding.
    positions = np.array([[0, 1, 2, 3, 0, 1, 0, 0]])
    held = np.array([[True] * 6 + [False] * 2])
    assert visible_pairs(positions, held, None) == (1 + 2 + 3 + 4) + (1 + 2)
    assert visible_pairs(positions, held, 2) == (1 + 2 + 2 + 2) + (1 + 2)


def test_a_branch_sees_the_shared_part():
    positions = np.array([0, 1, 2, 3, 2])  # a shared part of two tokens, then branches of two and of one
    assert visible_pairs(positions, np.ones(5, bool), None) == 1 + 2 + 3 + 4 + 3


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU v6 lite", 918e12),
        ("TPU7x", 1153.5e12),
    ],
)
def test_peaks_of_one_device(kind, peak):
    assert peak_flops(kind) == peak


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA L40S", "TPU v9"])
def test_an_unknown_device_has_no_peak_rather_than_a_wrong_one(kind):
    assert peak_flops(kind) is None
    assert mfu(1e12, 1.0, 1, kind) is None


def test_mfu_is_the_share_of_all_devices():
    assert mfu(2 * 197e12, 4.0, 2, "TPU v5 lite") == 0.25
