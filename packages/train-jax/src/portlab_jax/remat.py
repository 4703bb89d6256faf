"""What the backward pass recomputes instead of keeping: memory against time.

| policy  | kept for each layer                                          | recomputed |
|---------|--------------------------------------------------------------|------------|
| none    | results of products, norms, RoPE, gates; attention's output  | the insides of norms and gates |
| dots    | results of products; attention's output                      | norms, RoPE, gates |
| block   | the layer's input                                            | the layer |
| offload | the layer's input, in the host's memory                      | the layer |

What is kept carries a name, and nothing else is kept: neither the insides of cheap functions nor, above all, a
layer's weights, which the compiler would otherwise copy out of their stack once for the forward pass and hold until
the backward pass. Attention names its own residuals.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax

from portlab_jax.attention import RESIDUALS

Remat = Literal["none", "dots", "block", "offload"]

INPUT = "layer_input"
PRODUCT = "product"  # result of a matrix product
NORMED, ROTATED, GATED, RESIDUAL = "normed", "rotated", "gated", "residual"  # of what is cheap


def checkpointed(layer: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """A layer whose backward pass follows a policy."""
    policies = jax.checkpoint_policies
    policy = {
        "none": policies.save_only_these_names(PRODUCT, NORMED, ROTATED, GATED, RESIDUAL, RESIDUALS),
        "dots": policies.save_only_these_names(PRODUCT, RESIDUALS),
        "block": policies.nothing_saveable,
        "offload": policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    }[remat]
    # Inside a loop the compiler cannot merge forward and backward, so that no barrier is needed against it.
    return jax.checkpoint(layer, policy=policy, prevent_cse=False)
