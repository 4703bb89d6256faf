"""Names of slices and GPUs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from portlab_bench.machines import disagreements, parse_machine
from portlab_spec.errors import UserError
from portlab_spec.hardware import CHIPS


@pytest.mark.parametrize(
    ("text", "name", "chips", "devices"),
    [
        ("v5p-8", "v5p-8", 4, 4),  # the suffix counts cores
        ("V6E-8", "v6e-8", 8, 8),
        ("v5litepod-8", "v5e-8", 8, 8),
        ("tpu7x-8", "tpu7x-8", 4, 8),  # two devices a chip
        ("2xH100", "2xH100", 2, 2),
        (" 8 x h200 ", "8xH200", 8, 8),
        ("h100", "1xH100", 1, 1),
        ("4xA100-80", "4xA100-80", 4, 4),
        ("A100-80GB", "1xA100-80", 1, 1),
        ("L4", "1xL4", 1, 1),
    ],
)
def test_names_are_read(text: str, name: str, chips: int, devices: int) -> None:
    machine = parse_machine(text)
    assert (machine.name, machine.chips, machine.devices) == (name, chips, devices)


def test_totals_are_of_all_chips() -> None:
    slice_, gpus = parse_machine("v6e-8"), parse_machine("2xH100")
    assert slice_.bf16_flops == 8 * 918e12
    assert slice_.hbm_bandwidth == pytest.approx(13.104e12)
    assert gpus.bf16_flops == 2 * 989e12
    assert gpus.hbm_bandwidth == 6.7e12
    assert gpus.flops("fp8") == 2 * 1979e12
    assert gpus.flops("w8a16") == gpus.bf16_flops  # products in bfloat16
    assert parse_machine("v5e-1").flops("fp8") == 197e12  # no fp8 units
    assert parse_machine("v5e-1").link_bandwidth is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a100", "a100-40, a100-80"),
        ("2xb300", "no GPU 'b300'"),
        ("2xv6e-8", "slice's name"),
        ("0xH100", "1 to 8"),
        ("16xH100", "1 to 8"),
        ("v6e-7", "no such"),
        ("", "neither"),
        ("h100x2", "neither"),
        ("-1xH100", "neither"),
    ],
)
def test_what_is_no_machine_is_refused(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse_machine(text)


@given(st.text(max_size=20))
def test_any_text_is_a_machine_or_one_clear_error(text: str) -> None:
    try:
        machine = parse_machine(text)
    except UserError:
        return
    assert parse_machine(machine.name) == machine


def test_disagreements_name_chips_of_the_table() -> None:
    assert {entry.chip for entry in disagreements()} <= set(CHIPS)
    used = {(d.chip, d.quantity): d.used for d in disagreements()}
    assert float(used["v5e", "HBM bandwidth, GB/s"]) * 1e9 == CHIPS["v5e"].hbm_bandwidth
    assert float(used["v6e", "bf16, TFLOP/s"]) * 1e12 == CHIPS["v6e"].bf16_flops
