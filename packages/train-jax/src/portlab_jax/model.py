"""The Gemma 3 text model on shared-prefix batches.

A *group* is one prefix and many rows. The prefix is held once; a row holds one or more segments (suffixes), each
continuing the prefix on its own. A token sees the whole prefix and, in its own row, the earlier tokens of its own
segment. With an empty prefix this is ordinary packing; with one segment per row it is an ordinary padded batch.

Shape letters: P prefix tokens, R rows, T tokens per row, N = P + R*T, D hidden, H query heads, K key/value heads,
G = H / K, d head size, L layers, V vocabulary. All functions work on one group; callers `jax.vmap` over groups.

Layers are stacked on axis 0 and scanned, so that compile time does not grow with depth. Gemma 3's layers have one
shape; whether a layer slides is a scanned flag that selects the mask and the RoPE table.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from portlab_jax.lora import Adapter, AdapterOptions, adapted_linear, replace_token_rows
from portlab_spec.models import FULL, GemmaConfig

Params = dict[str, Any]
Array = jax.Array

# A score that softmax turns into exactly 0 and that stays finite, so that a fully masked (padding) token gives
# a uniform row instead of NaN.
MASKED = -1e30


class Rows(NamedTuple):
    """The token side of a group.

    Attributes:
        prefix: int32 (P,), shared by all segments, positions 0..P-1.
        tokens: int32 (R, T).
        segments: int32 (R, T); 0 marks padding, equal numbers within a row belong together.
        positions: int32 (R, T); the first token of a segment has position P.
    """

    prefix: Array
    tokens: Array
    segments: Array
    positions: Array


class LayerKind(NamedTuple):
    """What differs between full and sliding layers; leaves carry a leading axis of 2: (full, sliding).

    Attributes:
        cos, sin: float32 (2, N, d/2), RoPE tables.
        prefix_mask: bool (2, P, P).
        cross_mask: bool (2, R, T, P), row token to prefix token.
        self_mask: bool (2, R, T, T), row token to row token.
    """

    cos: Array
    sin: Array
    prefix_mask: Array
    cross_mask: Array
    self_mask: Array


Attend = Callable[[Array, Array, Array], tuple[Array, Any]]


def hidden_states(
    params: Params,
    adapter: Adapter,
    config: GemmaConfig,
    options: AdapterOptions,
    rows: Rows,
    *,
    dropout_key: Array | None = None,
    remat: bool = False,
    with_cache: bool = False,
) -> tuple[Array, Array, Any]:
    """Run the model over one group.

    Args:
        params: frozen weights, see `portlab_jax.weights`.
        adapter: LoRA leaves and token rows.
        rows: the group's tokens.
        dropout_key: a PRNG key while training with dropout, else None.
        remat: recompute each layer in the backward pass instead of keeping its activations.
        with_cache: also return keys and values.

    Returns:
        Final normed hidden states of the prefix (P, D) and of the rows (R, T, D), in the params' dtype, and the
        cache (k, v), each (L, N, K, d), or None.
    """
    p, (r, t) = rows.prefix.shape[0], rows.tokens.shape
    ids = jnp.concatenate([rows.prefix, rows.tokens.reshape(-1)])
    x = embed(params, adapter, options, ids)
    kinds = layer_kinds(config, rows)
    scale = config.query_pre_attn_scalar**-0.5

    def in_rows(flat: Array) -> Array:
        return flat.reshape(r, t, *flat.shape[1:])

    def attend_with(kind: LayerKind) -> Attend:
        def attend(q: Array, k: Array, v: Array) -> tuple[Array, Any]:
            parts = []
            if p:
                parts.append(attend_causal(q[:p], k[:p], v[:p], kind.prefix_mask, scale))
            if r * t:
                shared = (k[:p], v[:p], kind.cross_mask)
                own = (in_rows(k[p:]), in_rows(v[p:]), kind.self_mask)
                parts.append(attend_rows(in_rows(q[p:]), shared, own, scale).reshape(r * t, *q.shape[1:]))
            return jnp.concatenate([*parts, q[:0]]), (k, v) if with_cache else None

        return attend

    def body(x: Array, scanned: tuple[Params, Params, Array, Array | None]) -> tuple[Array, Any]:
        weights, lora, is_sliding, key = scanned
        kind = jax.tree.map(lambda leaf: leaf[is_sliding], kinds)
        return decoder_layer(x, weights, lora, config, options, kind.cos, kind.sin, attend_with(kind), key)

    if remat:
        body = jax.checkpoint(body)
    keys = None if dropout_key is None else jax.random.split(dropout_key, config.num_hidden_layers)
    x, cache = jax.lax.scan(body, x, (params["layers"], adapter["lora"], sliding_flags(config), keys))
    x = rms_norm(x, params["norm"], config.rms_norm_eps)
    return x[:p], in_rows(x[p:]), cache


def decoder_layer(
    x: Array,
    w: Params,
    lora: Params,
    config: GemmaConfig,
    options: AdapterOptions,
    cos: Array,
    sin: Array,
    attend: Attend,
    dropout_key: Array | None = None,
) -> tuple[Array, Any]:
    """One decoder layer on flat tokens.

    Args:
        x: (N, D).
        w: this layer's weights by table name.
        lora: this layer's LoRA leaves by table name.
        cos, sin: float32 (N, d/2).
        attend: maps q (N, H, d), k and v (N, K, d) to the attention output (N, H, d) and anything to pass on.

    Returns:
        x after the layer (N, D), and what `attend` passed on.
    """
    n, eps, head = x.shape[0], config.rms_norm_eps, config.head_dim

    def linear(name: str, value: Array) -> Array:
        return adapted_linear(value, w[name], lora.get(name), options, name, dropout_key)

    h = rms_norm(x, w["input_layernorm"], eps)
    q = linear("self_attn.q_proj", h).reshape(n, -1, head)
    k = linear("self_attn.k_proj", h).reshape(n, -1, head)
    v = linear("self_attn.v_proj", h).reshape(n, -1, head)
    q = rope(rms_norm(q, w["self_attn.q_norm"], eps), cos, sin)
    k = rope(rms_norm(k, w["self_attn.k_norm"], eps), cos, sin)
    attended, passed_on = attend(q, k, v)
    h = linear("self_attn.o_proj", attended.reshape(n, -1))
    x = x + rms_norm(h, w["post_attention_layernorm"], eps)
    h = rms_norm(x, w["pre_feedforward_layernorm"], eps)
    h = gated(linear("mlp.gate_proj", h), linear("mlp.up_proj", h))
    h = linear("mlp.down_proj", h)
    return x + rms_norm(h, w["post_feedforward_layernorm"], eps), passed_on


def embed(params: Params, adapter: Adapter, options: AdapterOptions, ids: Array) -> Array:
    """Scaled token embeddings: ids (N,) -> (N, D). The scale is rounded to the weights' dtype, as upstream."""
    table = params["embed_tokens"]
    x = replace_token_rows(table[ids], ids, adapter, options)
    return x * jnp.asarray(table.shape[1] ** 0.5, table.dtype)


# The backward pass recomputes these cheap functions from their inputs; their intermediates would otherwise be kept
# for every layer, which more than doubles the step's memory.
_recomputed = functools.partial(jax.checkpoint, prevent_cse=False)


@_recomputed
def gated(gate: Array, up: Array) -> Array:
    """Gemma's gated activation: gelu with the tanh approximation, times `up`."""
    return jax.nn.gelu(gate, approximate=True) * up


@functools.partial(_recomputed, static_argnums=2)
def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Gemma's RMS norm over the last axis: float32 inside, scale 1 + weight, result in x's dtype."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (normed * (1.0 + weight.astype(jnp.float32))).astype(x.dtype)


def rope(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate the two halves of the head: x (N, heads, d), cos and sin (N, d/2)."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def rope_tables(config: GemmaConfig, positions: Array) -> tuple[Array, Array]:
    """cos and sin, float32 (2, *positions.shape, d/2): full layers first, then sliding ones."""
    fraction = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    full = config.rope_theta**-fraction / config.rope_scaling_factor
    local = config.rope_local_theta**-fraction
    angles = positions.astype(jnp.float32)[None, ..., None] * jnp.stack([full, local]).reshape(
        2, *(1,) * positions.ndim, -1
    )
    return jnp.cos(angles), jnp.sin(angles)


def sliding_flags(config: GemmaConfig) -> Array:
    """int32 (L,): 1 for a sliding layer, 0 for a full one; indexes the leading axis of `LayerKind`."""
    return jnp.array([int(kind != FULL) for kind in config.layer_types], jnp.int32)


def layer_kinds(config: GemmaConfig, rows: Rows) -> LayerKind:
    """RoPE tables and masks for both kinds of layer."""
    p = rows.prefix.shape[0]
    prefix_positions = jnp.arange(p, dtype=jnp.int32)
    cos, sin = rope_tables(config, jnp.concatenate([prefix_positions, rows.positions.reshape(-1)]))
    pos_rt = rows.positions
    same_segment = (rows.segments[:, :, None] == rows.segments[:, None, :]) & (rows.segments > 0)[:, None, :]
    return LayerKind(
        cos,
        sin,
        prefix_mask=visible(config, prefix_positions[:, None], prefix_positions[None, :]),
        cross_mask=visible(config, pos_rt[:, :, None], prefix_positions[None, None, :]),
        self_mask=visible(config, pos_rt[:, :, None], pos_rt[:, None, :]) & same_segment[None],
    )


def visible(config: GemmaConfig, query: Array, key: Array) -> Array:
    """bool (2, ...): may `query` see `key`, both positions; full layers first, then sliding ones."""
    distance = query - key
    causal = distance >= 0
    return jnp.stack([causal, causal & (distance < config.sliding_window)])


def attend_causal(q: Array, k: Array, v: Array, mask: Array, scale: float) -> Array:
    """Attention of one sequence to itself: q (P, H, d), k and v (P, K, d), mask (P, P) -> (P, H, d)."""
    n, heads, head = q.shape
    q = q.reshape(n, k.shape[1], heads // k.shape[1], head)
    scores = jnp.einsum("pkgd,skd->kgps", q, k, preferred_element_type=jnp.float32) * scale
    weights = jax.nn.softmax(jnp.where(mask[None, None], scores, MASKED), axis=-1).astype(v.dtype)
    return jnp.einsum("kgps,skd->pkgd", weights, v).reshape(n, heads, head)


KeyValue = tuple[Array, Array, Array]


def attend_rows(q: Array, prefix: KeyValue, own: KeyValue, scale: float) -> Array:
    """Attention of row tokens to the shared prefix and to their own row, under one softmax.

    Args:
        q: (R, T, H, d).
        prefix: k and v (P, K, d), mask (R, T, P).
        own: k and v (R, S, K, d), mask (R, T, S).
        scale: factor on the scores.

    Returns:
        (R, T, H, d).
    """
    r, t, heads, head = q.shape
    (k_p, v_p, mask_p), (k_r, v_r, mask_r) = prefix, own
    p, kv_heads = k_p.shape[0], k_p.shape[1]
    q = q.reshape(r, t, kv_heads, heads // kv_heads, head)
    to_prefix = jnp.einsum("rtkgd,pkd->rktgp", q, k_p, preferred_element_type=jnp.float32)
    to_own = jnp.einsum("rtkgd,rskd->rktgs", q, k_r, preferred_element_type=jnp.float32)
    scores = jnp.concatenate([to_prefix, to_own], axis=-1) * scale
    mask = jnp.concatenate([mask_p, mask_r], axis=-1)[:, None, :, None, :]
    weights = jax.nn.softmax(jnp.where(mask, scores, MASKED), axis=-1).astype(v_r.dtype)
    out = jnp.einsum("rktgp,pkd->rtkgd", weights[..., :p], v_p)
    out += jnp.einsum("rktgs,rskd->rtkgd", weights[..., p:], v_r)
    return out.reshape(r, t, heads, head)
