"""Cross-entropy where it counts: logits of supervised tokens alone, some at a time, and each time once.

A vocabulary of 262,144 makes logits the largest array of a step, and transformers' own loss computes them for every
token. Here hidden states are gathered at the supervised ones first. Since the loss is the end of the graph, a chunk's
gradients are taken while its logits are at hand: nothing is kept of them, and nothing computed again.

Shape letters: G groups, S supervised slots, D hidden size, V vocabulary, C chunk.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array
Head = Callable[[Any, Array], Array]  # from weights and hidden states (..., D) to float32 logits (..., V)


class LossSums(NamedTuple):
    """Sums over supervised tokens, float32 scalars. Only `loss` has a gradient.

    Attributes:
        loss: cross-entropy and what is added to it.
        nll: cross-entropy alone.
        correct: tokens whose logit is the largest.
    """

    loss: Array
    nll: Array
    correct: Array


def pick_slots(hidden: Array, slots: Array) -> Array:
    """Hidden states (G, S, D) of (G, N, D) at slots (G, S), each group's by itself."""
    return jax.vmap(lambda rows, index: rows[index])(hidden, slots)


def supervised_loss(
    head: Head, own: Any, hidden: Array, targets: Array, weights: Array, *, chunk: int, z_loss: float = 0.0
) -> LossSums:
    """Loss sums of one micro-batch.

    Args:
        head: computes logits.
        own: weights of the head that are trained, a tree; may be empty. Nothing else in `head` gets a gradient.
        hidden: (G, S, D).
        targets: integers (G, S).
        weights: float32 (G, S), 0 at padding.
        chunk: C, a divisor of S.
        z_loss: weight of the squared log-partition.
    """

    def in_chunks(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)

    def chunk_sums(own: Any, hidden: Array, targets: Array, weights: Array) -> tuple[Array, LossSums]:
        logits = head(own, hidden)
        partition = jax.nn.logsumexp(logits, axis=-1)
        nll = partition - jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        correct = (jnp.argmax(logits, axis=-1) == targets).astype(jnp.float32)
        loss = nll + z_loss * partition**2 if z_loss else nll
        sums = LossSums(*(jnp.sum(value * weights) for value in (loss, nll, correct)))
        return sums.loss, sums

    start = LossSums(*(jnp.zeros((), jnp.float32) for _ in LossSums._fields))

    @jax.custom_vjp
    def total(own: Any, hidden: Array, targets: Array, weights: Array) -> LossSums:
        def add(sums: LossSums, part: tuple[Array, ...]) -> tuple[LossSums, None]:
            return jax.tree.map(jnp.add, sums, chunk_sums(own, *part)[1]), None

        return jax.lax.scan(add, start, tuple(map(in_chunks, (hidden, targets, weights))))[0]

    def forward(own: Any, hidden: Array, targets: Array, weights: Array) -> tuple[LossSums, tuple[Any, Array]]:
        slope = jax.value_and_grad(chunk_sums, argnums=(0, 1), has_aux=True)

        def add(carry: tuple[LossSums, Any], part: tuple[Array, ...]) -> tuple[tuple[LossSums, Any], Array]:
            (_, sums), (of_own, of_hidden) = slope(own, *part)
            wide = jax.tree.map(lambda x: x.astype(jnp.float32), of_own)
            return jax.tree.map(jnp.add, carry, (sums, wide)), of_hidden

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), own)
        parts = tuple(map(in_chunks, (hidden, targets, weights)))
        (sums, of_own), of_hidden = jax.lax.scan(add, (start, zeros), parts)
        of_own = jax.tree.map(lambda grad, x: grad.astype(x.dtype), of_own, own)
        return sums, (of_own, jnp.moveaxis(of_hidden, 0, 1).reshape(hidden.shape))

    def backward(saved: tuple[Any, Array], grad: LossSums) -> tuple[Any, Array, None, None]:
        of_own, of_hidden = jax.tree.map(lambda x: (grad.loss * x).astype(x.dtype), saved)
        return of_own, of_hidden, None, None

    total.defvjp(forward, backward)
    return total(own, hidden, targets, weights)
