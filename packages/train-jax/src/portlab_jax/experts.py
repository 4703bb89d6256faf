"""Gemma 4's mixture of experts: every token goes through its best few, and nothing is dropped.

Tokens are sorted by expert and multiplied with `ragged_dot`, which costs top_k experts per token whatever their
number. On a mesh the experts are shared out over `tp`: a part computes the tokens of its own experts, the rest of its
rows are zero, and a sum over `tp` brings them together.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from portlab_jax.lora import Low
from portlab_jax.mesh import axis_size, partition, shard
from portlab_jax.quantize import gathered
from portlab_jax.remat import PRODUCT
from portlab_spec.models import GemmaConfig

Array = jax.Array


def route(x: Array, w: dict[str, Array], config: GemmaConfig) -> tuple[Array, Array]:
    """The experts of each token.

    Args:
        x: (G, N, D), normed without a scale.
        w: a layer's weights by name.
        config: the model.

    Returns:
        int32 (G, N, k) experts and float32 (G, N, k) weights: the softmax over all experts, its k largest values made
        to sum to 1, times a factor of each expert.
    """
    assert config.experts is not None
    h = x * w["router.scale"].astype(x.dtype) * jnp.asarray(config.hidden_size**-0.5, x.dtype)
    projection = shard(w["router.proj"], None, None).astype(x.dtype)
    scores = jnp.einsum("gnd,ed->gne", h, projection, out_sharding=partition(("group", None, None), (x.shape[0], 1, 1)))
    weights, experts = jax.lax.top_k(jax.nn.softmax(scores.astype(jnp.float32), axis=-1), config.experts.top_k)
    weights /= jnp.sum(weights, axis=-1, keepdims=True)
    factor = w["router.per_expert_scale"].astype(jnp.float32)
    one_hot = experts[..., None] == jnp.arange(config.experts.count)
    return experts, weights * jnp.sum(one_hot * factor, axis=-1)


def mix(x: Array, experts: Array, weights: Array, w: dict[str, Array], low: dict[str, Low]) -> Array:
    """The weighted sum of each token's experts.

    Args:
        x: (G, N, D).
        experts: int32 (G, N, k).
        weights: float32 (G, N, k).
        w: `experts.gate_up_proj` (E, 2F, D) and `experts.down_proj` (E, D, F).
        low: their adapters, if any.

    Returns:
        (G, N, D) in x's dtype.
    """
    gate_up = gathered(w["experts.gate_up_proj"], "experts", None, None, dtype=x.dtype)
    down = gathered(w["experts.down_proj"], "experts", None, None, dtype=x.dtype)
    lows = [
        Low(shard(pair.a, "experts", None, None), shard(pair.b, "experts", None, None)) if pair else None
        for pair in (low.get("experts.gate_up_proj"), low.get("experts.down_proj"))
    ]
    mesh = jax.sharding.get_abstract_mesh()
    count = gate_up.shape[0]
    if mesh.empty:
        return _mix_local(x, experts, weights, gate_up, down, lows, 0)
    cut = count % axis_size("experts") == 0
    rows, parts = partition(("group",), (x.shape[0],)), PartitionSpec("tp" if cut else None)

    def local(x: Array, experts: Array, weights: Array, gate_up: Array, down: Array, lows: list[Low | None]) -> Array:
        first = jax.lax.axis_index("tp") * gate_up.shape[0] if cut else 0
        if cut:
            # Said explicitly, so that gradients are summed over the parts: JAX does not cast by itself where an array
            # that all parts share is indexed by one that differs, and the gradient would be that of one part.
            x, weights = (jax.lax.pcast(value, "tp", to="varying") for value in (x, weights))
        out = _mix_local(x, experts, weights, gate_up, down, lows, first)
        return jax.lax.psum(out, "tp") if cut else out

    specs = (rows, rows, rows, parts, parts, parts)
    return jax.shard_map(local, in_specs=specs, out_specs=rows)(x, experts, weights, gate_up, down, lows)


def _mix_local(
    x: Array, experts: Array, weights: Array, gate_up: Array, down: Array, lows: list[Low | None], first: Array | int
) -> Array:
    """`mix` with the experts first..first+E of all; tokens of others contribute zero."""
    count, k, d = gate_up.shape[0], experts.shape[-1], x.shape[-1]
    expert = experts.reshape(-1) - first
    expert = jnp.where((expert >= 0) & (expert < count), expert, count)  # of another part: sorted to the end
    order = jnp.argsort(expert, stable=True)
    sizes = jnp.sum(expert[:, None] == jnp.arange(count), axis=0, dtype=jnp.int32)
    product = functools.partial(_expert_linear, sizes=sizes)

    h = checkpoint_name(product(x.reshape(-1, d)[order // k], gate_up, lows[0]), PRODUCT)
    gate, up = jnp.split(h, 2, axis=-1)
    y = product(jax.nn.gelu(gate, approximate=True) * up, down, lows[1])
    mine = jnp.arange(len(order)) < jnp.sum(sizes)
    y = jnp.where(mine[:, None], y * weights.reshape(-1)[order, None].astype(y.dtype), 0)
    back = jnp.argsort(order)
    return jnp.sum(y[back].reshape(*x.shape[:-1], k, d), axis=-2)


def _expert_linear(x: Array, weight: Array, low: Low | None, sizes: Array) -> Array:
    """Rows (M, in), sorted by expert, each through its expert's matrix (E, out, in)."""
    y = _ragged(x, weight.swapaxes(1, 2), sizes)
    if low is not None:
        y += _ragged(_ragged(x, low.a.astype(x.dtype), sizes).astype(x.dtype), low.b.astype(x.dtype), sizes)
    return y.astype(x.dtype)


def _ragged(x: Array, matrices: Array, sizes: Array) -> Array:
    return jax.lax.ragged_dot(x, matrices, sizes, preferred_element_type=jnp.float32)
