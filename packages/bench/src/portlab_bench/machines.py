"""Names of slices and of GPUs, "v5p-8" or "2xH100", as one description: what there is, how fast, how much memory.

All figures come from `portlab_spec.hardware`. Where sheets differ, `data/hardware_disagreements.json` holds who says
what and which figure counts here.
"""

import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal

from portlab_spec.conversation import Record
from portlab_spec.errors import UserError
from portlab_spec.files import read_json
from portlab_spec.hardware import CHIPS, Chip, Slice, parse_slice

# "w8a16" and "w4a16": quantised weights, products in bfloat16; "int8" and "fp8": both sides of the product.
Precision = Literal["bf16", "fp8", "int8", "w8a16", "w4a16"]
WEIGHT_BYTES: dict[Precision, float] = {"bf16": 2, "fp8": 1, "int8": 1, "w8a16": 1, "w4a16": 0.5}

_GPUS = tuple(name for name, chip in CHIPS.items() if chip.ici_links is None)


@dataclass(frozen=True)
class Machine:
    """Chips that run one program, or hold one copy of a model.

    Attributes:
        name: as in tables: "v5p-8", "2xH100".
        chip: what it is made of.
        chips: how many.
        part: the slice; None for GPUs.
    """

    name: str
    chip: Chip
    chips: int
    part: Slice | None = None

    @property
    def devices(self) -> int:
        """Ways of tensor parallelism over all of it: JAX devices, or GPUs."""
        return self.chips * self.chip.devices

    @property
    def bf16_flops(self) -> float:
        """FLOP/s, dense bfloat16, of all chips."""
        return self.chips * self.chip.bf16_flops

    @property
    def hbm_bytes(self) -> int:
        """Bytes that programs can have, of all chips."""
        return self.chips * self.chip.usable_hbm_bytes

    @property
    def hbm_bandwidth(self) -> float:
        """Byte/s of all chips."""
        return self.chips * self.chip.hbm_bandwidth

    @property
    def link_bandwidth(self) -> float | None:
        """Byte/s of one chip to others, both directions together; None if none is published or there is one chip."""
        if self.chips == 1:
            return None
        return self.part.ici_bandwidth if self.part else self.chip.ici_bandwidth

    def flops(self, precision: Precision) -> float:
        """FLOP/s of all chips in products of this precision; where a chip has no units for it, those of bfloat16."""
        peak = {"fp8": self.chip.fp8_flops, "int8": self.chip.int8_ops}.get(precision)
        return self.chips * (peak or self.chip.bf16_flops)

    def explain(self) -> str:
        """What the name stands for, on one line."""
        return self.part.explain() if self.part else f"{self.name} is {self.chips} {self.chip.label}"


def parse_machine(text: str) -> Machine:
    """The machine that a name means, in any case: a slice ("v5p-8"), or GPUs of one host ("2xH100", "H200").

    Raises:
        UserError: neither; more GPUs than one host has; or an A100 without its memory.
    """
    match = re.fullmatch(r"(?:(\d+)\s*x\s*)?([a-z]+\d+[a-z]*(?:-\d+(?:gb)?)?)", text.strip().lower())
    name = match[2].removesuffix("gb") if match else ""
    if match and (sizes := [gpu for gpu in _GPUS if gpu.rpartition("-")[0] == name]):
        raise UserError(f"there are several: {', '.join(sizes)}", where=repr(text), fix="Name one with its memory")
    if match and name in _GPUS:
        chip, count = CHIPS[name], int(match[1] or 1)
        if not 1 <= count <= chip.chips_per_host:
            raise UserError(
                f"1 to {chip.chips_per_host} GPUs of one host are described; the network between hosts is not",
                where=repr(text),
                fix=f"Use {chip.chips_per_host}x{name.upper()} or fewer",
            )
        return Machine(f"{count}x{name.upper()}", chip, count)
    if match and match[1]:
        raise UserError(
            f"no GPU {match[2]!r} is described",
            where=repr(text),
            fix=f"There are {', '.join(map(str.upper, _GPUS))}; TPUs go by the slice's name, such as v6e-8",
        )
    try:
        part = parse_slice(text)
    except UserError as error:
        if any(text.strip().lower().startswith(g) for g in ("v5", "v6", "tpu")):
            raise
        raise UserError(
            "neither a TPU slice nor GPUs", where=repr(text), fix="Use a name such as v5p-8, v6e-8 or 2xH100"
        ) from error
    return Machine(part.name, part.chip, part.chips, part)


class Disagreement(Record):
    """A figure of a chip that sources give differently.

    Attributes:
        chip: name in `CHIPS`.
        quantity: what is disputed, with its unit.
        used: the value that counts here.
        others: what else stands where.
        why: this one.
    """

    chip: str
    quantity: str
    used: str
    others: tuple[str, ...]
    why: str


@cache
def disagreements() -> tuple[Disagreement, ...]:
    """All of them, by chip."""
    file = resources.files("portlab_bench") / "data" / "hardware_disagreements.json"
    with resources.as_file(file) as path:
        return tuple(Disagreement.model_validate(raw) for raw in read_json(path, "table of disagreements"))
