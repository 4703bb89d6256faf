"""Adafactor's preconditioner, matrix by matrix (arXiv 1804.04235).

optax takes a leaf for one matrix: it factors the two longest dimensions, and clips by the root mean square of the
whole. A leaf here is a stack of layers, and of experts within them, which have nothing to do with each other; how many
layers happen to be stacked must not change what a step does to one of them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

EPS = 1e-30  # added to squared gradients

Moments = dict[str, jax.Array]


class AdafactorState(NamedTuple):
    """State of `scale_by_adafactor`.

    Attributes:
        step: int32 scalar, steps taken.
        moments: in the place of each leaf, float32: `rows` (..., m) and `columns` (..., n) of matrices (..., m, n)
            that are factored, else `square`, of the leaf's shape.
    """

    step: jax.Array
    moments: Any


def stack_dims(path: tuple[Any, ...], leaf: jax.Array) -> int:
    """How many leading dimensions of a leaf tell layers and experts apart.

    Args:
        path: of the leaf, in a tree of parameters or in an adapter.
        leaf: behind its stacks a matrix, a vector or a number.
    """
    top = getattr(path[0], "key", None) if path else None
    if top == "lora":
        return leaf.ndim - 2
    return max(leaf.ndim - 2, 1) if top == "layers" else 0


def scale_by_adafactor(*, decay: float, clip: float, min_size: int) -> optax.GradientTransformation:
    """A factored second moment and a clip of the update; no first moment, no steps relative to the weights.

    Args:
        decay: at step t, from 1, the second moment weighs its past by 1 - t^-decay.
        clip: bound on the root mean square of a matrix's update.
        min_size: both dimensions of a matrix have to be this long to be worth factoring.
    """

    def parts(path: tuple[Any, ...], square: jax.Array) -> Moments:
        if square.ndim - stack_dims(path, square) >= 2 and min(square.shape[-2:]) >= min_size:
            return {"rows": square.mean(-1), "columns": square.mean(-2)}
        return {"square": square}

    def init(params: Any) -> AdafactorState:
        # Means of zeros, since these have the sharding that means of gradients have.
        moments = jax.tree.map_with_path(lambda path, leaf: parts(path, jnp.zeros_like(leaf)), params)
        return AdafactorState(jnp.zeros((), jnp.int32), moments)

    def update(grads: Any, state: AdafactorState, params: Any = None) -> tuple[Any, AdafactorState]:
        past = 1 - jnp.float32(state.step + 1) ** -decay

        def moments(path: tuple[Any, ...], grad: jax.Array, before: Moments) -> Moments:
            new = parts(path, jnp.square(grad) + EPS)
            return {name: past * before[name] + (1 - past) * value for name, value in new.items()}

        def clipped(path: tuple[Any, ...], grad: jax.Array, after: Moments) -> jax.Array:
            scaled = _scaled(grad, after)
            within = tuple(range(stack_dims(path, grad), grad.ndim))
            rms = jnp.sqrt(jnp.mean(jnp.square(scaled), within, keepdims=True))
            return scaled / jnp.maximum(rms / clip, 1.0)

        after = jax.tree.map_with_path(moments, grads, state.moments)
        return jax.tree.map_with_path(clipped, grads, after), AdafactorState(state.step + 1, after)

    return optax.GradientTransformation(init, update)


def _scaled(grad: jax.Array, moments: Moments) -> jax.Array:
    """The gradient over the root of its second moment."""
    if "square" in moments:
        return grad * jax.lax.rsqrt(moments["square"])
    rows, columns = moments["rows"], moments["columns"]
    rows = jax.lax.rsqrt(rows / rows.mean(-1, keepdims=True))
    return grad * rows[..., :, None] * jax.lax.rsqrt(columns)[..., None, :]
