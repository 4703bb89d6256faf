"""Greedy decoding with a key/value cache that computes the shared prefix once.

All prompts of a tool-call set start with the same tokens. Their keys and values are computed once and shared by every
row; a row caches only its own question and answer. It is the training model with another `Attend`.

Shape letters: B rows, P prefix tokens, T prompt width, M = T + new cache slots, K key/value heads, d head size.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec

from portlab_jax.attention import attend
from portlab_jax.lora import AdapterOptions
from portlab_jax.loss import LossOptions, head_logits
from portlab_jax.mesh import GROUP_AXES, MeshPlan, axis_size, partition, shard
from portlab_jax.model import KV, Inputs, Weights, empty_kv, hidden_states, repeat_heads
from portlab_spec.data.tokens import common_prefix
from portlab_spec.models import GemmaConfig, LayerKind
from portlab_spec.packing import Blocks, Rows

Array = jax.Array

MASKED = -1e30
WIDTHS = 32  # prompt widths are multiples of it: one compilation serves many questions
BLOCK = 64


class Slots(NamedTuple):
    """The cache slots of B rows: T for the prompt, then one for each generated token.

    Attributes:
        positions: int32 (B, M), position of the token in each slot.
        valid: bool (B, M), False for padding and for slots not yet written.
    """

    positions: Array
    valid: Array


class Decoder:
    """Greedy decoding of a fixed model; one compilation per shape of (prefix, batch, prompt width)."""

    def __init__(
        self,
        config: GemmaConfig,
        options: AdapterOptions,
        stop_ids: Sequence[int],
        max_new_tokens: int,
        mesh: MeshPlan,
        *,
        dtype: Any = None,
    ) -> None:
        """Fix what is compiled; `dtype` is that of the activations, by default the embedding's."""
        self._mesh, self._config, self._stop = mesh, config, set(stop_ids)
        self._prefill = jax.jit(functools.partial(_prefill, config=config, options=options, dtype=dtype))
        self._generate = jax.jit(
            functools.partial(
                _generate, config=config, options=options, dtype=dtype, stop_ids=tuple(stop_ids), new=max_new_tokens
            )
        )

    def __call__(
        self,
        weights: Weights,
        prompts: Sequence[Sequence[int]],
        *,
        batch_size: int = 32,
        advance: Callable[[float], None] = lambda done: None,
    ) -> list[list[int]]:
        """Continue every prompt. Call it under the mesh.

        Args:
            weights: of the model, adapter included.
            prompts: token ids, BOS included.
            batch_size: rows decoded together, rounded up to a multiple of the mesh's groups.
            advance: told how many prompts are done.

        Returns:
            The generated ids of each prompt, up to and including the stop token, or max_new_tokens of them.
        """
        p = common_prefix_length(prompts)
        prefix = self._prefill(weights, jnp.array(prompts[0][:p], jnp.int32)) if p else None
        width = _multiple(max(len(ids) for ids in prompts) - p, WIDTHS)
        size = _multiple(batch_size, self._mesh.groups)
        outputs: list[list[int]] = []
        for start in range(0, len(prompts), size):
            chunk = prompts[start : start + size]
            tokens = np.zeros((size, width), np.int32)
            lengths = np.ones(size, np.int32)
            for row, ids in enumerate(chunk):
                tokens[row, : len(ids) - p] = ids[p:]
                lengths[row] = len(ids) - p
            # Rows of padding count as done from the start, so that they never prolong the loop.
            padding = np.arange(size) >= len(chunk)
            rows = self._mesh.put_rows((tokens, lengths, padding))
            generated = _on_host(self._generate(weights, prefix, *rows))
            outputs += [self._cut(generated[row].tolist()) for row in range(len(chunk))]
            advance(len(outputs))
        return outputs

    def _cut(self, ids: list[int]) -> list[int]:
        end = next((i + 1 for i, token in enumerate(ids) if token in self._stop), len(ids))
        return ids[:end]


def common_prefix_length(prompts: Sequence[Sequence[int]]) -> int:
    """Tokens shared by all prompts, at least one token short of the shortest."""
    return min(common_prefix(prompts), min(len(ids) for ids in prompts) - 1)


def _multiple(value: int, of: int) -> int:
    return -(-value // of) * of


def _on_host(array: Array) -> np.ndarray:
    if array.is_fully_addressable:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


class PrefixAttention:
    """Causal attention of one sequence, whose keys and values are kept."""

    def __init__(self, length: int, padded: int, scale: float) -> None:
        index = jnp.arange(padded, dtype=jnp.int32)
        ends = jnp.where(index < length, length, 0)[None, None]
        blocks = jnp.arange(padded // BLOCK, dtype=jnp.int32)
        table = jnp.where(blocks <= blocks[:, None], blocks, -1)[None, None]
        self.rows, self.blocks, self.scale = (
            Rows(index[None, None], index[None, None], ends),
            Blocks(table, table),
            scale,
        )

    def empty(self, kind: LayerKind, x: Array) -> KV:
        """See `portlab_jax.model.Attend`."""
        return empty_kv(kind, x)

    def __call__(self, kind: LayerKind, q: Array, kv: Any, state: Any, *, shared: bool) -> tuple[Array, Any, Any]:
        """See `portlab_jax.model.Attend`; the new state is the layer's own keys and values."""
        k, v = repeat_heads(kv, q.shape[2])
        one_row = (q[:, None], k[:, None], v[:, None])
        out = attend(*one_row, self.rows, self.blocks, window=kind.window, scale=self.scale)[:, 0]
        return shard(out, "group", None, "heads", None), kv, None if shared else kv


def _prefill(
    weights: Weights, prefix: Array, *, config: GemmaConfig, options: AdapterOptions, dtype: Any
) -> dict[str, Any]:
    """Keys and values (n, 1, P, K, d) of the shared prefix, by stack."""
    length = prefix.shape[0]
    padded = _multiple(length, BLOCK)
    ids = jnp.pad(prefix, (0, padded - length))[None]
    positions = jnp.arange(padded, dtype=jnp.int32)[None]
    attention = PrefixAttention(length, padded, config.attention_scale)
    _, state = hidden_states(weights, config, options, Inputs(ids, positions), attention, dtype=dtype)
    return {name: jax.tree.map(lambda x: x[:, :, :length], kv) for name, kv in state.items()}


class RowAttention:
    """Attention of tokens (B, T) in cache slots at..at+T to the shared prefix and to their row's cache.

    A layer's state is its prefix's keys and values (1, P, K, d), or None without a prefix, and its rows' (B, M, K, d).
    """

    def __init__(self, slots: Slots, queries: Array, at: Array, prefix: int, scale: float) -> None:
        self.slots, self.queries, self.at, self.prefix, self.scale = slots, queries, at, prefix, scale

    def empty(self, kind: LayerKind, x: Array) -> tuple[KV | None, KV]:
        """See `portlab_jax.model.Attend`."""

        def zeros(rows: int, length: int) -> KV:
            kv = jnp.zeros((rows, length, kind.kv_heads, kind.head_dim), x.dtype)
            kv = shard(kv, "group", None, "kv_heads", None)
            return kv, kv

        return zeros(1, self.prefix) if self.prefix else None, zeros(*self.slots.valid.shape)

    def __call__(self, kind: LayerKind, q: Array, kv: Any, state: Any, *, shared: bool) -> tuple[Array, Any, Any]:
        """See `portlab_jax.model.Attend`; the new state is the row's cache with the new tokens in it."""
        prefix, own = kv if shared else state
        if not shared:
            own = tuple(
                jax.lax.dynamic_update_slice_in_dim(cache, new, self.at, axis=1)
                for cache, new in zip(own, kv, strict=True)
            )
        mask = _visible(self.queries, self.slots, self.prefix, kind.window)
        out = attend_cached(q, prefix, own, mask, self.scale)
        return out, (prefix, own), None if shared else own


def _visible(queries: Array, slots: Slots, prefix: int, window: int | None) -> Array:
    """bool (B, T, P + M): what tokens at positions (B, T) see of the prefix and of their row."""
    keys = jnp.broadcast_to(jnp.arange(prefix, dtype=jnp.int32), (queries.shape[0], prefix))
    keys = jnp.concatenate([shard(keys, "group"), slots.positions], axis=1)
    exists = jnp.concatenate([keys[:, :prefix] >= 0, slots.valid], axis=1)
    distance = queries[:, :, None] - keys[:, None, :]
    seen = (distance >= 0) & exists[:, None, :]
    return seen if window is None else seen & (distance < window)


def attend_cached(q: Array, prefix: KV | None, own: KV, mask: Array, scale: float) -> Array:
    """q (B, T, H, d) over the prefix (1, P, K, d) and the rows (B, M, K, d), under one softmax.

    `mask` is bool (B, T, P + M); the result (B, T, H, d).
    """
    prefix = None if prefix is None else repeat_heads(prefix, q.shape[2])
    own = repeat_heads(own, q.shape[2])
    local = functools.partial(_attend_local, scale=scale)
    if jax.sharding.get_abstract_mesh().empty:
        return local(q, prefix, own, mask)
    tp = "tp" if q.shape[2] % axis_size("heads") == 0 else None
    rows = GROUP_AXES if q.shape[0] % axis_size("group") == 0 else None
    heads, whole = PartitionSpec(rows, None, tp, None), PartitionSpec(None, None, tp, None)
    specs = (heads, whole, heads, PartitionSpec(rows))
    placed = [
        jax.tree.map(lambda x, spec=spec: jax.sharding.reshard(x, spec), tree)
        for tree, spec in zip((q, prefix, own, mask), specs, strict=True)
    ]
    out = jax.shard_map(local, in_specs=specs, out_specs=heads)(*placed)
    return shard(out, "group", None, "heads", None)


def _attend_local(q: Array, prefix: KV | None, own: KV, mask: Array, *, scale: float) -> Array:
    b, t, heads, head = q.shape
    kv_heads = own[0].shape[2]
    q = q.reshape(b, t, kv_heads, heads // kv_heads, head)
    scores = [jnp.einsum("btkjd,bskd->bkjts", q, own[0], preferred_element_type=jnp.float32)]
    if prefix is not None:
        scores.insert(0, jnp.einsum("btkjd,pkd->bkjtp", q, prefix[0][0], preferred_element_type=jnp.float32))
    masked = jnp.where(mask[:, None, None], jnp.concatenate(scores, axis=-1) * scale, MASKED)
    weights = jax.nn.softmax(masked, axis=-1).astype(q.dtype)
    p = masked.shape[-1] - own[0].shape[1]
    out = jnp.einsum("bkjts,bskd->btkjd", weights[..., p:], own[1])
    if prefix is not None:
        out += jnp.einsum("bkjtp,pkd->btkjd", weights[..., :p], prefix[1][0])
    return out.reshape(b, t, heads, head)


def _generate(
    weights: Weights,
    prefix: dict[str, Any] | None,
    prompts: Array,
    lengths: Array,
    done: Array,
    *,
    config: GemmaConfig,
    options: AdapterOptions,
    dtype: Any,
    stop_ids: tuple[int, ...],
    new: int,
) -> Array:
    """Greedy continuation: prompts (B, T) right-padded, lengths (B,) -> int32 (B, new); -1 after a stop."""
    batch, width = prompts.shape
    p = 0 if prefix is None else next(kv for kv in prefix.values() if kv is not None)[0].shape[2]
    index = jnp.arange(width + new)[None, :]
    positions = p + jnp.where(index < width, index, lengths[:, None] + index - width)
    slots = Slots(positions, (index < width) & (index < lengths[:, None]))
    caches = empty_caches(config, batch, width + new, dtype or weights.embedding.dtype)
    run = functools.partial(run_rows, weights, config, options, dtype, prefix, p)
    pick = functools.partial(first_choice, weights, config, options)
    hidden, caches = run(slots, caches, prompts, jnp.int32(0))
    rows = shard(jnp.arange(batch), "group")
    last = hidden.at[rows, lengths - 1].get(out_sharding=partition(("group", None), (batch, 1)))
    output = shard(jnp.full((batch, new), -1, jnp.int32), "group", None)
    stops = jnp.array(stop_ids, jnp.int32)

    def go_on(state: tuple[Any, ...]) -> Array:
        i, _, done, *_ = state
        return (i < new) & ~done.all()

    def one(state: tuple[Any, ...]) -> tuple[Any, ...]:
        i, token, done, output, slots, caches = state
        output = jnp.where(jnp.arange(new)[None, :] == i, jnp.where(done, -1, token)[:, None], output)
        done = done | (token[:, None] == stops).any(axis=1)
        slots = slots._replace(valid=slots.valid | (index == width + i))
        hidden, caches = run(slots, caches, token[:, None], width + i)
        return i + 1, pick(hidden[:, 0]), done, output, slots, caches

    *_, output, _, _ = jax.lax.while_loop(go_on, one, (jnp.int32(0), pick(last), done, output, slots, caches))
    return output


def empty_caches(config: GemmaConfig, batch: int, slots: int, dtype: Any) -> dict[str, KV]:
    """Keys and values (n, B, M, K, d) of every stack that has its own, all zero."""
    caches = {}
    for stack in config.stacks:
        if not stack.kind.shares_kv:
            shape = (len(stack.layers), batch, slots, stack.kind.kv_heads, stack.kind.head_dim)
            empty = shard(jnp.zeros(shape, dtype), None, "group", None, "kv_heads", None)
            caches[stack.name] = (empty, empty)
    return caches


def first_choice(weights: Weights, config: GemmaConfig, options: AdapterOptions, hidden: Array) -> Array:
    """The likeliest next token, int32 (...), after final hidden states (..., D)."""
    loss = LossOptions(token_ids=options.token_ids, softcap=config.final_softcap)
    logits = head_logits(hidden, weights.token_rows, weights.embedding, loss)
    return jnp.argmax(shard(logits, "group"), axis=-1).astype(jnp.int32)


def run_rows(
    weights: Weights,
    config: GemmaConfig,
    options: AdapterOptions,
    dtype: Any,
    prefix: dict[str, Any] | None,
    length: int,
    slots: Slots,
    caches: dict[str, KV],
    tokens: Array,
    at: Array,
) -> tuple[Array, dict[str, KV]]:
    """Run tokens (B, T) in cache slots at..at+T: hidden states (B, T, D), and the caches with them in."""
    positions = jax.lax.dynamic_slice_in_dim(slots.positions, at, tokens.shape[1], axis=1)
    state = {name: (None if prefix is None else prefix[name], cache) for name, cache in caches.items()}
    attention = RowAttention(slots, positions, at, length, config.attention_scale)
    inputs = Inputs(tokens, positions)
    hidden, new = hidden_states(weights, config, options, inputs, attention, state=state, dtype=dtype)
    return hidden, {name: new[name] for name in caches}
