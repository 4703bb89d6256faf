"""Where arrays live: a `data x fsdp x tp` mesh, along which the compiler cuts what PyTorch's code computes.

The rules are those of every trainer (portlab_spec.mesh). PyTorch knows nothing of a mesh, so that its axes are
automatic: parameters and rows are placed, layers' outputs are held to the rows' placement, and the compiler finds the
rest.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from torch import nn
from torchax import interop

from portlab_spec import mesh as rules
from portlab_spec.mesh import AXES, GROUP_AXES, Spec
from portlab_spec.recipe import Mesh
from portlab_torchax.functional import Values


@dataclass(frozen=True)
class Placement:
    """A mesh and what lies on it."""

    mesh: jax.sharding.Mesh

    @staticmethod
    def create(
        recipe: Mesh,
        devices: Sequence[Any] | None = None,
        *,
        weight_bytes: int = 0,
        rows: int | None = None,
        memory: int | None = None,
    ) -> "Placement":
        """Build the mesh of a recipe over all devices; what it leaves open is chosen, see `mesh_sizes`.

        Raises:
            UserError: the shape does not use exactly the devices there are.
        """
        devices = list(devices or jax.devices())
        memory = memory or device_memory(devices[0])
        sizes = rules.mesh_sizes(recipe, len(devices), weight_bytes=weight_bytes, memory=memory, rows=rows)
        kinds = (AxisType.Auto,) * len(AXES)
        return Placement(jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=devices))

    @property
    def shape(self) -> dict[str, int]:
        """Size of each axis."""
        return dict(self.mesh.shape)

    @property
    def groups(self) -> int:
        """Parts of the mesh that see their own rows."""
        return math.prod(self.shape[name] for name in GROUP_AXES)

    @property
    def device(self) -> Any:
        """One of the devices, which are all alike."""
        return self.mesh.devices.flat[0]

    @property
    def replicated(self) -> NamedSharding:
        """Whole on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    def sharding(self, spec: Spec) -> NamedSharding:
        """Placement by the mesh axes of each dimension."""
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def rows(self, axis: int = 0) -> NamedSharding:
        """Dimension `axis` shared out over the groups."""
        return self.sharding((*(None,) * axis, GROUP_AXES))

    def put(self, tensors: Mapping[str, torch.Tensor], specs: Mapping[str, Spec]) -> Values:
        """Tensors of the CPU as arrays here; what has no spec is replicated."""
        places = {name: self.sharding(specs[name]) if name in specs else self.replicated for name in tensors}
        return {name: jax.device_put(to_numpy(tensor), places[name]) for name, tensor in tensors.items()}

    def put_rows(self, tree: Any, *, axis: int = 0) -> Any:
        """Place host arrays whose dimension `axis` is shared out over the groups."""
        return jax.device_put(tree, self.rows(axis))

    def hold_rows(self, layers: Sequence[nn.Module]) -> None:
        """Keep the outputs of layers, (rows, ...), cut by rows: a constraint in what is compiled."""
        if self.mesh.size == 1:
            return
        where = self.rows()

        def hook(_: nn.Module, inputs: Any, output: torch.Tensor) -> Any:
            if output.shape[0] % self.groups:  # the one row of a shared prefix is everybody's
                return output
            return interop.call_jax(jax.lax.with_sharding_constraint, output, where)

        for layer in layers:
            layer.register_forward_hook(hook)


def device_memory(device: Any) -> int | None:
    """Bytes of a device, if it tells."""
    try:
        stats = device.memory_stats()
    except (jax.errors.JaxRuntimeError, NotImplementedError):
        return None
    return (stats or {}).get("bytes_limit")


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A tensor of the CPU as an array on the same memory; numpy has no bfloat16 of its own."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(jax.numpy.bfloat16)
    return tensor.numpy()


def to_torch(array: Any) -> torch.Tensor:
    """An array as a tensor of the CPU."""
    whole = np.array(array)
    if whole.dtype == jax.numpy.bfloat16:
        return torch.from_numpy(whole.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(whole)
