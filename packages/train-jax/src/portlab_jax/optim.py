"""Optimisers: a global-norm clip, a preconditioner, decoupled weight decay, the scheduled step.

The state follows the trained leaves in shape and sharding: on an explicit mesh `init` gives every moment the sharding
of its parameter, and factored moments what is left of it. Parameters are float32, and so is the state.
"""

from typing import Any

import jax
import optax

from portlab_jax.adafactor import scale_by_adafactor, stack_dims
from portlab_jax.schedule import learning_rate_schedule
from portlab_spec.recipe import Optimizer

ADAFACTOR_DECAY = 0.8  # the second moment at step t weighs its past by 1 - t^-0.8 (arXiv 1804.04235, section 7.2)
ADAFACTOR_CLIP = 1.0  # bound on the root mean square of a matrix's update (section 6)
ADAFACTOR_MIN_SIZE = 128  # both dimensions of a matrix have to be this long to be worth factoring


def make_optimizer(optimizer: Optimizer, steps: int, *, method: str = "lora") -> optax.GradientTransformation:
    """The recipe's optimiser.

    Weight decay is decoupled: each step takes `learning_rate * weight_decay` of a weight, whichever the optimiser.
    Trained adapters decay whole; where all weights are trained, norms and other vectors are spared.

    Args:
        optimizer: the recipe's section.
        steps: steps of the run, which the schedule ends with.
        method: "lora", or "full" for a tree of parameters.
    """
    return optax.chain(
        optax.clip_by_global_norm(optimizer.clip_norm),
        _preconditioner(optimizer),
        optax.add_decayed_weights(optimizer.weight_decay, matrices if method == "full" else None),
        optax.scale_by_learning_rate(learning_rate_schedule(optimizer, steps)),
    )


def _preconditioner(optimizer: Optimizer) -> optax.GradientTransformation:
    if optimizer.name == "adamw":
        return optax.scale_by_adam(b1=optimizer.b1, b2=optimizer.b2, eps=optimizer.eps)
    # Without a first moment, and without steps relative to the weights: those suit training from scratch, and
    # adapters, which start at zero, would not leave it.
    return scale_by_adafactor(decay=ADAFACTOR_DECAY, clip=ADAFACTOR_CLIP, min_size=ADAFACTOR_MIN_SIZE)


def matrices(params: Any) -> Any:
    """Which leaves of a parameter tree are matrices, as a tree of bools; stacked layers do not count as a dimension."""
    return jax.tree.map_with_path(lambda path, leaf: leaf.ndim - stack_dims(path, leaf) >= 2, params)


def state_bytes(transform: optax.GradientTransformation, params: Any) -> int:
    """Bytes of the optimiser's state over all devices, from shapes alone."""
    state = jax.eval_shape(transform.init, params)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
