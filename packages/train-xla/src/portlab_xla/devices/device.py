"""What the trainer asks of a device."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from portlab_hf.adapter_files import Tensors, on_host
from portlab_spec.mesh import Spec


class Device(ABC):
    """A device, or several under one program.

    Attributes:
        where: tensors are moved to.
        shape: sizes of the mesh's axes; all 1 on one device.
        dtype: of frozen weights and activations if the recipe leaves it open.
    """

    where: torch.device
    shape: Mapping[str, int]
    dtype: torch.dtype

    @property
    def groups(self) -> int:
        """Parts of the mesh that see their own rows."""
        return self.shape["data"] * self.shape["fsdp"]

    @property
    def count(self) -> int:
        """Devices in all."""
        return self.groups * self.shape["tp"]

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """For the report: `platform`, `kind`, `count`, and what else tells this device from another."""

    @abstractmethod
    def place(self, model: nn.Module, specs: Mapping[str, Spec], layers: Sequence[nn.Module]) -> None:
        """Move a model here, in place; parameters that are one stay one.

        Args:
            model: on the CPU.
            specs: mesh axes of each parameter by its name; what is not named is replicated.
            layers: modules whose outputs, (rows, ...), are kept cut by rows.
        """

    @abstractmethod
    def zeros_like(self, parameter: torch.Tensor) -> torch.Tensor:
        """Zeros in the shape of a placed parameter, which lie as it does and exist before they are used."""

    @abstractmethod
    def put_rows(self, tensors: Tensors) -> Tensors:
        """Move tensors here whose first dimension is shared out over the groups, scalars to everywhere."""

    @abstractmethod
    def everywhere(self, tensor: torch.Tensor) -> torch.Tensor:
        """A result that is about to be read, whole on every device."""

    def to_host(self, tensors: Tensors) -> Tensors:
        """Copies on the CPU, whole."""
        return on_host(tensors)

    @abstractmethod
    def checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function whose intermediate results are computed again in the backward pass.

        Keyword arguments other than the function's own are ignored: libraries pass PyTorch's.
        """

    @abstractmethod
    def seed(self, number: int) -> None:
        """Seed what is drawn on the device."""

    @abstractmethod
    def sync(self) -> None:
        """Launch what was recorded since the last call; a no-op where operations run as they are called."""

    @abstractmethod
    def compilations(self) -> int:
        """Programs that this process has compiled for the device so far; 0 where nothing is compiled."""

    @abstractmethod
    def read_later(self, tensors: Sequence[torch.Tensor], receive: Callable[[list[float]], None]) -> None:
        """Hand the values of vectors, one after the other, to `receive` once the next `sync` has computed them.

        Nobody waits for that: `receive` may be called from another thread, and must be quick.
        """
