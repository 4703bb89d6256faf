"""PyTorch as it is: a CPU or one CUDA GPU."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from portlab_spec.errors import UserError
from portlab_spec.mesh import Spec, mesh_sizes
from portlab_spec.recipe import Mesh
from portlab_xla.devices.device import Device, Tensors


class PlainDevice(Device):
    """One CPU or GPU; operations run as they are called."""

    def __init__(self, name: str, mesh: Mesh) -> None:
        """Take hold of "cpu" or "cuda".

        Raises:
            UserError: there is no such device, or several processes were launched.
        """
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UserError(
                f"was launched as {os.environ['WORLD_SIZE']} processes, and --device {name} is one device",
                where="WORLD_SIZE",
                fix="Start it without torchrun; --device xla uses every device in one process",
            )
        if name == "cuda" and not torch.cuda.is_available():
            raise UserError("this PyTorch sees no CUDA device", where="--device cuda", fix="Use --device cpu or xla")
        if name == "cuda" and torch.cuda.device_count() > 1:
            raise UserError(
                f"trains on one GPU, and {torch.cuda.device_count()} are visible",
                where="--device cuda",
                fix="Set CUDA_VISIBLE_DEVICES=0, or train on all of them with train-jax",
            )
        self.where = torch.device(name, 0) if name == "cuda" else torch.device(name)
        self.shape = mesh_sizes(mesh, 1)
        self.dtype = torch.float32 if name == "cpu" else torch.bfloat16

    def describe(self) -> dict[str, Any]:
        on_gpu = self.where.type == "cuda"
        kind = torch.cuda.get_device_name(self.where) if on_gpu else "cpu"
        return {"platform": self.where.type, "kind": kind, "count": 1} | self._memory()

    def _memory(self) -> dict[str, Any]:
        return {"peak_bytes": torch.cuda.max_memory_allocated(self.where)} if self.where.type == "cuda" else {}

    def place(self, model: nn.Module, specs: Mapping[str, Spec], layers: Sequence[nn.Module]) -> None:
        model.to(self.where)

    def zeros_like(self, parameter: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(parameter, requires_grad=False)

    def put_rows(self, tensors: Tensors) -> Tensors:
        return {name: tensor.to(self.where, non_blocking=True) for name, tensor in tensors.items()}

    def everywhere(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return checkpoint(function, *args, use_reentrant=False)

    def seed(self, number: int) -> None:
        torch.manual_seed(number)  # of every device

    def sync(self) -> None:
        pass

    def compilations(self) -> int:
        return 0

    def read_later(self, tensors: Sequence[torch.Tensor], receive: Callable[[list[float]], None]) -> None:
        receive([value for vector in tensors for value in vector.tolist()])
