"""Slices of a TPU pod by their Cloud names.

The number in a name counts different things: TensorCores in `v5p-8` and `tpu7x-8` (four chips), chips in `v5e-8` and
`v6e-8` (eight). Sizes and shapes: docs.cloud.google.com/tpu/docs/{v5e,v5p,v6e}, read in the versions of 2026-08-26, and
for TPU7x, which Cloud rents by shape, Google's cluster tool (github.com/AI-Hypercomputer/xpk,
core/system_characteristics.py), whose names MaxText shares. Larger v5p and TPU7x slices come in many more shapes; here
are the cubic ones.
"""

import math
import re
from dataclasses import dataclass

from portlab_spec.errors import UserError
from portlab_spec.hardware.chips import CHIPS, Chip

_VM_CHIPS = 4  # what spans several VMs is built from VMs of four chips, also where larger ones exist

_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16", "16x16x16", "16x16x24")
_TOPOLOGIES = {
    "v5e": _FLAT,
    "v6e": _FLAT,
    "v5p": ("2x2x1", "2x2x2", "2x2x4", "2x4x4", *_CUBES),
    "tpu7x": ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", *_CUBES),
}
_CORES_PER_CHIP = {"v5p": 2, "tpu7x": 2}  # of the generations whose names count TensorCores
_ALIASES = {
    "v5litepod": "v5e",  # accelerator type
    "ct5lp-hightpu": "v5e",  # machine types
    "ct5p-hightpu": "v5p",
    "ct6e-standard": "v6e",
    "tpu7x-standard": "tpu7x",
}


@dataclass(frozen=True)
class Slice:
    """Chips of one kind that are wired to each other.

    Attributes:
        name: Cloud name, "v5p-8".
        chip: what it is made of.
        chips: how many.
        topology: shape of the grid of chips, "2x2x1".
    """

    name: str
    chip: Chip
    chips: int
    topology: str

    @property
    def devices(self) -> int:
        """JAX devices."""
        return self.chips * self.chip.devices

    @property
    def device_memory(self) -> int:
        """Bytes that programs can have on one JAX device."""
        return self.chip.usable_hbm_bytes // self.chip.devices

    @property
    def hosts(self) -> int:
        """Virtual machines, each of which runs one process of the program."""
        return 1 if self.chips <= self.chip.chips_per_host else self.chips // _VM_CHIPS

    @property
    def ici_bandwidth(self) -> float | None:
        """Byte/s of the best-connected chip to its neighbours, both directions together; None if not published.

        Links that would leave the slice carry nothing: of the six of a v5p chip, two are used in a 2x2x1. What wraps
        around changes nothing here, because inner chips have two neighbours along a side anyway.
        """
        if self.chip.ici_bandwidth is None or self.chip.ici_links is None:
            return None
        used = sum(min(int(side) - 1, 2) for side in self.topology.split("x"))
        return self.chip.ici_bandwidth * used / self.chip.ici_links

    @property
    def compiler_topology(self) -> str:
        """Name by which libtpu's compiler knows the slice, "v5p:2x2x1"."""
        return f"{self.chip.name}:{self.topology}"

    def explain(self) -> str:
        """What the name stands for, on one line."""
        counted = "TensorCores" if self.chip.name in _CORES_PER_CHIP else "chips"
        parts = [f"{self.name} is {_count(self.chips, 'chip')} (the suffix counts {counted})"]
        if self.devices != self.chips:
            parts.append(_count(self.devices, "JAX device"))
        return ", ".join([*parts, self.topology, _count(self.hosts, "host")])


def standard_slices(generation: str) -> tuple[Slice, ...]:
    """All slices of a generation ("v5p"), smallest first."""
    return tuple(_slice(generation, topology) for topology in _TOPOLOGIES[generation])


def parse_slice(text: str) -> Slice:
    """The slice that a name means, in any case.

    Args:
        text: accelerator type ("v5p-8", "v5litepod-8"), machine type of a single VM ("ct6e-standard-8t"), or
            generation and shape ("v5p-2x2x1", "v5p:2x2x1").

    Raises:
        UserError: no such slice; the message lists those of the generation, or the generations.
    """
    match = re.fullmatch(r"([a-z0-9]+(?:-[a-z]+)?)[-:]([0-9]+t?|[0-9]+(?:x[0-9]+)+)", text.strip().lower())
    prefix, size = match.groups() if match else ("", "")
    generation = _ALIASES.get(prefix, prefix)
    if generation not in _TOPOLOGIES:
        names = ", ".join(f"{slices[0].name} to {slices[-1].name}" for slices in map(standard_slices, _TOPOLOGIES))
        raise UserError("not a TPU slice", where=repr(text), fix=f"There are {names}")
    slices = standard_slices(generation)
    for candidate in slices:
        if size in _sizes(candidate, machine=prefix.startswith("ct") or prefix.endswith("-standard")):
            return candidate
    names = ", ".join(s.name for s in slices)
    hint = ""
    if generation in _CORES_PER_CHIP:
        hint = f"; the number counts TensorCores, so {slices[-1].chips} chips are {slices[-1].name}"
    raise UserError(f"no such {CHIPS[generation].label} slice", where=repr(text), fix=f"There are {names}{hint}")


def _sizes(candidate: Slice, *, machine: bool) -> tuple[str, ...]:
    """What may follow the generation's name to mean this slice."""
    if machine:
        return (f"{candidate.chips}t",) if candidate.hosts == 1 else ()
    return candidate.name.rpartition("-")[2], candidate.topology


def _slice(generation: str, topology: str) -> Slice:
    chips = math.prod(int(side) for side in topology.split("x"))
    suffix = chips * _CORES_PER_CHIP.get(generation, 1)
    return Slice(f"{generation}-{suffix}", CHIPS[generation], chips, topology)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
