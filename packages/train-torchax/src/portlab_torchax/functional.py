"""A PyTorch model as a pure function of its tensors, for JAX to trace, differentiate and compile.

torchax stands in for PyTorch's operations while it is enabled, and only then. Here that is within one call, which JAX
traces; models are loaded, adapted and saved by PyTorch as it is. torchax's own switch is not safe for that: it forgets
that it was on with the first operation, and stays off after an exception.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import torch
import torchax
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torchax import interop
from torchax.tensor import Tensor, XLAFunctionMode

Values = dict[str, jax.Array]


def _type_as(tensor: Tensor, other: torch.Tensor) -> torch.Tensor:
    return tensor.to(other.dtype)


# torchax 0.0.13 changes the type of the tensor itself, and fails beside a view, as the norms of Gemma 4 E2B meet it.
Tensor.type_as = _type_as


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """PyTorch as it is, if torchax was enabled around this; afterwards as it was before, whatever happens within."""
    environment = torchax.default_env()
    before, depth = environment.enabled, 0
    while (modes := _get_current_function_mode_stack()) and isinstance(modes[-1], XLAFunctionMode):
        environment.disable_torch_modes()
        depth += 1
    try:
        yield
    finally:
        for _ in range(depth):
            environment.enable_torch_modes()
        environment.enabled = before


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """With torchax, and afterwards as it was before: whatever happens within."""
    environment = torchax.default_env()
    before = environment.enabled
    try:
        with environment:
            yield
    finally:
        environment.enabled = before


class Functional:
    """A module whose parameters and buffers are arguments.

    Its own tensors are let go once `release` was called; shapes and types stay.

    Attributes:
        module: the model; code and names.
        names: of its distinct tensors, parameters first; a tied one has its first name.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._shell = _Shell(module)
        self._places = _places(module)
        self.names = tuple(self.tensors())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name, each once."""
        return dict(self.module.named_parameters()) | dict(self.module.named_buffers())

    def release(self) -> None:
        """Give the memory of the model's own tensors back: each becomes one number, repeated."""
        with torch.no_grad():
            for tensor in self.tensors().values():
                tensor.data = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)

    def __call__(
        self, values: Mapping[str, jax.Array], function: Callable[..., Any], *args: Any, training: bool = False
    ) -> Any:
        """`function(module, *args)` with these values in the module.

        Args:
            values: of every tensor, by name.
            function: PyTorch code; its tensors in and out are JAX's arrays here.
            args: pytrees of arrays.
            training: the module's mode: dropout, and layers that are computed again in the backward pass.
        """
        with enabled(), _mode(self.module, training=training):
            tensors = interop.torch_view({f"module.{place}": values[name] for place, name in self._places.items()})
            inputs = function, *interop.torch_view(args)
            output = torch.func.functional_call(self._shell, tensors, inputs, tie_weights=False)
            return interop.jax_view(output)


def _places(module: nn.Module) -> dict[str, str]:
    """Where a module holds tensors, each place once, and the name of the tensor there, which is its first place's.

    functional_call finds ties by itself, but takes a tensor of a submodule that stands in two places, as PEFT's trained
    rows do, for two places, and in the end puts what it found in the second back: the value of the call.
    """
    names: dict[int, str] = {}
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in tensors:
        names.setdefault(id(tensor), name)
    return {
        f"{owner}.{leaf}" if owner else leaf: names[id(tensor)]
        for owner, submodule in module.named_modules()
        for leaf, tensor in (submodule._parameters | submodule._buffers).items()
        if tensor is not None
    }


class _Shell(nn.Module):
    """Hands the module to whatever is to be computed with it: functional_call knows `forward` alone."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(self.module, *args)


@contextlib.contextmanager
def _mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    before = module.training
    module.train(training)
    try:
        yield
    finally:
        module.train(before)
