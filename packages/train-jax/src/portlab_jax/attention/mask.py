"""The mask of packed rows written out, for kernels that read it from memory."""

import jax
import jax.numpy as jnp


def visible_mask(ends: jax.Array, positions: jax.Array, window: int | None) -> jax.Array:
    """Bool (..., T, T): token i sees token j.

    Every token sees itself, padding too: a softmax over nothing would not be a number.

    Args:
        ends: int32 (..., T), 0 at padding.
        positions: int32 (..., T).
        window: only j with positions[i] - positions[j] < window are seen.
    """
    index = jnp.arange(ends.shape[-1], dtype=jnp.int32)
    i, j = index[:, None], index[None, :]
    mask = (j <= i) & (i < ends[..., None, :])
    if window is not None:
        mask &= positions[..., :, None] - positions[..., None, :] < window
    return mask | (i == j)
