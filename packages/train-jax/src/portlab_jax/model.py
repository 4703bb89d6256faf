"""The Gemma 3 and Gemma 4 text models, from token ids to final hidden states.

Shape letters: G groups (parts of the mesh that see their own rows), N tokens of a group, D hidden, H query heads,
K key/value heads, d head size, P width of per-layer inputs, V vocabulary; n layers of a stack.

What a token sees is the caller's business: `Attend` gets queries, keys and values, and returns what was attended. So
training on packed rows, decoding with a cache and plain forward passes are one model.

Layers of one kind are stacked on axis 0 and run in a loop, so that compile time does not grow with depth
(`portlab_spec.models.layers`). Frozen weights are not scanned over but indexed by layer inside the loop: a scan over
a pattern of five layers and one would first copy the five out of the stack, and then each of them once more.
"""

import functools
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from portlab_jax.experts import mix, route
from portlab_jax.lora import Adapter, AdapterOptions, Ends, Low, assemble, linear, replace_token_rows
from portlab_jax.mesh import axis_size, partition, shard
from portlab_jax.remat import GATED, INPUT, NORMED, PRODUCT, RESIDUAL, ROTATED, Remat, checkpointed
from portlab_spec.models import GemmaConfig, LayerKind, Rope, Section, Stack, UnsupportedModel, param_table

Params = dict[str, Any]
Array = jax.Array
KV = tuple[Array, Array]


class Attend(Protocol):
    """What a model does with queries, keys and values."""

    def __call__(self, kind: LayerKind, q: Array, kv: Any, state: Any, *, shared: bool) -> tuple[Array, Any, Any]:
        """Attend.

        Args:
            kind: the layer's.
            q: (G, N, H, d), rotated.
            kv: the layer's own keys and values, each (G, N, K, d); in a layer that shares, what the layer that it
                shares with returned as the second result.
            state: the layer's entry of the state given to `run_layers`, None if there is none.
            shared: whether `kv` comes from another layer.

        Returns:
            The attended values (G, N, H, d), what later layers share, and the layer's new state.
        """
        ...

    def empty(self, kind: LayerKind, x: Array) -> Any:
        """Something of the shape of what a layer of this kind hands on; x is (G, N, D). It is never read."""
        ...


class Inputs(NamedTuple):
    """Tokens of a group.

    Attributes:
        ids: int32 (G, N).
        positions: int32 (G, N), for RoPE.
    """

    ids: Array
    positions: Array


class Weights(NamedTuple):
    """Everything that a forward pass reads.

    Attributes:
        frozen: {"embed_tokens": (V, D), "norm": (D,), ..., "layers": {stack: {name: (n, ...)}}}; what is trained in
            full fine-tuning is missing.
        trained: the same tree with what is trained in full fine-tuning; {} with LoRA.
        low: LoRA by stack and name, see `assemble`.
        token_rows: float32 (t, D), rows that replace those of the embedding, or None.
    """

    frozen: Params
    trained: Params
    low: dict[str, dict[str, Low]]
    token_rows: Array | None

    def top(self, name: str) -> Array:
        """A weight outside the layers."""
        return self.trained[name] if name in self.trained else self.frozen[name]

    @property
    def embedding(self) -> Array:
        """The token embedding, which is also the head."""
        return self.top("embed_tokens")


def with_adapter(params: Params, adapter: Adapter, options: AdapterOptions) -> Weights:
    """A frozen base and its adapter."""
    return Weights(params, {}, assemble(adapter, options), adapter.get("token_rows"))


def require_gemma(config: GemmaConfig) -> None:
    """Refuse a model whose layers are not written here.

    Raises:
        UnsupportedModel: it is no Gemma.
    """
    if not config.is_gemma:
        raise UnsupportedModel(
            f"train-jax computes Gemma's layers itself and has none of {config.family}",
            where="model",
            fix="Run the recipe with train-torchax, which takes transformers' model",
        )


def hidden_states(
    weights: Weights,
    config: GemmaConfig,
    options: AdapterOptions,
    inputs: Inputs,
    attend: Attend,
    *,
    state: dict[str, Any] | None = None,
    dropout_key: Array | None = None,
    remat: Remat = "none",
    dtype: Any = None,
) -> tuple[Array, dict[str, Any]]:
    """Run the model.

    Args:
        weights: frozen, trained and low-rank weights.
        config: the model.
        options: static facts of the adapter.
        inputs: ids and positions.
        attend: who sees whom.
        state: for each stack something with a leading axis of its layers, handed to `attend` layer by layer.
        dropout_key: a PRNG key while training with dropout, else None.
        remat: what the backward pass recomputes.
        dtype: of the activations; by default that of the embedding.

    Returns:
        Final normed hidden states (G, N, D), and the new state by stack.
    """
    dtype = dtype or weights.embedding.dtype
    x = embed(weights, options, inputs.ids, dtype)
    per_layer = per_layer_inputs(weights, config, inputs.ids, x) if config.per_layer else None
    loop = Loop(weights, config, options, inputs.positions, attend, per_layer, dropout_key, remat)
    x, new_state = loop.run(x, state or {})
    return norm(x, weights.top("norm"), config), new_state


def embed(weights: Weights, options: AdapterOptions, ids: Array, dtype: Any) -> Array:
    """Scaled token embeddings: ids (G, N) -> (G, N, D). The scale is rounded to the activations' type, as upstream."""
    rows = replace_token_rows(_rows_of(weights.embedding, ids).astype(dtype), ids, weights.token_rows, options)
    return checkpoint_name(rows * jnp.asarray(rows.shape[-1] ** 0.5, dtype), "embedded")


def _rows_of(table: Array, ids: Array) -> Array:
    return table.at[ids].get(out_sharding=partition(("group", None, None), (ids.shape[0], 1, 1)))


def per_layer_inputs(weights: Weights, config: GemmaConfig, ids: Array, x: Array) -> Array:
    """Gemma 4 E-series: what every layer is told about every token, (L, G, N, P).

    Half of it looks the token up in a table of its own, half is a projection of its embedding.
    """
    assert config.per_layer is not None
    size, layers = config.per_layer.size, config.num_hidden_layers

    def by_layer(flat: Array) -> Array:
        return flat.reshape(*ids.shape, layers, size)

    looked_up = by_layer(_rows_of(weights.top("embed_tokens_per_layer"), ids).astype(x.dtype))
    looked_up *= jnp.asarray(size**0.5, x.dtype)
    name = "per_layer_model_projection"
    projected = by_layer(linear(x, weights.top(name), None, _ends(config)[name]))
    projected *= jnp.asarray(config.hidden_size**-0.5, x.dtype)
    projected = norm(projected, weights.top("per_layer_projection_norm"), config)
    return jnp.moveaxis((projected + looked_up) * jnp.asarray(2.0**-0.5, x.dtype), 2, 0)


@functools.lru_cache
def _ends(config: GemmaConfig) -> dict[str, Ends]:
    return {p.key: Ends.of(p.dims) for p in param_table(config) if len(p.dims) >= 2}


class Loop:
    """The loop over layers, section by section."""

    def __init__(
        self,
        weights: Weights,
        config: GemmaConfig,
        options: AdapterOptions,
        positions: Array,
        attend: Attend,
        per_layer: Array | None,
        dropout_key: Array | None,
        remat: Remat,
    ) -> None:
        self.weights, self.config, self.options, self.attend = weights, config, options, attend
        self.per_layer, self.dropout_key, self.remat = per_layer, dropout_key, remat
        self.ropes = {rope: rope_table(*rope, positions) for rope in {(k.rope, k.head_dim) for k in config.layers}}
        self.shares = any(kind.shares_kv for kind in config.layers)

    def run(self, x: Array, state: dict[str, Any]) -> tuple[Array, dict[str, Any]]:
        """All layers: x (G, N, D) after the last, and the new state by stack."""
        kvs: dict[str, Any] = {}
        new_state: dict[str, Any] = {}
        for section in self.config.sections:
            x, kvs, fresh = self._run_section(section, x, kvs, state)
            new_state |= fresh
        return x, new_state

    def _run_section(
        self, section: Section, x: Array, kvs: dict[str, Any], state: dict[str, Any]
    ) -> tuple[Array, dict[str, Any], dict[str, Any]]:
        """Run a pattern of stacks as often as it repeats; what later layers share goes from one to the next."""
        scanned = {s.name: _by_repeat(self._scanned(s, state), section.repeats, s.count) for s in section.stacks}
        own: dict[str, Any] = {}
        if self.shares:
            kinds = (stack.kind for stack in section.stacks)
            own = {kind.attention: self.attend.empty(kind, x) for kind in kinds if not kind.shares_kv}

        def pattern(carry: tuple[Array, dict[str, Any]], xs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            states = {}
            for stack in section.stacks:
                carry, states[stack.name] = self._run_stack(stack, carry, kvs, xs[stack.name])
            return carry, states

        (x, own), states = _scan(pattern, (x, own), scanned, section.repeats)
        flat = {name: jax.tree.map(_flat, state) for name, state in states.items()}
        return x, kvs | own, flat

    def _run_stack(self, stack: Stack, carry: Any, kvs: dict[str, Any], xs: Any) -> tuple[Any, Any]:
        """Run `count` layers of one stack."""
        frozen = self.weights.frozen.get("layers", {}).get(stack.name, {})
        kind = stack.kind

        def body(carry: tuple[Array, dict[str, Any]], xs: dict[str, Any]) -> tuple[Any, Any]:
            x, own = carry

            def layer(x: Array, xs: dict[str, Any], shared: Any) -> tuple[Array, Any, Any]:
                x = checkpoint_name(x, INPUT)
                picked = jax.tree.map(lambda leaf: _pick(leaf, xs["index"]), frozen)
                return self._layer(stack, x, picked | xs["trained"], xs, shared)

            shared = kvs[kind.attention] if kind.shares_kv else None
            x, kv, new_state = checkpointed(layer, self.remat)(x, xs, shared)
            if kind.attention in own and not kind.shares_kv:
                own = own | {kind.attention: kv}
            return (x, own), new_state

        return _scan(body, carry, xs, stack.count)

    def _scanned(self, stack: Stack, state: dict[str, Any]) -> dict[str, Any]:
        """What a stack's layers differ in, each with a leading axis of layers."""
        layers = jnp.array(stack.layers, jnp.int32)
        return {
            "index": jnp.arange(len(stack.layers), dtype=jnp.int32),
            "trained": self.weights.trained.get("layers", {}).get(stack.name, {}),
            "low": self.weights.low.get(stack.name, {}),
            "per_layer": None if self.per_layer is None else self.per_layer[layers],
            "state": state.get(stack.name),
            "number": layers,
        }

    def _layer(
        self, stack: Stack, x: Array, w: dict[str, Array], xs: dict[str, Any], shared: Any
    ) -> tuple[Array, Any, Any]:
        """One decoder layer: x (G, N, D) after it, what later layers share, its new state."""
        config, kind, low = self.config, stack.kind, xs["low"]
        key = None if self.dropout_key is None else jax.random.fold_in(self.dropout_key, xs["number"])
        ends = _ends(config)

        def lin(name: str, value: Array) -> Array:
            keep = None
            if key is not None and name in low and self.options.dropout > 0:
                name_key = jax.random.fold_in(key, zlib.crc32(name.encode()))
                keep = jax.random.bernoulli(name_key, 1.0 - self.options.dropout, value.shape)
            y = linear(value, w[name], low.get(name), ends[f"{stack.name}.{name}"], keep, self.options.dropout)
            return checkpoint_name(y, PRODUCT)

        def rms(name: str, value: Array) -> Array:
            return checkpoint_name(norm(value, w[name], config), NORMED)

        h = rms("input_layernorm", x)
        q, kv = self._queries_keys_values(kind, h, w, lin)
        attended, kv, state = self.attend(kind, q, shared if kind.shares_kv else kv, xs["state"], shared=kind.shares_kv)
        h = lin("self_attn.o_proj", attended.reshape(*x.shape[:2], -1))
        x = checkpoint_name(x + norm(h, w["post_attention_layernorm"], config), RESIDUAL)
        h = rms("pre_feedforward_layernorm", x)
        h = checkpoint_name(gated(lin("mlp.gate_proj", h), lin("mlp.up_proj", h)), GATED)
        h = lin("mlp.down_proj", h)
        if config.experts:
            h = rms("post_feedforward_layernorm_1", h)
            chosen = route(norm(x, None, config), w, config)
            mixed = mix(rms("pre_feedforward_layernorm_2", x), *chosen, w, low)
            h = h + rms("post_feedforward_layernorm_2", mixed)
        x = x + norm(h, w["post_feedforward_layernorm"], config)
        if config.per_layer:
            x = checkpoint_name(x, RESIDUAL)
            h = checkpoint_name(gated(lin("per_layer_input_gate", x), xs["per_layer"]), GATED)
            x = x + norm(lin("per_layer_projection", h), w["post_per_layer_input_norm"], config)
        if config.family == "gemma4":
            x = x * w["layer_scalar"].astype(x.dtype)
        return x, kv if self.shares else None, state

    def _queries_keys_values(
        self, kind: LayerKind, h: Array, w: dict[str, Array], lin: Callable[[str, Array], Array]
    ) -> tuple[Array, KV | None]:
        """Normed and rotated q (G, N, H, d) and k, and normed v, each (G, N, K, d); None where they are shared."""
        cos, sin = self.ropes[kind.rope, kind.head_dim]

        def split(value: Array, axis: str = "kv_heads") -> Array:
            # Without it libtpu (0.0.50, 0.0.52) fuses the product with the norm of its heads, and dies of that where a
            # Pallas kernel follows ("split of a padded window dim").
            value = jax.lax.optimization_barrier(value)
            # Said again: of a single head, a reshape would cut the head itself.
            return shard(value.reshape(*value.shape[:2], -1, kind.head_dim), "group", None, axis, None)

        q = norm(split(lin("self_attn.q_proj", h), "heads"), w["self_attn.q_norm"], self.config)
        q = checkpoint_name(rope(q, cos, sin), ROTATED)
        if kind.shares_kv:
            return q, None
        k = split(lin("self_attn.k_proj", h))
        v = k if kind.key_is_value else split(lin("self_attn.v_proj", h))
        if self.config.family == "gemma4":
            v = norm(v, None, self.config)
            v = checkpoint_name(v, NORMED)
        k = rope(norm(k, w["self_attn.k_norm"], self.config), cos, sin)
        return q, (checkpoint_name(k, ROTATED), v)


def _scan(body: Callable[..., Any], carry: Any, xs: Any, length: int) -> tuple[Any, Any]:
    """`lax.scan`, or one plain call of the body for a single iteration."""
    if length > 1:
        return jax.lax.scan(body, carry, xs)
    carry, y = body(carry, jax.tree.map(lambda leaf: leaf[0], xs))
    return carry, jax.tree.map(lambda leaf: leaf[None], y)


def _by_repeat(tree: Any, repeats: int, count: int) -> Any:
    return jax.tree.map(lambda leaf: _lead(leaf, 1, repeats, count), tree)


def _flat(leaf: Array) -> Array:
    return _lead(leaf, 2, leaf.shape[0] * leaf.shape[1])


def _lead(leaf: Array, old: int, *new: int) -> Array:
    """Reshape the leading dimensions, which no mesh cuts; said so, since a reshape may forget how the rest is cut."""
    shape = (*new, *leaf.shape[old:])
    if jax.sharding.get_abstract_mesh().empty:
        return leaf.reshape(shape)
    spec = jax.typeof(leaf).sharding.spec
    return jax.lax.reshape(leaf, shape, out_sharding=PartitionSpec(*(None,) * len(new), *spec[old:]))


def _pick(stacked: Array, index: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(stacked, index, keepdims=False)


def empty_kv(kind: LayerKind, x: Array) -> KV:
    """Zeros of the shape of a layer's keys and values (G, N, K, d), for activations x (G, N, D)."""
    kv = shard(jnp.zeros((*x.shape[:2], kind.kv_heads, kind.head_dim), x.dtype), "group", None, "kv_heads", None)
    return kv, kv


def repeat_heads(kv: KV, heads: int) -> KV:
    """Keys and values (G, N, K, d) with one head per query head, where a mesh cuts queries finer than K heads."""
    if kv[0].shape[2] % axis_size("kv_heads") == 0 or heads % axis_size("heads"):
        return kv
    k, v = (jnp.repeat(shard(x, "group"), heads // x.shape[2], axis=2) for x in kv)
    return shard(k, "group", None, "heads", None), shard(v, "group", None, "heads", None)


# The backward pass recomputes these cheap functions from their inputs; their intermediates would otherwise be kept
# for every layer, which more than doubles the step's memory.
_recomputed = functools.partial(jax.checkpoint, prevent_cse=False)


@_recomputed
def gated(gate: Array, up: Array) -> Array:
    """Gemma's gated activation: gelu with the tanh approximation, times `up`."""
    return jax.nn.gelu(gate, approximate=True) * up


def norm(x: Array, weight: Array | None, config: GemmaConfig) -> Array:
    """RMS norm over the last axis, float32 inside; scale 1 + weight in Gemma 3, weight in Gemma 4, 1 without."""
    return _rms_norm(x, weight, config.rms_norm_eps, config.norm_offset)


@functools.partial(_recomputed, static_argnums=(2, 3))
def _rms_norm(x: Array, weight: Array | None, eps: float, offset: float) -> Array:
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (normed if weight is None else normed * (offset + weight.astype(jnp.float32))).astype(x.dtype)


def rope(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate the two halves of the head: x (G, N, heads, d), cos and sin (G, N, d/2)."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def rope_table(settings: Rope, head_dim: int, positions: Array) -> tuple[Array, Array]:
    """cos and sin, float32 (G, N, d/2); pairs beyond `fraction` do not rotate."""
    rotating = int(settings.fraction * head_dim // 2)
    frequency = settings.theta ** (-jnp.arange(rotating, dtype=jnp.float32) * 2 / head_dim) / settings.factor
    frequency = jnp.pad(frequency, (0, head_dim // 2 - rotating))
    angles = positions.astype(jnp.float32)[..., None] * frequency
    return jnp.cos(angles), jnp.sin(angles)
