"""The recipe's learning rates where optax looks for them."""

import jax
import jax.numpy as jnp
import optax

from portlab_spec.recipe import Optimizer
from portlab_spec.schedule import learning_rates


def learning_rate_schedule(optimizer: Optimizer, steps: int) -> optax.Schedule:
    """`learning_rates` as a function of the step, counted from 0; the last rate goes on past the end."""
    rates = learning_rates(optimizer, steps)

    def rate(count: jax.typing.ArrayLike) -> jax.Array:
        return jnp.asarray(rates).at[count].get(mode="clip")

    return rate
