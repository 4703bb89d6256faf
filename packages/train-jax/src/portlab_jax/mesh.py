"""Where arrays live: a `data x fsdp x tp` mesh and rules from logical axes to mesh axes."""

import logging
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from portlab_spec.errors import UserError
from portlab_spec.recipe import Mesh

log = logging.getLogger(__name__)

AXES = ("data", "fsdp", "tp")

# Logical axis -> mesh axis. Groups of a batch spread over everything that is not tensor-parallel.
RULES: dict[str, str | tuple[str, ...]] = {
    "group": ("data", "fsdp"),
    "embed": "fsdp",
    "vocab": "tp",
    "heads": "tp",
    "kv_heads": "tp",
    "mlp": "tp",
}


@dataclass(frozen=True)
class MeshPlan:
    """A mesh with the rules that place arrays on it."""

    mesh: jax.sharding.Mesh

    @staticmethod
    def create(recipe: Mesh, devices: list[Any] | None = None) -> "MeshPlan":
        """Build the mesh of a recipe over all devices.

        Raises:
            UserError: the shape does not use exactly the devices there are.
        """
        devices = devices or jax.devices()
        fixed = recipe.fsdp * recipe.tp
        data = recipe.data or len(devices) // fixed
        if data * fixed != len(devices):
            raise UserError(
                f"data {data} x fsdp {recipe.fsdp} x tp {recipe.tp} is not the {len(devices)} device(s) there are",
                where="mesh",
                fix="Set mesh.data, mesh.fsdp and mesh.tp so that their product is the number of devices",
            )
        shape = (data, recipe.fsdp, recipe.tp)
        return MeshPlan(jax.sharding.Mesh(np.array(devices).reshape(shape), AXES))

    @property
    def groups(self) -> int:
        """Groups per batch: one for each part of the mesh that sees its own rows."""
        return int(self.mesh.shape["data"] * self.mesh.shape["fsdp"])

    def sharding(self, axes: tuple[str | None, ...], shape: tuple[int, ...], name: str) -> NamedSharding:
        """Sharding of an array by its logical axes; a dimension that does not divide is replicated, with a note."""
        spec: list[str | tuple[str, ...] | None] = []
        for logical, size in zip(axes, shape, strict=True):
            rule = RULES[logical] if logical else None
            names = (rule,) if isinstance(rule, str) else rule or ()
            parts = int(np.prod([self.mesh.shape[n] for n in names]))
            if parts > 1 and size % parts:
                log.warning("%s: %s of size %d does not divide by %d, replicated", name, logical, size, parts)
                rule = None
            spec.append(rule if parts > 1 else None)
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def put(self, array: Any, axes: tuple[str | None, ...], name: str) -> jax.Array:
        """Place a host array by its logical axes."""
        return jax.device_put(array, self.sharding(axes, array.shape, name))

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of what every device holds whole."""
        return NamedSharding(self.mesh, PartitionSpec())

    def put_rows(self, tree: Any) -> Any:
        """Place arrays whose leading axis is a group of a batch, or rows that the groups share out."""
        return jax.tree.map(lambda leaf: self.put(leaf, ("group", *(None,) * (leaf.ndim - 1)), "batch"), tree)
