"""The recipe's optimiser in optax: a global-norm clip, a preconditioner, decoupled weight decay, the scheduled rate.

Trained leaves are matrices by themselves here, as PyTorch names them, so that optax's own Adafactor is matrix by
matrix.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from portlab_spec.recipe import Optimizer
from portlab_spec.schedule import learning_rates

ADAFACTOR_DECAY = 0.8  # the second moment at step t weighs its past by 1 - t^-0.8 (arXiv 1804.04235, section 7.2)
ADAFACTOR_CLIP = 1.0  # bound on the root mean square of a matrix's update (section 6)
ADAFACTOR_MIN_SIZE = 128  # both dimensions of a matrix have to be this long to be worth factoring
ADAFACTOR_EPS = 1e-30  # added to squared gradients


def make_optimizer(optimizer: Optimizer, steps: int, *, method: str = "lora") -> optax.GradientTransformation:
    """The recipe's optimiser.

    Args:
        optimizer: the recipe's section.
        steps: steps of the run, which the schedule ends with.
        method: "lora", whose adapters decay whole, or "full": norms and other vectors are spared.
    """
    rates = learning_rates(optimizer, steps)

    def rate(count: jax.typing.ArrayLike) -> jax.Array:
        return jnp.asarray(rates).at[count].get(mode="clip")

    return optax.chain(
        optax.clip_by_global_norm(optimizer.clip_norm),
        *_preconditioner(optimizer),
        optax.add_decayed_weights(optimizer.weight_decay, matrices if method == "full" else None),
        optax.scale_by_learning_rate(rate),
    )


def _preconditioner(optimizer: Optimizer) -> tuple[optax.GradientTransformation, ...]:
    if optimizer.name == "adamw":
        return (optax.scale_by_adam(b1=optimizer.b1, b2=optimizer.b2, eps=optimizer.eps),)
    # Without a first moment, and without steps relative to the weights: those suit training from scratch, and
    # adapters, which start at zero, would not leave it.
    factored = optax.scale_by_factored_rms(
        decay_rate=ADAFACTOR_DECAY, min_dim_size_to_factor=ADAFACTOR_MIN_SIZE, epsilon=ADAFACTOR_EPS
    )
    return factored, optax.clip_by_block_rms(ADAFACTOR_CLIP)


def matrices(trained: dict[str, Any]) -> dict[str, bool]:
    """Which leaves are matrices."""
    return {name: leaf.ndim >= 2 for name, leaf in trained.items()}
