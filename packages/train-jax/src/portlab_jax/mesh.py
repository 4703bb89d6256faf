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

from portlab_spec import mesh as rules
from portlab_spec.mesh import AXES, GROUP_AXES, RULES
from portlab_spec.models import Dim, Param
from portlab_spec.recipe import Mesh

log = logging.getLogger(__name__)


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
    return PartitionSpec(*rules.spec_of(axes, parts, shape))


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
        memory = memory or device_memory(devices[0])
        sizes = rules.mesh_sizes(recipe, len(devices), weight_bytes=weight_bytes, memory=memory, rows=rows)
        shape, names = tuple(sizes.values()), tuple(sizes)
        return MeshPlan(jax.make_mesh(shape, names, axis_types=(AxisType.Explicit,) * len(AXES), devices=devices))

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
        return rules.describe(dict(self.mesh.shape))

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
        return rules.replications(table, dict(self.mesh.shape))


def device_memory(device: Any) -> int | None:
    """Bytes of a device's own memory; None where it does not say."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    return stats.get("bytes_limit") if stats else None
