"""LoRA's second product, whose gradient transposes the small operand.

The gradient of B (out, r) contracts the gradient of the output (T, out) with what A made of the input (T, r), over T.
As JAX derives it, the former is laid out anew for that, the largest array of a layer; here it is the latter.
"""

from functools import partial

import jax
import torch
from peft import PeftModel
from peft.tuners.lora.layer import Linear
from torch import nn
from torchax import interop

ADAPTER = "default"


def use_small_transposes(model: PeftModel) -> None:
    """Have every adapted linear layer of a model computed so."""
    for module in list(model.modules()):
        if isinstance(module, Linear) and isinstance(up := module.lora_B[ADAPTER], nn.Linear):
            up.forward = partial(_forward, up)  # type: ignore[method-assign]


def _forward(up: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = interop.call_jax(product, x, up.weight)
    return found


@jax.custom_vjp
def product(x: jax.Array, b: jax.Array) -> jax.Array:
    """x (..., r) times the transpose of b (out, r)."""
    return x @ b.T


def _product(x: jax.Array, b: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return product(x, b), (x, b)


def _gradients(saved: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, b = saved
    rows, grads = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    return grad @ b, (rows.T @ grads).T


product.defvjp(_product, _gradients)
