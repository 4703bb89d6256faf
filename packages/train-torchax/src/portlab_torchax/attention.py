"""Attention for transformers' models, by JAX: grouped heads without copies, and finite whatever the mask hides.

torchax writes scaled_dot_product_attention out with a bias of minus infinity, and a token that sees nothing, as the
padding of a batch does, becomes NaN, in its gradient too. JAX's own takes a large negative number, and has a kernel for
NVIDIA's GPUs.
"""

from typing import Any

import jax
import torch
from torchax import interop
from transformers import AttentionInterface

from portlab_spec.errors import UserError

NAME = "portlab_jax"


def register() -> str:
    """Make it known to transformers; its name there."""
    AttentionInterface.register(NAME, attend)
    return NAME


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in the form in which transformers calls it.

    Args:
        module: the layer's attention.
        query: (B, N, T, d).
        key, value: (B, K, S, d); K divides N.
        attention_mask: bool (B, 1, T, S), True where a token is seen.
        scaling: factor on the scores.
        dropout: on the probabilities; not implemented.
        softcap, s_aux: bound of the scores, attention sinks; not implemented.

    Returns:
        (B, T, N, d), and no probabilities.

    Raises:
        UserError: the model asks for what is not implemented.
    """
    wanted = {"dropout of attention": dropout, "softcap of scores": softcap, "attention sinks": s_aux is not None}
    if missing := [name for name, value in wanted.items() if value]:
        raise UserError(
            f"{type(module).__name__} wants {' and '.join(missing)}, which is not implemented",
            where="attention",
            fix="Train another model, or set attention_dropout to 0 in its config.json",
        )
    return interop.call_jax(_attend, query, key, value, attention_mask, scaling), None


def _attend(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None, scaling: float | None
) -> jax.Array:
    q, k, v = (x.swapaxes(1, 2) for x in (query, key, value))
    return jax.nn.dot_product_attention(q, k, v, mask=mask, scale=scaling)
