"""Cross-entropy where it counts: logits of supervised tokens alone, some at a time.

A vocabulary of 262,144 makes logits the largest array of a step, and transformers' own loss computes them for every
token. Here hidden states are gathered at the supervised ones first; a chunk's logits are computed again in the backward
pass rather than kept.

Shape letters: G groups, S supervised slots, D hidden size, V vocabulary, C chunk.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array


class LossSums(NamedTuple):
    """Sums over supervised tokens, float32 scalars.

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
    head: Callable[[Array], Array], hidden: Array, targets: Array, weights: Array, *, chunk: int, z_loss: float = 0.0
) -> LossSums:
    """Loss sums of one micro-batch.

    Args:
        head: hidden states (..., D) to float32 logits (..., V).
        hidden: (G, S, D).
        targets: integers (G, S).
        weights: float32 (G, S), 0 at padding.
        chunk: C, a divisor of S.
        z_loss: weight of the squared log-partition.
    """

    def in_chunks(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def chunk_sums(hidden: Array, targets: Array, weights: Array) -> LossSums:
        logits = head(hidden)
        partition = jax.nn.logsumexp(logits, axis=-1)
        nll = partition - jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        correct = (jnp.argmax(logits, axis=-1) == targets).astype(jnp.float32)
        loss = nll + z_loss * partition**2 if z_loss else nll
        return LossSums(*(jnp.sum(value * weights) for value in (loss, nll, correct)))

    def add(sums: LossSums, part: tuple[Array, ...]) -> tuple[LossSums, None]:
        return jax.tree.map(jnp.add, sums, chunk_sums(*part)), None

    nothing = LossSums(*(jnp.zeros((), jnp.float32) for _ in LossSums._fields))
    sums, _ = jax.lax.scan(add, nothing, tuple(map(in_chunks, (hidden, targets, weights))))
    return sums
