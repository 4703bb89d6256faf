"""Attention for transformers' models, in JAX: grouped heads without copies, and finite whatever the mask hides.

torchax writes scaled_dot_product_attention out with a bias of minus infinity, and a token that sees nothing, as the
padding of a batch does, becomes NaN, in its gradient too. Here it is a large negative number.
"""

from typing import Any

import jax
import jax.numpy as jnp
import torch
from torchax import interop
from transformers import AttentionInterface

from portlab_spec.errors import UserError

NAME = "portlab_jax"
# Queries of whole rows are taken so many at a time, with the keys up to the last of them: a token sees none behind
# itself, and nearly half of all scores need not be computed.
QUERIES = 256


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
    (batch, length, heads, size), kv_heads = q.shape, k.shape[2]
    # Heads that share keys stand beside each other: their queries are rows of one matrix.
    q = q.reshape(batch, length, kv_heads, heads // kv_heads, size)
    scale = size**-0.5 if scaling is None else scaling
    if mask is None or length != k.shape[1]:
        out = _grouped(q, k, v, mask, scale)
    else:
        parts = [slice(start, min(start + QUERIES, length)) for start in range(0, length, QUERIES)]
        out = jnp.concatenate(
            [_grouped(q[:, p], k[:, : p.stop], v[:, : p.stop], mask[:, :, p, : p.stop], scale) for p in parts], 1
        )
    return out.reshape(batch, length, heads, size)


def _grouped(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None, scale: float) -> jax.Array:
    """Attention (B, T, K, G, d) of queries (B, T, K, G, d) over keys and values (B, S, K, d); scores in float32."""
    scores = jnp.einsum("btkgd,bskd->bktgs", q, k, preferred_element_type=jnp.float32) * scale
    if mask is not None:
        scores = jnp.where(mask[:, :, :, None], scores, jnp.finfo(jnp.float32).min)
    return jnp.einsum("bktgs,bskd->btkgd", jax.nn.softmax(scores).astype(v.dtype), v)
