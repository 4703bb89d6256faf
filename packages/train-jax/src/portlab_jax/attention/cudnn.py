"""cuDNN's fused attention, through `jax.nn.dot_product_attention`.

What it knows of masks are lengths, causality and a left window: enough for one segment per packed row. Anything else
goes in as a mask, (N, 1, T, T) in memory.
"""

from typing import Any

import jax
import jax.numpy as jnp

from portlab_jax.attention.blockwise import Visible
from portlab_jax.attention.mask import visible_mask


def cudnn_segment(
    q_NTHd: jax.Array, k_NTKd: jax.Array, v_NTKd: jax.Array, visible: Visible, *, window: int | None, scale: float
) -> jax.Array:
    """Attention of rows that hold one segment from their start; arguments as in `block_sparse`."""
    how = segment_arguments(visible, window)
    return jax.nn.dot_product_attention(q_NTHd, k_NTKd, v_NTKd, scale=scale, implementation="cudnn", **how)


def cudnn_mask(
    q_NTHd: jax.Array, k_NTKd: jax.Array, v_NTKd: jax.Array, visible: Visible, *, window: int | None, scale: float
) -> jax.Array:
    """Attention of any rows."""
    how = mask_arguments(visible, window)
    return jax.nn.dot_product_attention(q_NTHd, k_NTKd, v_NTKd, scale=scale, implementation="cudnn", **how)


def segment_arguments(visible: Visible, window: int | None) -> dict[str, Any]:
    """Who sees whom in rows of one segment, as keyword arguments of `jax.nn.dot_product_attention`."""
    # A row of padding counts as one token, so that no softmax is over nothing.
    lengths_N = jnp.maximum((visible.ends > 0).sum(-1, dtype=jnp.int32), 1)
    return {
        "is_causal": True,
        "query_seq_lengths": lengths_N,
        "key_value_seq_lengths": lengths_N,
        # Tokens to the left and to the right, besides the token itself.
        "local_window_size": None if window is None else (window - 1, 0),
    }


def mask_arguments(visible: Visible, window: int | None) -> dict[str, Any]:
    """Who sees whom in any rows, as keyword arguments of `jax.nn.dot_product_attention`."""
    return {"mask": visible_mask(visible.ends, visible.positions, window)[:, None]}
