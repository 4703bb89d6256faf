"""Greedy decoding with a key/value cache that computes the shared prefix once.

All prompts of a tool-call set start with the same tokens. Their keys and values are computed once and shared by
every row; a row caches only its own question and answer.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from portlab_jax.lora import Adapter, AdapterOptions
from portlab_jax.loss import head_logits
from portlab_jax.mesh import MeshPlan
from portlab_jax.model import (
    Params,
    Rows,
    attend_rows,
    decoder_layer,
    embed,
    hidden_states,
    rms_norm,
    rope_tables,
    sliding_flags,
    visible,
)
from portlab_spec.data.tokens import common_prefix
from portlab_spec.models import GemmaConfig

Array = jax.Array
KV = tuple[Array, Array]


class RowCache(NamedTuple):
    """Keys and values of B rows: Tq prompt slots, then M slots for generated tokens.

    Attributes:
        k, v: (L, B, Tq + M, K, d).
        positions: int32 (B, Tq + M), position of the token in each slot.
        valid: bool (B, Tq + M), False for padding and for slots not yet written.
    """

    k: Array
    v: Array
    positions: Array
    valid: Array


class Decoder:
    """Greedy decoding of a fixed model; one compilation per shape of (prefix, batch, prompt length)."""

    def __init__(
        self,
        config: GemmaConfig,
        options: AdapterOptions,
        stop_ids: Sequence[int],
        max_new_tokens: int,
        mesh: MeshPlan,
    ) -> None:
        self._mesh = mesh
        self._prefill_prefix = jax.jit(functools.partial(_prefill_prefix, config=config, options=options))
        self._generate = jax.jit(
            functools.partial(_generate, config=config, options=options, stop_ids=tuple(stop_ids), new=max_new_tokens)
        )
        self._stop = set(stop_ids)

    def __call__(
        self,
        params: Params,
        adapter: Adapter,
        prompts: Sequence[Sequence[int]],
        *,
        batch_size: int = 32,
        advance: Callable[[float], None] = lambda done: None,
    ) -> list[list[int]]:
        """Continue every prompt.

        Args:
            params: frozen weights.
            adapter: LoRA leaves and token rows.
            prompts: token ids, BOS included.
            batch_size: rows decoded together.
            advance: told how many prompts are done.

        Returns:
            The generated ids of each prompt, up to and including the stop token, or max_new_tokens of them.
        """
        p = common_prefix_length(prompts)
        prefix_kv = self._prefill_prefix(params, adapter, jnp.array(prompts[0][:p], jnp.int32))
        longest = max(len(ids) for ids in prompts) - p
        width = -(-longest // 8) * 8
        outputs: list[list[int]] = []
        for start in range(0, len(prompts), batch_size):
            chunk = prompts[start : start + batch_size]
            tokens = np.zeros((batch_size, width), np.int32)
            lengths = np.ones(batch_size, np.int32)
            for row, ids in enumerate(chunk):
                tokens[row, : len(ids) - p] = ids[p:]
                lengths[row] = len(ids) - p
            # Rows of padding count as done from the start, so that they never prolong the loop.
            padding = np.arange(batch_size) >= len(chunk)
            rows_side = self._mesh.put_rows((tokens, lengths, padding))
            generated = np.asarray(self._generate(params, adapter, prefix_kv, *rows_side))
            outputs += [self._cut(generated[row].tolist()) for row in range(len(chunk))]
            advance(len(outputs))
        return outputs

    def _cut(self, ids: list[int]) -> list[int]:
        end = next((i + 1 for i, token in enumerate(ids) if token in self._stop), len(ids))
        return ids[:end]


def common_prefix_length(prompts: Sequence[Sequence[int]]) -> int:
    """Tokens shared by all prompts, at least one token short of the shortest."""
    return min(common_prefix(prompts), min(len(ids) for ids in prompts) - 1)


def _prefill_prefix(
    params: Params, adapter: Adapter, prefix: Array, *, config: GemmaConfig, options: AdapterOptions
) -> KV:
    """Keys and values (L, P, K, d) of the shared prefix."""
    none = jnp.zeros((0, 1), jnp.int32)
    rows = Rows(prefix, none, none, none)
    _, _, cache = hidden_states(params, adapter, config, options, rows, with_cache=True)
    return cache


def _generate(
    params: Params,
    adapter: Adapter,
    prefix_kv: KV,
    prompts: Array,
    lengths: Array,
    done: Array,
    *,
    config: GemmaConfig,
    options: AdapterOptions,
    stop_ids: tuple[int, ...],
    new: int,
) -> Array:
    """Greedy continuation: prompts (B, Tq) right-padded, lengths (B,) -> int32 (B, new); -1 after a stop."""
    batch, width = prompts.shape
    p = prefix_kv[0].shape[1]
    slots = jnp.arange(width + new)[None, :]
    is_prompt = slots < width
    positions = p + jnp.where(is_prompt, slots, lengths[:, None] + slots - width)
    shape = (config.num_hidden_layers, batch, width + new, config.num_key_value_heads, config.head_dim)
    empty = jnp.zeros(shape, prefix_kv[0].dtype)
    cache = RowCache(empty, empty, positions, is_prompt & (slots < lengths[:, None]))
    run = functools.partial(_run_rows, params, adapter, config, options, prefix_kv)

    def pick(hidden: Array) -> Array:
        logits = head_logits(hidden, adapter.get("token_rows"), params["embed_tokens"], options.token_ids)
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    hidden, cache = run(cache, prompts, jnp.int32(0))
    token = pick(hidden[jnp.arange(batch), lengths - 1])
    output = jnp.full((batch, new), -1, jnp.int32)
    stops = jnp.array(stop_ids, jnp.int32)

    def go_on(state: tuple[Any, ...]) -> Array:
        i, _, done, *_ = state
        return (i < new) & ~done.all()

    def one(state: tuple[Any, ...]) -> tuple[Any, ...]:
        i, token, done, output, cache = state
        output = output.at[:, i].set(jnp.where(done, -1, token))
        done = done | (token[:, None] == stops).any(axis=1)
        cache = cache._replace(valid=cache.valid | (slots == width + i))
        hidden, cache = run(cache, token[:, None], width + i)
        return i + 1, pick(hidden[:, 0]), done, output, cache

    *_, output, _ = jax.lax.while_loop(go_on, one, (jnp.int32(0), token, done, output, cache))
    return output


def _run_rows(
    params: Params,
    adapter: Adapter,
    config: GemmaConfig,
    options: AdapterOptions,
    prefix_kv: KV,
    cache: RowCache,
    tokens: Array,
    at: Array,
) -> tuple[Array, RowCache]:
    """Run tokens (B, T) that occupy cache slots at..at+T: hidden states (B, T, D) and the cache with them in it."""
    batch, width = tokens.shape
    p = prefix_kv[0].shape[1]
    positions = jax.lax.dynamic_slice_in_dim(cache.positions, at, width, axis=1)
    x = embed(params, adapter, options, tokens.reshape(-1))
    cos, sin = rope_tables(config, positions.reshape(-1))
    cross = visible(config, positions[:, :, None], jnp.arange(p)[None, None, :])
    own = visible(config, positions[:, :, None], cache.positions[:, None, :]) & cache.valid[:, None, :]
    scale = config.query_pre_attn_scalar**-0.5

    def body(x: Array, scanned: tuple[Params, Params, Array, KV, KV]) -> tuple[Array, KV]:
        weights, lora, sliding, (k_prefix, v_prefix), (k_own, v_own) = scanned

        def attend(q: Array, k: Array, v: Array) -> tuple[Array, KV]:
            def rows(a: Array) -> Array:
                return a.reshape(batch, width, *a.shape[1:])

            k_all = jax.lax.dynamic_update_slice_in_dim(k_own, rows(k), at, axis=1)
            v_all = jax.lax.dynamic_update_slice_in_dim(v_own, rows(v), at, axis=1)
            out = attend_rows(rows(q), (k_prefix, v_prefix, cross[sliding]), (k_all, v_all, own[sliding]), scale)
            return out.reshape(q.shape), (k_all, v_all)

        return decoder_layer(x, weights, lora, config, options, cos[sliding], sin[sliding], attend)

    scanned = (params["layers"], adapter["lora"], sliding_flags(config), prefix_kv, (cache.k, cache.v))
    x, (k, v) = jax.lax.scan(body, x, scanned)
    x = rms_norm(x, params["norm"], config.rms_norm_eps)
    return x.reshape(batch, width, -1), cache._replace(k=k, v=v)
