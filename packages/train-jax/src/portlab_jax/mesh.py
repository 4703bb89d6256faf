"""Where arrays live: a `data x fsdp x tp` mesh, and rules from logical axes to mesh axes.

The mesh has explicit axes: the sharding of every array is part of its type, an operation whose result could be
sharded in two ways does not trace, and a test can read the sharding of any activation. Weights are sharded over
`fsdp` and gathered where they are used, one layer at a time; rows of a batch are shared out over `data` and `fsdp`.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from portlab_spec.errors import UserError
from portlab_spec.models import Dim, Param
from portlab_spec.recipe import Mesh

log = logging.getLogger(__name__)

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


def shard(x: jax.Array, *axes: str | None, parts: Sequence[int] | None = None) -> jax.Array:
    """Lay an array out by the logical axis of each dimension; trailing dimensions may be left out.

    Under a mesh with explicit axes this moves data where it has to, under automatic axes it is a constraint, and
    without a mesh nothing. A dimension that its mesh axes do not divide is replicated; `parts` says for each
    dimension how many ways it can be cut at most, if that is not its length.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    spec = partition(axes + (None,) * (x.ndim - len(axes)), parts or x.shape)
    if all(kind == AxisType.Explicit for kind in mesh.axis_types):
        return jax.sharding.reshard(x, spec)
    return jax.lax.with_sharding_constraint(x, spec)


def partition(axes: Sequence[str | None], parts: Sequence[int]) -> PartitionSpec | None:
    """The partition of an array under the current mesh, to be given as `out_sharding`; None without one.

    Args:
        axes: logical axis of each dimension.
        parts: for each dimension, how many ways it can be cut at most.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else _spec(axes, parts, dict(mesh.shape))


def axis_size(axis: str) -> int:
    """Ways that the current mesh cuts a logical axis."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else math.prod(mesh.shape[name] for name in RULES[axis])


def _spec(axes: Sequence[str | None], parts: Sequence[int], shape: dict[str, int]) -> PartitionSpec:
    entries: list[Any] = []
    for axis, count in zip(axes, parts, strict=True):
        names = RULES[axis] if axis else ()
        ways = math.prod(shape[name] for name in names)
        fits = bool(names) and count % ways == 0
        entries.append((names if len(names) > 1 else names[0]) if fits else None)
    return PartitionSpec(*entries)


@dataclass(frozen=True)
class MeshPlan:
    """A mesh and the placement of host arrays on it."""

    mesh: jax.sharding.Mesh

    @staticmethod
    def create(
        recipe: Mesh,
        devices: Sequence[Any] | None = None,
        *,
        weight_bytes: int = 0,
        rows: int | None = None,
        memory: int | None = None,
    ) -> "MeshPlan":
        """Build the mesh of a recipe over all devices; what it leaves open is chosen.

        Args:
            recipe: sizes of the axes, None where they are to be chosen.
            devices: by default all of them.
            weight_bytes: size of the frozen weights: `fsdp` grows until a part takes half a device's memory at most.
            rows: rows of a micro-batch: `tp` takes the devices that would get none.
            memory: bytes of a device; by default what it says itself.

        Raises:
            UserError: the shape does not use exactly the devices there are.
        """
        devices = list(devices or jax.devices())
        sizes = choose_sizes(recipe, len(devices), weight_bytes, memory or device_memory(devices[0]), rows)
        if math.prod(sizes) != len(devices):
            data, fsdp, tp = sizes
            raise UserError(
                f"data {data} x fsdp {fsdp} x tp {tp} is not the {len(devices)} device(s) there are",
                where="mesh",
                fix="Set mesh.data, mesh.fsdp and mesh.tp so that their product is the number of devices",
            )
        return MeshPlan(jax.make_mesh(sizes, AXES, axis_types=(AxisType.Explicit,) * 3, devices=devices))

    @property
    def device(self) -> Any:
        """One of the devices, which are all alike."""
        return self.mesh.devices.flat[0]

    @property
    def groups(self) -> int:
        """Groups per micro-batch: one for each part of the mesh that sees its own rows."""
        return math.prod(self.mesh.shape[name] for name in GROUP_AXES)

    def describe(self) -> str:
        """The sizes of the axes in a few words."""
        return " x ".join(f"{name} {size}" for name, size in self.mesh.shape.items())

    def sharding(self, dims: Sequence[Dim], *, lead: int = 0) -> NamedSharding:
        """Sharding of a parameter by its dimensions, behind `lead` dimensions that are not cut."""
        axes = (None,) * lead + tuple(dim.axis for dim in dims)
        parts = (1,) * lead + tuple(dim.parts for dim in dims)
        return NamedSharding(self.mesh, _spec(axes, parts, dict(self.mesh.shape)))

    def put_rows(self, tree: Any, *, axis: int = 0) -> Any:
        """Place host arrays whose dimension `axis` is shared out over the groups.

        Every process holds the whole batch and uploads its part of it.
        """

        def put(array: np.ndarray) -> jax.Array:
            return jax.make_array_from_callback(
                array.shape, self.row_sharding(array.shape, axis), lambda index: array[index]
            )

        return jax.tree.map(put, jax.tree.map(np.asarray, tree))

    def abstract_rows(self, tree: Any, *, axis: int = 0) -> Any:
        """As `put_rows`, without the data: shapes, types and shardings."""

        def describe(array: np.ndarray) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=self.row_sharding(array.shape, axis))

        return jax.tree.map(describe, jax.tree.map(np.asarray, tree))

    def row_sharding(self, shape: Sequence[int], axis: int) -> NamedSharding:
        """Sharding of an array whose dimension `axis` is shared out over the groups."""
        axes = (*(None,) * axis, "group", *(None,) * (len(shape) - axis - 1))
        return NamedSharding(self.mesh, _spec(axes, shape, dict(self.mesh.shape)))

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of what every device holds whole."""
        return NamedSharding(self.mesh, PartitionSpec())

    def replications(self, table: Sequence[Param]) -> list[str]:
        """One line for each kind of dimension that the mesh cannot cut and replicates instead."""
        lines = {}
        for dim in (dim for param in table for dim in param.dims if dim.axis):
            ways = math.prod(self.mesh.shape[name] for name in RULES[str(dim.axis)])
            if dim.parts % ways:
                what = f"{dim.parts} {str(dim.axis).replace('_', ' ')}"
                lines[what] = f"{what} cannot be cut {ways} ways over {'+'.join(RULES[str(dim.axis)])}: replicated"
        return list(lines.values())


def choose_sizes(
    recipe: Mesh, devices: int, weight_bytes: int, memory: int | None, rows: int | None
) -> tuple[int, int, int]:
    """Sizes of (data, fsdp, tp): the recipe's, and for those it leaves open the fewest ways that do.

    Rows are independent, so data parallelism costs least; weights are cut only as far as memory asks for it, and
    heads only for devices that would have no rows.
    """
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


def device_memory(device: Any) -> int | None:
    """Bytes of a device's own memory; None where it does not say."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    return stats.get("bytes_limit") if stats else None
