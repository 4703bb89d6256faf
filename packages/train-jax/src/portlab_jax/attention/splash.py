"""Splash attention, JAX's Pallas kernel for TPU.

Plain rows (packed segments, no shared prefixes) take a mask that the kernel computes from indices, causal or with a
window, and `ends` as segment ids: within a row it is the same number for all tokens of a segment and for no others.
Rows of trees need a mask that is data. The kernel then reads it from memory and skips the blocks where it is empty.

The kernel wants heads before tokens, applies no scale, and must not meet a query that sees nothing, so padding sees
padding here; what it gets is finite and of no meaning.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from portlab_jax.attention.blockwise import RESIDUALS, Visible
from portlab_jax.attention.mask import visible_mask

LANES = 128
LARGEST_BLOCK = 512


def splash_plain(
    q_NTHd: jax.Array, k_NTKd: jax.Array, v_NTKd: jax.Array, visible: Visible, *, window: int | None, scale: float
) -> jax.Array:
    """Attention of rows that are segments side by side; arguments as in `block_sparse`."""
    _, T, H, _ = q_NTHd.shape
    mask = masks.CausalMask((T, T)) if window is None else masks.LocalMask((T, T), (window - 1, 0), 0)
    kernel = _kernel(masks.MultiHeadMask([mask] * H), T)

    def row(q_HTd: jax.Array, k_KTd: jax.Array, v_KTd: jax.Array, ends_T: jax.Array) -> Any:
        return kernel(q_HTd, k_KTd, v_KTd, kernels.SegmentIds(ends_T, ends_T))

    out_NHTd = jax.vmap(row)(*_heads_first(q_NTHd, k_NTKd, v_NTKd, scale), visible.ends)
    return out_NHTd.swapaxes(1, 2)


def splash_tree(
    q_NTHd: jax.Array, k_NTKd: jax.Array, v_NTKd: jax.Array, visible: Visible, *, window: int | None, scale: float
) -> jax.Array:
    """Attention of any rows, one row after the other so that one row's mask exists at a time."""
    T = q_NTHd.shape[1]

    # The backward pass makes the masks again: kept, they would be three (T, T) arrays for each row and layer.
    @partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(RESIDUALS), prevent_cse=False)
    def row(inputs: tuple[jax.Array, ...]) -> Any:
        q_HTd, k_KTd, v_KTd, ends_T, positions_T = inputs
        kernel = _kernel(visible_mask(ends_T, positions_T, window)[None], T)
        # Under a trace the flag comes out of the constructor as an array, which the call cannot branch on.
        kernel.fwd_mask_info = kernel.fwd_mask_info._replace(is_dynamic_mask=True)
        return kernel(q_HTd, k_KTd, v_KTd)

    arrays = (*_heads_first(q_NTHd, k_NTKd, v_NTKd, scale), visible.ends, visible.positions)
    return jax.lax.map(row, arrays).swapaxes(1, 2)


def _heads_first(q: jax.Array, k: jax.Array, v: jax.Array, scale: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    scaled = (q.astype(jnp.float32) * scale).astype(q.dtype)
    return scaled.swapaxes(1, 2), k.swapaxes(1, 2), v.swapaxes(1, 2)


def kernel_block(length: int) -> int:
    """Tokens of a block for rows of a length, a multiple of 128."""
    return next(b for b in range(LARGEST_BLOCK, 0, -LANES) if length % b == 0)


def computed_pairs(length: int, window: int | None) -> int:
    """Pairs of a query and a key that the kernel computes for a row: those of blocks that are not all masked."""
    block = kernel_block(length)
    reach = length if window is None else -(-(window - 1) // block)  # blocks before its own that a query block sees
    return sum(min(i, reach) + 1 for i in range(length // block)) * block * block


def _kernel(mask: masks.MultiHeadMask | jax.Array, length: int) -> kernels.SplashAttentionKernel:
    block = kernel_block(length)
    sizes = kernels.BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    return kernels.make_splash_mha(
        mask, block_sizes=sizes, head_shards=1, q_seq_shards=1, residual_checkpoint_name=RESIDUALS
    )
