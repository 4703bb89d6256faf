"""Block-sparse attention in plain XLA, for any backend, any dtype and any rows.

A packed row is cut into blocks of B tokens, and the packer lists which key blocks each query block sees. Work is
done in tiles: one query block of one packed row with all the query heads that share a key/value head. A tile goes
over its key blocks with a running maximum and sum (online softmax, Milakov & Gimelshein 2018), so that no
(T, T) array exists, and key blocks that nobody sees are never touched. The backward pass recomputes the
weights from the log-sum-exp of each query, as FlashAttention does (Dao et al. 2022, algorithm 4).

Shape letters: N packed rows, T row length, B block, Q = T/B, W listed key blocks per query block, H heads, K
key/value heads, J = H/K, d head size; M = Q*N*K tiles, L = B*J queries of a tile; C tiles at a time, S keys at a time.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

# The name under which the residuals of attention can be kept by a remat policy
# (`jax.checkpoint_policies.save_only_these_names`).
RESIDUALS = "attended"

# A masked score, and where the running maximum starts: exp(MASKED - LOWEST) is 0, so that a query that sees
# nothing (padding) gets zeros, not an average.
MASKED, LOWEST = -1e30, -5e29

KEYS_AT_ONCE = 512
# Working set of one step of the loop. A CPU wants it in its cache; an accelerator wants every core busy.
STEP_BYTES = {"cpu": 1 << 20}
ACCELERATOR_STEP_BYTES = 256 << 20


class Visible(NamedTuple):
    """Who sees whom: `ends` and `positions` int32 (N, T), `table` int32 (N, Q, W) of key blocks, -1 = unused."""

    ends: jax.Array
    positions: jax.Array
    table: jax.Array


@dataclass(frozen=True)
class Steps:
    """The static side of a call: what is masked besides the rows, and how much is done at a time."""

    window: int | None
    scale: float
    tiles: int
    """C, tiles at a time."""
    key_blocks: int
    """Key blocks at a time; S = key_blocks * B."""


def block_sparse(
    q_NTHd: jax.Array,
    k_NTKd: jax.Array,
    v_NTKd: jax.Array,
    visible: Visible,
    *,
    window: int | None,
    scale: float,
    step_bytes: int = ACCELERATOR_STEP_BYTES,
) -> jax.Array:
    """Attention of packed rows; (N, T, H, d) in the dtype of q, zeros where a query sees nothing.

    Args:
        q_NTHd: queries.
        k_NTKd: keys; H is a multiple of K.
        v_NTKd: values.
        visible: token i sees token j if j <= i < ends[j] and j's block is in the table of i's.
        window: and positions[i] - positions[j] < window.
        scale: of the scores, applied in f32.
        step_bytes: bound on the working set of one step of the loop.
    """
    N, T, H, d = q_NTHd.shape
    K, (Q, W) = k_NTKd.shape[2], visible.table.shape[1:]
    B, J = T // Q, H // K
    rounds = -(-W // max(1, KEYS_AT_ONCE // B))
    key_blocks = -(-W // rounds)
    tile_bytes = key_blocks * B * (4 * B * J + 2 * d * k_NTKd.dtype.itemsize)
    chunks = -(-Q * N * K // max(1, step_bytes // tile_bytes))
    steps = Steps(window, scale, tiles=-(-Q * N * K // chunks), key_blocks=key_blocks)
    return _attention(steps, q_NTHd, k_NTKd, v_NTKd, visible)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(steps: Steps, q: jax.Array, k: jax.Array, v: jax.Array, visible: Visible) -> jax.Array:
    return _forward(steps, q, k, v, visible)[0]


def _forward(
    steps: Steps, q: jax.Array, k: jax.Array, v: jax.Array, visible: Visible
) -> tuple[jax.Array, tuple[Any, ...]]:
    K = k.shape[2]
    M, L, d = (tiles_q := _tiles(q, visible, K)).shape
    k_blocks, v_blocks = _key_blocks(k, visible), _key_blocks(v, visible)

    def chunk(_: None, inputs: Any) -> tuple[None, tuple[jax.Array, jax.Array]]:
        q_CLd, sees = inputs

        def step(at: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            top, total, sums = state
            blocks, mask = _seen(steps, visible, sees, at)
            s_CLS = _scores(steps, q_CLd, _take(k_blocks, blocks), mask)
            new_top = jnp.maximum(top, s_CLS.max(-1))
            p_CLS, decay = jnp.exp(s_CLS - new_top[..., None]), jnp.exp(top - new_top)
            sums = sums * decay[..., None] + _product("cls,csd->cld", p_CLS.astype(v.dtype), _take(v_blocks, blocks))
            return new_top, total * decay + p_CLS.sum(-1), sums

        zeros = jnp.zeros((steps.tiles, L), jnp.float32)
        start = (zeros + LOWEST, zeros, jnp.zeros((steps.tiles, L, d), jnp.float32))
        top, total, sums = lax.fori_loop(0, sees.rounds.max(), step, start)
        total = jnp.where(total == 0, 1.0, total)
        return None, ((sums / total[..., None]).astype(q.dtype), top + jnp.log(total))

    _, (out, lse) = lax.scan(chunk, None, _chunks(steps, (tiles_q, _sees(steps, visible, K))))
    out = checkpoint_name(_untile(_unchunk(out, M), q.shape, visible, K), RESIDUALS)
    lse = checkpoint_name(_unchunk(lse, M), RESIDUALS)
    return out, (q, k, v, visible, out, lse)


def _backward(
    steps: Steps, residuals: tuple[Any, ...], d_out: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q, k, v, visible, out, lse = residuals
    K = k.shape[2]
    k_blocks, v_blocks = _key_blocks(k, visible), _key_blocks(v, visible)
    # What the softmax subtracts: sum_j p_ij dp_ij = <out_i, d_out_i>.
    inner = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(-1, keepdims=True)
    tiles = (_tiles(q, visible, K), _tiles(d_out, visible, K), _tiles(inner, visible, K), lse[..., None])
    (M, L, d), (_, B, _) = tiles[0].shape, k_blocks.shape

    def chunk(grads: tuple[jax.Array, jax.Array], inputs: Any) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        (q_CLd, do_CLd, inner_CL1, lse_CL1), sees = inputs

        def step(at: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            dq_CLd, dk_blocks, dv_blocks = state
            blocks, mask = _seen(steps, visible, sees, at)
            k_CSd = _take(k_blocks, blocks)
            p_CLS = jnp.exp(_scores(steps, q_CLd, k_CSd, mask) - lse_CL1)
            dp_CLS = _product("cld,csd->cls", do_CLd, _take(v_blocks, blocks))
            ds_CLS = (p_CLS * (dp_CLS - inner_CL1) * steps.scale).astype(q.dtype)
            dq_CLd += _product("cls,csd->cld", ds_CLS, k_CSd)
            shape = (*blocks.shape, B, d)
            dk_blocks = dk_blocks.at[blocks].add(_product("cls,cld->csd", ds_CLS, q_CLd).reshape(shape))
            dv_blocks = dv_blocks.at[blocks].add(
                _product("cls,cld->csd", p_CLS.astype(do_CLd.dtype), do_CLd).reshape(shape)
            )
            return dq_CLd, dk_blocks, dv_blocks

        start = (jnp.zeros((steps.tiles, L, d), jnp.float32), *grads)
        dq_CLd, *grads_kv = lax.fori_loop(0, sees.rounds.max(), step, start)
        return (grads_kv[0], grads_kv[1]), dq_CLd.astype(q.dtype)

    zeros = jnp.zeros(k_blocks.shape, jnp.float32)
    (dk_blocks, dv_blocks), dq = lax.scan(chunk, (zeros, zeros), _chunks(steps, (tiles, _sees(steps, visible, K))))
    dq = _untile(_unchunk(dq, M), q.shape, visible, K)
    return dq, _unblock(dk_blocks, k, visible), _unblock(dv_blocks, v, visible), None


_attention.defvjp(_forward, _backward)


# --- What a tile sees -------------------------------------------------------------------------------------------------


class Sees(NamedTuple):
    """Per tile: key blocks in `rounds` batches, and where its key blocks and its row stand among all."""

    table: jax.Array
    """int32 (M, rounds, key blocks at a time), -1 = unused."""
    rounds: jax.Array
    """int32 (M,): how many of them hold anything."""
    keys: jax.Array
    """int32 (M,): first block of its row and key/value head."""
    row: jax.Array
    """int32 (M,): first block of its row."""
    block: jax.Array
    """int32 (M,): its query block within the row."""


def _sees(steps: Steps, visible: Visible, K: int) -> Sees:
    N, Q, W = visible.table.shape
    rounds = -(-W // steps.key_blocks)
    padded = jnp.pad(visible.table, ((0, 0), (0, 0), (0, rounds * steps.key_blocks - W)), constant_values=-1)
    # Query blocks come first, so that the tiles of a chunk see about equally much.
    table_QNKW = jnp.broadcast_to(padded.swapaxes(0, 1)[:, :, None], (Q, N, K, padded.shape[-1]))
    table = table_QNKW.reshape(Q * N * K, rounds, steps.key_blocks)
    used = jnp.where((table >= 0).any(-1), jnp.arange(1, rounds + 1), 0).max(-1)
    block, row, head = jnp.unravel_index(jnp.arange(Q * N * K, dtype=jnp.int32), (Q, N, K))
    return Sees(table, used, keys=(row * K + head) * Q, row=row * Q, block=block)


def _seen(steps: Steps, visible: Visible, sees: Sees, at: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Flat indices (C, blocks) of the key blocks of one round, and which keys each query sees, (C, B, 1, S)."""
    N, Q, _ = visible.table.shape
    B = visible.ends.shape[1] // Q
    listed = lax.dynamic_index_in_dim(sees.table, at, 1, keepdims=False)
    block = jnp.maximum(listed, 0)
    within = jnp.arange(B, dtype=jnp.int32)

    def keys(x_NT: jax.Array) -> jax.Array:
        return x_NT.reshape(N * Q, B)[sees.row[:, None] + block].reshape(len(block), 1, -1)

    j_C1S = (block[..., None] * B + within).reshape(len(block), 1, -1)
    i_CB1 = (sees.block[:, None] * B + within)[..., None]
    mask = (j_C1S <= i_CB1) & (i_CB1 < keys(visible.ends)) & jnp.repeat(listed >= 0, B, axis=1)[:, None]
    if steps.window is not None:
        depth_CB1 = visible.positions.reshape(N * Q, B)[sees.row + sees.block][..., None]
        mask &= depth_CB1 - keys(visible.positions) < steps.window
    return sees.keys[:, None] + block, mask[:, :, None]


def _scores(steps: Steps, q_CLd: jax.Array, k_CSd: jax.Array, mask_CB1S: jax.Array) -> jax.Array:
    s_CLS = _product("cld,csd->cls", q_CLd, k_CSd) * steps.scale
    C, B, _, S = mask_CB1S.shape
    return jnp.where(mask_CB1S, s_CLS.reshape(C, B, -1, S), MASKED).reshape(s_CLS.shape)


def _product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


# --- Layouts ----------------------------------------------------------------------------------------------------------


def _tiles(x_NTHd: jax.Array, visible: Visible, K: int) -> jax.Array:
    """(N, T, H, d) as (M, L, d)."""
    N, Q, _ = visible.table.shape
    _, T, H, d = x_NTHd.shape
    return x_NTHd.reshape(N, Q, T // Q, K, H // K, d).transpose(1, 0, 3, 2, 4, 5).reshape(Q * N * K, -1, d)


def _untile(x_MLd: jax.Array, shape: tuple[int, ...], visible: Visible, K: int) -> jax.Array:
    N, Q, _ = visible.table.shape
    _, T, H, d = shape
    return x_MLd.reshape(Q, N, K, T // Q, H // K, d).transpose(1, 0, 3, 2, 4, 5).reshape(shape)


def _key_blocks(x_NTKd: jax.Array, visible: Visible) -> jax.Array:
    """(N, T, K, d) as (N*K*Q, B, d): what a tile takes lies together."""
    N, Q, _ = visible.table.shape
    _, T, K, d = x_NTKd.shape
    return x_NTKd.reshape(N, Q, T // Q, K, d).transpose(0, 3, 1, 2, 4).reshape(N * K * Q, T // Q, d)


def _unblock(blocks: jax.Array, like_NTKd: jax.Array, visible: Visible) -> jax.Array:
    N, Q, _ = visible.table.shape
    _, T, K, d = like_NTKd.shape
    x_NTKd = blocks.reshape(N, K, Q, T // Q, d).transpose(0, 2, 3, 1, 4).reshape(like_NTKd.shape)
    return x_NTKd.astype(like_NTKd.dtype)


def _take(blocks: jax.Array, at: jax.Array) -> jax.Array:
    """The listed blocks of each tile, side by side: (C, S, d)."""
    return blocks[at].reshape(len(at), -1, blocks.shape[-1])


def _chunks(steps: Steps, tree: Any) -> Any:
    """Leading axis M as (chunks, C); what fills the last chunk is zeros, which add nothing."""

    def split(x: jax.Array) -> jax.Array:
        chunks = -(-len(x) // steps.tiles)
        fill = [(0, chunks * steps.tiles - len(x)), *((0, 0) for _ in x.shape[1:])]
        return jnp.pad(x, fill).reshape(chunks, steps.tiles, *x.shape[1:])

    return jax.tree.map(split, tree)


def _unchunk(x: jax.Array, M: int) -> jax.Array:
    return x.reshape(-1, *x.shape[2:])[:M]
