"""PyTorch/XLA under SPMD: one process, one program, all devices.

This is FSDPv2 without its wrapper. `SpmdFullyShardedDataParallel` does three things: it annotates parameters with the
mesh axes they are cut along, annotates the outputs of layers, and puts itself around modules. The annotations are
what makes the compiler shard; the wrapping is what breaks in practice: outputs of unknown type cannot be annotated,
names get `_orig_module` in them, and ties come apart. So parameters are annotated where they are, by the table that
train-jax shards by, and layers by forward hooks.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import nn
from torch_xla.utils.checkpoint import checkpoint

from portlab_spec.errors import UserError
from portlab_spec.mesh import AXES, GROUP_AXES, Spec, describe, mesh_sizes
from portlab_spec.recipe import Mesh
from portlab_xla.devices import torch_tpu
from portlab_xla.devices.device import Device, Tensors


class XlaDevice(Device):
    """All devices that torch_xla sees."""

    def __init__(self, mesh: Mesh, *, parameters: int = 0, rows: int | None = None) -> None:
        """Turn SPMD on, which has to be done before any tensor is moved, and lay the devices out.

        Raises:
            UserError: several processes, or a mesh that does not fit the devices.
        """
        xr.use_spmd()
        if xr.process_count() > 1:
            raise UserError(
                f"runs in one process, and there are {xr.process_count()}",
                where="train-xla",
                fix="Use a slice of one host, or train-jax, which runs on several",
            )
        count = xr.global_runtime_device_count()
        self.where = torch_xla.device()
        on_cpu = xr.device_type() == "CPU"
        self.dtype = torch.float32 if on_cpu else torch.bfloat16
        memory = None if on_cpu else xm.get_memory_info(self.where)["bytes_limit"]
        size = parameters * self.dtype.itemsize
        self.shape = mesh_sizes(mesh, count, weight_bytes=size, memory=memory, rows=rows)
        self._specs: dict[int, Spec] = {}  # by the id of a placed parameter
        self._mesh = xs.Mesh(np.arange(count), tuple(self.shape.values()), AXES)

    def describe(self) -> dict[str, Any]:
        kind = xr.device_type()
        found: dict[str, Any] = {
            "platform": "xla",
            "kind": kind if kind == "CPU" else os.environ.get("TPU_ACCELERATOR_TYPE", kind),
            "count": self.count,
            "mesh": describe(self.shape),
        }
        if version := torch_tpu.installed():
            found["unused"] = f"torch-tpu {version}"
        return found

    def place(self, model: nn.Module, specs: Mapping[str, Spec], layers: Sequence[nn.Module]) -> None:
        # `model.to` would make a new parameter for each place in which a tied one stands.
        placed: dict[int, nn.Parameter] = {}
        for prefix, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in placed:
                    here = nn.Parameter(parameter.detach().to(self.where), parameter.requires_grad)
                    spec = specs.get(f"{prefix}.{name}", (None,) * here.ndim)
                    xs.mark_sharding(here, self._mesh, spec)
                    self._specs[id(here)] = spec
                    placed[id(parameter)] = here
                module.register_parameter(name, placed[id(parameter)])
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(self.where)  # keeps what is not saved unsaved
        for layer in layers:
            layer.register_forward_hook(self._cut_by_rows)

    def _cut_by_rows(self, _: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        return xs.mark_sharding_with_gradients(output, self._mesh, (GROUP_AXES, *(None,) * (output.ndim - 1)))

    def zeros_like(self, parameter: torch.Tensor) -> torch.Tensor:
        # Made on the host: made here, they would be constants of the first step's graph, and inputs of all others.
        zeros = torch.zeros(parameter.shape, dtype=parameter.dtype).to(self.where)
        xs.mark_sharding(zeros, self._mesh, self._specs[id(parameter)])
        return zeros

    def put_rows(self, tensors: Tensors) -> Tensors:
        here = {name: tensor.to(self.where) for name, tensor in tensors.items()}
        for tensor in here.values():
            spec = (GROUP_AXES, *(None,) * (tensor.ndim - 1)) if tensor.ndim else ()
            xs.mark_sharding(tensor, self._mesh, spec)
        return here

    def everywhere(self, tensor: torch.Tensor) -> torch.Tensor:
        # torch_xla compiles a program for every read of a tensor that is cut, and keeps none of them.
        xs.mark_sharding(tensor, self._mesh, (None,) * tensor.ndim)
        return tensor

    def to_host(self, tensors: Tensors) -> Tensors:
        # One program makes all of them whole; see above.
        whole = {name: self.everywhere(tensor.detach().clone()) for name, tensor in tensors.items()}
        self.sync()
        return super().to_host(whole)

    def checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # PyTorch's own looks for torch.xla, which does not exist; and without torch_xla's barriers the compiler would
        # merge what is recomputed with what was computed before.
        return checkpoint(function, *args)

    def seed(self, number: int) -> None:
        torch.manual_seed(number)
        xm.set_rng_state(number)

    def sync(self) -> None:
        torch_xla.sync()

    def compilations(self) -> int:
        data = met.metric_data("CompileTime")
        return data[0] if data else 0

    def read_later(self, tensors: Sequence[torch.Tensor], receive: Callable[[list[float]], None]) -> None:
        def read(vectors: Sequence[torch.Tensor]) -> None:
            receive([value for vector in vectors for value in vector.tolist()])

        xm.add_step_closure(read, args=(tuple(tensors),), run_async=True)
