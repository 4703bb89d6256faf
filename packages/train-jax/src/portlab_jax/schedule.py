"""Learning rates: a linear warm-up, then one of five shapes. Pure functions of the step, counted from 0."""

import jax
import jax.numpy as jnp
import optax

from portlab_spec.recipe import Optimizer


def learning_rate_schedule(optimizer: Optimizer, steps: int) -> optax.Schedule:
    """The recipe's learning rate as a function of the step.

    With peak p, w warm-up steps and n steps in all, the rate is p (t + 1) / (w + 1) in the warm-up: above zero from
    the start, since a first step with rate 0 would be computed for nothing. It is p at step w, and the decaying
    shapes reach `final_fraction` of it at the last step, n - 1.
    """
    peak, warmup = optimizer.learning_rate, optimizer.warmup_steps
    ramp = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    return optax.join_schedules([ramp, _after_warmup(optimizer, steps)], [warmup])


def _after_warmup(optimizer: Optimizer, steps: int) -> optax.Schedule:
    """The shape behind the warm-up; its own step 0 is step `warmup_steps` of the run."""
    peak, warmup = optimizer.learning_rate, optimizer.warmup_steps
    final = peak * optimizer.final_fraction
    span = max(steps - warmup - 1, 1)
    match optimizer.schedule:
        case "constant":
            return optax.constant_schedule(peak)
        case "linear":
            return optax.linear_schedule(peak, final, span)
        case "cosine":
            return optax.cosine_decay_schedule(peak, span, alpha=optimizer.final_fraction)
        case "wsd":
            # Warm-up, stable, decay (MiniCPM, arXiv 2404.06395), with a linear decay (arXiv 2405.18392).
            decay = min(optimizer.decay_steps(steps), span)
            return optax.linear_schedule(peak, final, decay, transition_begin=span - decay)
        case "inverse_sqrt":
            return _inverse_sqrt(peak, warmup)


def _inverse_sqrt(peak: float, warmup: int) -> optax.Schedule:
    """Decay by the root of the step (arXiv 1706.03762, section 5.3), equal to the peak where the warm-up ends."""

    def rate(count: jax.typing.ArrayLike) -> jax.Array:
        return peak * jnp.sqrt((warmup + 1) / (warmup + 1 + jnp.asarray(count, jnp.float32)))

    return rate
