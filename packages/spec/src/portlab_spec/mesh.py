"""A `data x fsdp x tp` mesh of devices: how large its axes are, and which dimension of an array lies along which.

Weights are cut over `fsdp` and gathered where they are used; heads, MLP, experts and vocabulary are cut over `tp`; rows
of a batch are shared out over `data` and `fsdp`. Every trainer that shards reads these rules, so that a recipe's mesh
means the same on all of them. Numbers and names only: no framework here.
"""

import math
from collections.abc import Mapping, Sequence

from portlab_spec.errors import UserError
from portlab_spec.models import Dim, Param
from portlab_spec.recipe import Mesh

AXES = ("data", "fsdp", "tp")
GROUP_AXES = ("data", "fsdp")

# Logical axis -> mesh axes. Groups of a batch spread over everything that is not tensor-parallel.
RULES: dict[str, tuple[str, ...]] = {
    "group": GROUP_AXES,
    "embed": ("fsdp",),
    "vocab": ("tp",),
    "heads": ("tp",),
    "kv_heads": ("tp",),
    "mlp": ("tp",),
    "experts": ("tp",),
}

# Mesh axes of each dimension of an array; None is not cut.
Spec = tuple[str | tuple[str, ...] | None, ...]


def spec_of(axes: Sequence[str | None], parts: Sequence[int], shape: Mapping[str, int]) -> Spec:
    """Mesh axes along which an array lies.

    Args:
        axes: logical axis of each dimension.
        parts: for each dimension, how many ways it can be cut at most; one that its mesh axes do not divide is whole.
        shape: sizes of the mesh's axes.
    """
    entries: list[str | tuple[str, ...] | None] = []
    for axis, count in zip(axes, parts, strict=True):
        names = RULES[axis] if axis else ()
        fits = bool(names) and count % math.prod(shape[name] for name in names) == 0
        entries.append((names if len(names) > 1 else names[0]) if fits else None)
    return tuple(entries)


def param_spec(dims: Sequence[Dim], shape: Mapping[str, int]) -> Spec:
    """Mesh axes along which a parameter lies."""
    return spec_of([dim.axis for dim in dims], [dim.parts for dim in dims], shape)


def replications(table: Sequence[Param], shape: Mapping[str, int]) -> list[str]:
    """One line for each kind of dimension that the mesh cannot cut and replicates instead."""
    lines = {}
    for dim in (dim for param in table for dim in param.dims if dim.axis):
        ways = math.prod(shape[name] for name in RULES[str(dim.axis)])
        if dim.parts % ways:
            what = f"{dim.parts} {str(dim.axis).replace('_', ' ')}"
            lines[what] = f"{what} cannot be cut {ways} ways over {'+'.join(RULES[str(dim.axis)])}: replicated"
    return list(lines.values())


def mesh_sizes(
    recipe: Mesh, devices: int, *, weight_bytes: int = 0, memory: int | None = None, rows: int | None = None
) -> dict[str, int]:
    """Sizes of the axes: the recipe's, and for those it leaves open the fewest ways that do.

    Rows are independent, so data parallelism costs least; weights are cut only as far as memory asks for it, and
    heads only for devices that would have no rows.

    Args:
        recipe: sizes of the axes, None where they are to be chosen.
        devices: how many there are.
        weight_bytes: size of the frozen weights: `fsdp` grows until a part takes half a device's memory at most.
        memory: bytes of a device; None if unknown.
        rows: rows of a micro-batch: `tp` takes the devices that would get none.

    Raises:
        UserError: the shape does not use exactly the devices there are.
    """
    data, fsdp, tp = _choose(recipe, devices, weight_bytes, memory, rows)
    if data * fsdp * tp != devices:
        raise UserError(
            f"data {data} x fsdp {fsdp} x tp {tp} is not the {devices} device(s) there are",
            where="mesh",
            fix="Set mesh.data, mesh.fsdp and mesh.tp so that their product is the number of devices",
        )
    return {"data": data, "fsdp": fsdp, "tp": tp}


def _choose(
    recipe: Mesh, devices: int, weight_bytes: int, memory: int | None, rows: int | None
) -> tuple[int, int, int]:
    fixed = (recipe.data or 1) * (recipe.fsdp or 1)
    tp = recipe.tp
    if tp is None and recipe.data and recipe.fsdp:
        tp = max(devices // fixed, 1)
    if tp is None:
        enough = [t for t in _divisors(devices) if devices // t <= max(rows or devices, fixed)]
        tp = enough[0]
    rest = max(devices // tp, 1)
    fsdp = recipe.fsdp
    if fsdp is None and recipe.data is not None:
        fsdp = max(rest // recipe.data, 1)
    if fsdp is None:
        fsdp = next((f for f in _divisors(rest) if not memory or weight_bytes / (f * tp) <= memory / 2), rest)
    return recipe.data or max(rest // fsdp, 1), fsdp, tp


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def describe(shape: Mapping[str, int]) -> str:
    """The sizes of the axes in a few words."""
    return " x ".join(f"{name} {size}" for name, size in shape.items())
