"""Chips and slices: each figure once, and names that count different things."""

import re

import pytest

from portlab_spec.errors import UserError
from portlab_spec.hardware import CHIPS, find_chip, parse_slice, standard_slices

GENERATIONS = ["v5e", "v5p", "v6e", "tpu7x"]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v4", "v4"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU7x", "tpu7x"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100 80GB PCIe", "a100-80"),
        ("NVIDIA L4", "l4"),
    ],
)
def test_jax_device_kinds_name_chips(kind, name):
    assert find_chip(kind) is CHIPS[name]


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA L40S", "NVIDIA H100 PCIe", "NVIDIA H200 NVL", "TPU v9"])
def test_an_unknown_kind_is_no_chip(kind):
    assert find_chip(kind) is None


def test_every_kind_belongs_to_one_chip():
    kinds = ["TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x", "NVIDIA H200", "NVIDIA L4"]
    for kind in kinds:
        assert sum(bool(re.fullmatch(chip.kinds, kind)) for chip in CHIPS.values()) == 1


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_figures_are_per_chip_in_base_units(chip):
    assert 1e14 < chip.bf16_flops < 1e16
    assert 10e9 < chip.hbm_bytes < 300e9
    assert 0.9 < chip.usable_hbm_bytes / chip.hbm_bytes < 1.01
    assert 1e11 < chip.hbm_bandwidth < 1e13
    # A roofline's ridge: the chips of this decade need 100 to 700 FLOPs per byte.
    assert 100 < chip.bf16_flops / chip.hbm_bandwidth < 700
    assert all(source.startswith("https://") for source in chip.sources)


def test_tpus_are_wired_as_tori_of_two_or_three_dimensions():
    assert {name: CHIPS[name].ici_links for name in GENERATIONS} == {"v5e": 4, "v5p": 6, "v6e": 4, "tpu7x": 6}


@pytest.mark.parametrize(
    ("text", "chips", "devices", "hosts", "topology"),
    [
        ("v5p-8", 4, 4, 1, "v5p:2x2x1"),
        ("v5p-32", 16, 16, 4, "v5p:2x2x4"),
        ("v5p-128", 64, 64, 16, "v5p:4x4x4"),
        ("v5e-1", 1, 1, 1, "v5e:1x1"),
        ("v5e-8", 8, 8, 1, "v5e:2x4"),
        ("v6e-8", 8, 8, 1, "v6e:2x4"),
        ("v6e-16", 16, 16, 4, "v6e:4x4"),
        ("v6e-256", 256, 256, 64, "v6e:16x16"),
        ("tpu7x-8", 4, 8, 1, "tpu7x:2x2x1"),
        ("tpu7x-128", 64, 128, 16, "tpu7x:4x4x4"),
    ],
)
def test_cloud_names(text, chips, devices, hosts, topology):
    found = parse_slice(text)
    assert (found.name, found.chips, found.devices, found.hosts, found.compiler_topology) == (
        text, chips, devices, hosts, topology
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("V5P-8", "v5p-8"),
        (" v6e-8 ", "v6e-8"),
        ("v5litepod-8", "v5e-8"),
        ("ct5lp-hightpu-4t", "v5e-4"),
        ("ct6e-standard-8t", "v6e-8"),
        ("ct5p-hightpu-4t", "v5p-8"),
        ("tpu7x-standard-4t", "tpu7x-8"),
        ("v5p-2x2x1", "v5p-8"),
        ("v5p:2x2x1", "v5p-8"),
        ("tpu7x:4x4x4", "tpu7x-128"),
    ],
)
def test_other_spellings(text, name):
    assert parse_slice(text).name == name


@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_standard_slice_is_found_by_its_name_and_its_shape(generation):
    for known in standard_slices(generation):
        assert parse_slice(known.name) == known
        assert parse_slice(known.compiler_topology) == known


@pytest.mark.parametrize(
    ("text", "gb_per_s"),
    [
        ("v5e-1", 0),
        ("v6e-4", 400),
        ("v6e-8", 600),
        ("v6e-16", 800),
        ("v5p-8", 400),
        ("v5p-64", 1000),
        ("v5p-128", 1200),
    ],
)
def test_links_that_leave_the_slice_carry_nothing(text, gb_per_s):
    assert parse_slice(text).ici_bandwidth == pytest.approx(gb_per_s * 1e9)


def test_a_slice_explains_its_name():
    assert parse_slice("v5p-8").explain() == "v5p-8 is 4 chips (the suffix counts TensorCores), 2x2x1, 1 host"
    assert parse_slice("v6e-16").explain() == "v6e-16 is 16 chips (the suffix counts chips), 4x4, 4 hosts"
    assert (
        parse_slice("tpu7x-8").explain()
        == "tpu7x-8 is 4 chips (the suffix counts TensorCores), 8 JAX devices, 2x2x1, 1 host"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v5p-4", "There are v5p-8, v5p-16, v5p-32.*counts TensorCores"),
        ("v6e-2", "There are v6e-1, v6e-4, v6e-8"),
        ("v6e-8t", "There are v6e-1, v6e-4, v6e-8"),
        ("ct6e-standard-16t", "There are v6e-1, v6e-4, v6e-8"),
        ("ct6e-standard-8", "There are v6e-1, v6e-4, v6e-8"),
        ("v5p-3x3x3", "There are v5p-8"),
        ("v7x-8", "not a TPU slice.*tpu7x-2 to tpu7x-12288"),
        ("v6e", "not a TPU slice.*v5e-1 to v5e-256"),
        ("", "not a TPU slice"),
    ],
)
def test_wrong_names_say_which_there_are(text, message):
    with pytest.raises(UserError, match=message) as refused:
        parse_slice(text)
    assert repr(text) in str(refused.value)
