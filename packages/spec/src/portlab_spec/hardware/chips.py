"""Accelerators: peaks, memory and links of one chip, as the makers publish them.

TPU: Google's pages, read in November 2026. Where two disagree, Google's own wins and the comment at the figure says
what the others have. NVIDIA: the figures of the data sheets as they are widely quoted; the sheets themselves were not
read. Peaks are dense: NVIDIA prints most of them with 2:4 sparsity, which doubles them.
"""

import re
from dataclasses import dataclass
from typing import Literal

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One chip, which may be several JAX devices. Every figure is for the whole chip.

    Attributes:
        name: short name, as in slices and prices ("v5p", "h100").
        label: name to print.
        kinds: regular expression of the `device_kind` that JAX reports.
        devices: JAX devices of the chip.
        bf16_flops: FLOP/s, dense bfloat16.
        int8_ops: operations/s, dense; None where there is no published figure.
        fp8_flops: FLOP/s, dense; None likewise.
        hbm_bytes: memory by the sheet.
        usable_hbm_bytes: memory that programs can have.
        usable_hbm_from: where that comes from. "compiler": libtpu refuses a program that needs more, and says how much
            there is (0.0.52 asked). "reported": so runs were refused elsewhere. "driver": the total that nvidia-smi
            shows; a CUDA context takes some hundred MiB of it.
        hbm_bandwidth: byte/s.
        ici_bandwidth: byte/s between chips (ICI or NVLink), all links and both directions together; None for a card
            that has no such link, or no published figure.
        ici_links: links of a TPU chip to neighbours: four make a 2-D torus, six a 3-D one. None for GPUs.
        chips_per_host: most chips that one virtual machine drives.
        sources: where the figures stand.
    """

    name: str
    label: str
    kinds: str
    devices: int = 1
    bf16_flops: float
    int8_ops: float | None
    fp8_flops: float | None
    hbm_bytes: int
    usable_hbm_bytes: int
    usable_hbm_from: Literal["compiler", "reported", "driver"]
    hbm_bandwidth: float
    ici_bandwidth: float | None
    ici_links: int | None
    chips_per_host: int
    sources: tuple[str, ...]


_TPU_DOCS = "https://docs.cloud.google.com/tpu/docs"
_A100 = ("https://www.nvidia.com/en-us/data-center/a100/ (data sheet)",)

_TABLE = (
    Chip(
        name="v4",
        label="TPU v4",
        kinds=r"TPU v4",
        bf16_flops=275e12,
        int8_ops=275e12,
        fp8_flops=None,
        hbm_bytes=32 * GIB,
        usable_hbm_bytes=int(30.75 * GIB),  # libtpu's default is two devices per chip, with 15.25 each
        usable_hbm_from="reported",
        hbm_bandwidth=1200e9,
        ici_bandwidth=None,  # the page gives pod totals only
        ici_links=6,
        chips_per_host=4,
        sources=(f"{_TPU_DOCS}/v4",),
    ),
    Chip(
        name="v5e",
        label="TPU v5e",
        kinds=r"TPU v5 lite|TPU v5e",
        bf16_flops=197e12,
        int8_ops=393e12,
        fp8_flops=None,
        hbm_bytes=16 * GIB,  # printed as 16 GB; 15.75 GiB can be used
        usable_hbm_bytes=int(15.75 * GIB),
        usable_hbm_from="compiler",
        # 819 GB/s until 2026, "800 GiBps" (859 GB/s) in the version of 2026-08-26, 8.1e11 in the Scaling Book. Two
        # HBM2 stacks of 3.2 Gbit/s pins give 819, and v6e's 1638 is twice that.
        hbm_bandwidth=819e9,
        ici_bandwidth=400e9,  # "1600 Gbps" on older pages, which counted one direction
        ici_links=4,
        chips_per_host=8,
        sources=(f"{_TPU_DOCS}/v5e",),
    ),
    Chip(
        name="v5p",
        label="TPU v5p",
        kinds=r"TPU v5|TPU v5p",
        bf16_flops=459e12,
        int8_ops=918e12,  # the Scaling Book's; Google's page has no int8 row
        fp8_flops=459e12,
        hbm_bytes=95 * GIB,  # 95 GB on older pages, 96 GB in the Scaling Book
        usable_hbm_bytes=int(95.73 * GIB),  # more than the sheet promises
        usable_hbm_from="compiler",
        hbm_bandwidth=2765e9,  # also printed as 2575 GiBps, the same; 2.8e12 and 2.5e12 in the Scaling Book
        ici_bandwidth=1200e9,  # "4800 Gbps" on older pages
        ici_links=6,
        chips_per_host=4,
        sources=(f"{_TPU_DOCS}/v5p-training", "https://jax-ml.github.io/scaling-book/tpus/"),
    ),
    Chip(
        name="v6e",
        label="TPU v6e",
        kinds=r"TPU v6 lite|TPU v6e",
        bf16_flops=918e12,  # 9.20e14 in the Scaling Book
        int8_ops=1836e12,
        fp8_flops=918e12,  # TPU7x's page; v6e's own has no fp8 row
        hbm_bytes=32 * GIB,  # printed as 32 GB on v6e's page, as 32 GiB on TPU7x's
        usable_hbm_bytes=int(31.24 * GIB),
        usable_hbm_from="compiler",
        hbm_bandwidth=1638e9,  # 1.6e12 in the Scaling Book
        ici_bandwidth=800e9,  # "3200 Gbps" elsewhere, one direction
        ici_links=4,
        chips_per_host=8,
        sources=(f"{_TPU_DOCS}/v6e", f"{_TPU_DOCS}/tpu7x"),
    ),
    Chip(
        name="tpu7x",
        label="TPU7x (Ironwood)",
        kinds=r"TPU7x",
        devices=2,  # two chiplets with memories of their own
        bf16_flops=2307e12,
        int8_ops=None,
        fp8_flops=4614e12,
        hbm_bytes=192 * GIB,  # the table says GiB, the text of the same page GB
        usable_hbm_bytes=int(2 * 94.74 * GIB),
        usable_hbm_from="compiler",
        hbm_bandwidth=7380e9,  # 7.37 TB/s in the text of the same page
        ici_bandwidth=1200e9,
        ici_links=6,
        chips_per_host=4,
        sources=(f"{_TPU_DOCS}/tpu7x",),
    ),
    Chip(
        name="h100",
        label="NVIDIA H100 SXM",
        kinds=r"NVIDIA H100 80GB HBM3",
        bf16_flops=989e12,
        int8_ops=1979e12,
        fp8_flops=1979e12,
        hbm_bytes=80 * GIB,
        usable_hbm_bytes=81559 * 2**20,
        usable_hbm_from="driver",
        hbm_bandwidth=3350e9,
        ici_bandwidth=900e9,
        ici_links=None,
        chips_per_host=8,
        sources=("https://www.nvidia.com/en-us/data-center/h100/",),
    ),
    Chip(
        name="h200",
        label="NVIDIA H200 SXM",
        kinds=r"NVIDIA H200",
        bf16_flops=989e12,
        int8_ops=1979e12,
        fp8_flops=1979e12,
        hbm_bytes=141 * GIB,
        usable_hbm_bytes=143771 * 2**20,
        usable_hbm_from="driver",
        hbm_bandwidth=4800e9,
        ici_bandwidth=900e9,
        ici_links=None,
        chips_per_host=8,
        sources=("https://www.nvidia.com/en-us/data-center/h200/",),
    ),
    Chip(
        name="b200",
        label="NVIDIA B200 SXM",
        kinds=r"NVIDIA B200",
        bf16_flops=2250e12,  # at 1,000 W; 2.5e15 is GB200's, at 1,200 W
        int8_ops=4500e12,
        fp8_flops=4500e12,
        hbm_bytes=180 * GIB,  # 192 GB on the chip, 180 GB in what is sold
        usable_hbm_bytes=179 * GIB,  # memory.total of a rented one, in whole gigabytes
        usable_hbm_from="driver",
        hbm_bandwidth=8000e9,  # 7.7e12 by some tables
        ici_bandwidth=1800e9,
        ici_links=None,
        chips_per_host=8,
        sources=(
            "https://glennklockwood.com/garden/processors/B200",
            "https://docs.vultr.com/inference-cookbook/cuda/getting-started/hardware-overview",
        ),
    ),
    Chip(
        name="a100-40",
        label="NVIDIA A100 40 GB",
        kinds=r"NVIDIA A100-(SXM4|PCIE)-40GB",
        bf16_flops=312e12,
        int8_ops=624e12,
        fp8_flops=None,
        hbm_bytes=40 * GIB,
        usable_hbm_bytes=40 * GIB,
        usable_hbm_from="driver",
        hbm_bandwidth=1555e9,
        ici_bandwidth=600e9,  # PCIe cards: only to one neighbour, by a bridge
        ici_links=None,
        chips_per_host=8,
        sources=_A100,
    ),
    Chip(
        name="a100-80",
        label="NVIDIA A100 80 GB",
        kinds=r"NVIDIA A100-(SXM4|PCIE)-80GB|NVIDIA A100 80GB PCIe",
        bf16_flops=312e12,
        int8_ops=624e12,
        fp8_flops=None,
        hbm_bytes=80 * GIB,
        usable_hbm_bytes=80 * GIB,
        usable_hbm_from="driver",
        hbm_bandwidth=2039e9,  # SXM; 1935e9 on the PCIe card
        ici_bandwidth=600e9,  # PCIe cards: only to one neighbour, by a bridge
        ici_links=None,
        chips_per_host=8,
        sources=_A100,
    ),
    Chip(
        name="l4",
        label="NVIDIA L4",
        kinds=r"NVIDIA L4",
        bf16_flops=121e12,
        int8_ops=242.5e12,
        fp8_flops=242.5e12,
        hbm_bytes=24 * GIB,
        usable_hbm_bytes=23034 * 2**20,
        usable_hbm_from="driver",
        hbm_bandwidth=300e9,
        ici_bandwidth=None,
        ici_links=None,
        chips_per_host=8,
        sources=("https://www.nvidia.com/en-us/data-center/l4/",),
    ),
)

CHIPS = {chip.name: chip for chip in _TABLE}


def find_chip(device_kind: str) -> Chip | None:
    """The chip of a device by the name that JAX gives it; None for one that is not in the table."""
    return next((chip for chip in CHIPS.values() if re.fullmatch(chip.kinds, device_kind)), None)
