"""LoRA adapters and trained token rows beside a frozen base.

An adapter is a pytree of float32 leaves, stacked over layers on axis 0:

    {"lora": {"self_attn.q_proj": {"a": (L, in, r), "b": (L, r, out)}, ...}, "token_rows": (n, D)}

`a` and `b` are the transposes of PEFT's `lora_A` (r, in) and `lora_B` (out, r). `token_rows` are whole embedding
rows that replace those of the base (PEFT: `trainable_token_indices`); the key is absent if none are trained.
"""

import math
import zlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from portlab_spec.models import GemmaConfig, match_targets, param_table
from portlab_spec.recipe import Lora

Adapter = dict[str, Any]
Array = jax.Array


@dataclass(frozen=True)
class AdapterOptions:
    """What the forward pass needs to know of the recipe; static under jit.

    Attributes:
        scaling: factor on the adapter's output.
        dropout: probability that an input of `a` is zeroed while training.
        token_ids: rows of the embedding that are trained, ascending.
    """

    scaling: float
    dropout: float = 0.0
    token_ids: tuple[int, ...] = ()

    @staticmethod
    def from_recipe(lora: Lora, token_ids: tuple[int, ...] = ()) -> "AdapterOptions":
        """Options of a recipe's adapter."""
        return AdapterOptions(lora.scaling, lora.dropout, tuple(sorted(token_ids)))


def init_adapter(
    config: GemmaConfig, lora: Lora, key: Array, *, embedding: Any = None, token_ids: tuple[int, ...] = ()
) -> Adapter:
    """A fresh adapter with PEFT's initialisation: the model's output is unchanged until training.

    `a` is uniform in ±1/sqrt(in), which is what PEFT's kaiming_uniform(a=sqrt(5)) amounts to; `b` is zero; token
    rows start as the base's rows.

    Args:
        config: the model.
        lora: the recipe's adapter section.
        key: PRNG key.
        embedding: the base's embedding (V, D), needed for token rows.
        token_ids: rows to train.

    Raises:
        UserError: a target matches no linear layer.
    """
    layers = config.num_hidden_layers
    leaves: dict[str, dict[str, Array]] = {}
    for param in match_targets(param_table(config), lora.targets):
        out, into = param.shape
        # The key depends on the name alone: adding a target does not change the others' initial values.
        leaf_key = jax.random.fold_in(key, zlib.crc32(param.name.encode()))
        bound = 1.0 / math.sqrt(into)
        leaves[param.name] = {
            "a": jax.random.uniform(leaf_key, (layers, into, lora.rank), jnp.float32, -bound, bound),
            "b": jnp.zeros((layers, lora.rank, out), jnp.float32),
        }
    adapter: Adapter = {"lora": leaves}
    if token_ids:
        adapter["token_rows"] = jnp.asarray(embedding[jnp.array(sorted(token_ids))], jnp.float32)
    return adapter


def adapted_linear(
    x: Array,
    weight: Array,
    leaf: dict[str, Array] | None,
    options: AdapterOptions,
    name: str = "",
    dropout_key: Array | None = None,
) -> Array:
    """x (N, in) through a frozen weight (out, in), plus the adapter's (N, out) where there is one.

    Products accumulate in float32; the result has x's dtype.
    """
    y = jnp.einsum("ni,oi->no", x, weight, preferred_element_type=jnp.float32)
    if leaf is not None:
        h = x
        if dropout_key is not None and options.dropout > 0:
            key = jax.random.fold_in(dropout_key, zlib.crc32(name.encode()))
            keep = jax.random.bernoulli(key, 1.0 - options.dropout, x.shape)
            h = jnp.where(keep, x / (1.0 - options.dropout), 0)
        y += options.scaling * low_rank(h, leaf["a"].astype(x.dtype), leaf["b"].astype(x.dtype))
    return y.astype(x.dtype)


@jax.custom_vjp
def low_rank(x: Array, a: Array, b: Array) -> Array:
    """x (N, in) @ a (in, r) @ b (r, out) -> float32 (N, out).

    The gradients are written out to choose the orientation of their products: the tall operand always stands on the
    right, untransposed. Left to the compiler, XLA on CPU materialises transposes of (N, out) for every layer.
    """
    return _matmul(_matmul(x, a).astype(x.dtype), b)


def _low_rank_forward(x: Array, a: Array, b: Array) -> tuple[Array, tuple[Array, ...]]:
    low = _matmul(x, a).astype(x.dtype)
    return _matmul(low, b), (x, low, a, b)


def _low_rank_backward(saved: tuple[Array, ...], d_y: Array) -> tuple[Array, Array, Array]:
    x, low, a, b = saved
    d_y = d_y.astype(x.dtype)
    d_low = jnp.einsum("no,ro->nr", d_y, b, preferred_element_type=jnp.float32).astype(x.dtype)
    d_b = jnp.einsum("nr,no->ro", low, d_y, preferred_element_type=jnp.float32)
    d_a = jnp.einsum("nr,ni->ri", d_low, x, preferred_element_type=jnp.float32).T
    d_x = jnp.einsum("nr,ir->ni", d_low, a, preferred_element_type=jnp.float32)
    return d_x.astype(x.dtype), d_a.astype(a.dtype), d_b.astype(b.dtype)


low_rank.defvjp(_low_rank_forward, _low_rank_backward)


def _matmul(x: Array, y: Array) -> Array:
    return jnp.matmul(x, y, preferred_element_type=jnp.float32)


def replace_token_rows(rows: Array, ids: Array, adapter: Adapter, options: AdapterOptions) -> Array:
    """Embedding rows (N, D) of ids (N,), with trained rows put in place of the base's."""
    if not options.token_ids:
        return rows
    hit = ids[:, None] == jnp.array(options.token_ids)[None, :]
    # A product with a 0/1 matrix instead of a gather: its transpose is a product too, not a scatter.
    trained = hit.astype(jnp.float32) @ adapter["token_rows"]
    return jnp.where(hit.any(axis=1, keepdims=True), trained.astype(rows.dtype), rows)


def count(adapter: Adapter) -> int:
    """Number of trained values."""
    return sum(leaf.size for leaf in jax.tree.leaves(adapter))
