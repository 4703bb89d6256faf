"""What the backward pass recomputes instead of keeping, layer by layer.

| remat   | kept of each layer                            |
|---------|-----------------------------------------------|
| none    | whatever the backward pass needs              |
| dots    | results of products with weights              |
| block   | its input                                     |
| offload | its input, in the host's memory               |
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from torchax import interop

INPUT = "layer_input"


def checkpoint_of(remat: str) -> Callable[..., Any]:
    """A function that calls PyTorch code whose insides are computed again, as `recompute_layers` takes it."""
    policies = jax.checkpoint_policies
    policy = {
        "dots": policies.dots_with_no_batch_dims_saveable,
        "block": policies.nothing_saveable,
        "offload": policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    }[remat]

    def call(function: Callable[..., Any], *args: Any) -> Any:
        computed = interop.jax_view(function)

        def named(*arrays: Any) -> Any:
            return computed(*(checkpoint_name(x, INPUT) if isinstance(x, jax.Array) else x for x in arrays))

        return interop.call_jax(jax.checkpoint(named, policy=policy), *args)

    return call
