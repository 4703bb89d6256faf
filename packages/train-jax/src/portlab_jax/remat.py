"""What the backward pass recomputes instead of keeping: memory against time.

| policy  | kept for each layer                                   | recomputed |
|---------|-------------------------------------------------------|------------|
| none    | every activation                                      | nothing but norms and gates |
| dots    | results of matrix products, attention's output        | norms, gates, RoPE |
| block   | the layer's input                                     | the layer |
| offload | the layer's input, in the host's memory               | the layer |
"""

from collections.abc import Callable
from typing import Any, Literal

import jax

Remat = Literal["none", "dots", "block", "offload"]

WEIGHTS = "weights"  # a layer's weights, taken out of their stack: never kept, the stack is there anyway
INPUT = "layer_input"


def checkpointed(layer: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """A layer whose backward pass follows a policy."""
    policies = jax.checkpoint_policies
    policy = {
        "none": policies.save_anything_except_these_names(WEIGHTS),
        "dots": policies.save_from_both_policies(
            policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names("attended")
        ),
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
