"""Cross-entropy over a vocabulary of 262,144, only where it counts.

Logits are the largest tensor of the step. They are computed only at supervised positions, in chunks, and are
never kept: since the loss is the end of the graph, each chunk's gradient with respect to the hidden states is
taken while its logits are at hand. That is two products with the embedding per supervised token, against three
for recomputation, and one chunk of logits in memory.
"""

import functools

import jax
import jax.numpy as jnp

Array = jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def supervised_loss(
    hidden: Array,
    token_rows: Array | None,
    embedding: Array,
    targets: Array,
    weights: Array,
    token_ids: tuple[int, ...],
    chunk: int,
) -> Array:
    """Weighted sum of the cross-entropies at supervised positions.

    Args:
        hidden: (S, D), final normed hidden states at the positions that predict.
        token_rows: float32 (n, D), trained rows that replace the embedding's, or None.
        embedding: (V, D), frozen: it gets no gradient.
        targets: int32 (S,).
        weights: float32 (S,); 0 for padding.
        token_ids: the n replaced rows, ascending.
        chunk: positions per chunk; S must be a multiple of it.

    Returns:
        float32 scalar.
    """

    def one(total: Array, piece: tuple[Array, ...]) -> tuple[Array, None]:
        h, target, weight = piece
        losses, _ = _losses(head_logits(h, token_rows, embedding, token_ids), target)
        return total + jnp.sum(losses * weight), None

    total, _ = jax.lax.scan(one, jnp.zeros((), jnp.float32), _chunks(chunk, hidden, targets, weights))
    return total


def _forward(
    hidden: Array,
    token_rows: Array | None,
    embedding: Array,
    targets: Array,
    weights: Array,
    token_ids: tuple[int, ...],
    chunk: int,
) -> tuple[Array, tuple[Array, Array | None]]:
    ids = jnp.array(token_ids, jnp.int32)

    def one(carry: tuple[Array, Array | None], piece: tuple[Array, ...]) -> tuple[tuple[Array, Array | None], Array]:
        total, d_rows = carry
        h, target, weight = piece
        logits = head_logits(h, token_rows, embedding, token_ids)
        losses, lse = _losses(logits, target)
        # d loss / d logits = softmax - one-hot, scaled by the weight. The one-hot part is applied as a gather of
        # embedding rows below instead of a scatter into (chunk, V).
        d_logits = jnp.exp(logits - lse[:, None]) * weight[:, None]
        d_target = weight[:, None]
        target_rows = embedding[target].astype(jnp.float32)
        if d_rows is not None and token_rows is not None:
            hit = (target[:, None] == ids[None, :]).astype(jnp.float32)
            d_own = d_logits[:, ids] - hit * d_target
            d_rows = d_rows + d_own.T @ h.astype(jnp.float32)
            d_logits = d_logits.at[:, ids].set(0.0, unique_indices=True, indices_are_sorted=True)
            target_rows = jnp.where(hit.any(axis=1, keepdims=True), 0.0, target_rows)
        d_h = jnp.einsum("sv,vd->sd", d_logits.astype(embedding.dtype), embedding, preferred_element_type=jnp.float32)
        d_h -= d_target * target_rows
        if d_rows is not None and token_rows is not None:
            d_h += d_own @ token_rows
        return (total + jnp.sum(losses * weight), d_rows), d_h

    start = (jnp.zeros((), jnp.float32), None if token_rows is None else jnp.zeros_like(token_rows))
    (total, d_rows), d_hidden = jax.lax.scan(one, start, _chunks(chunk, hidden, targets, weights))
    return total, (d_hidden.reshape(hidden.shape).astype(hidden.dtype), d_rows)


def _backward(
    token_ids: tuple[int, ...], chunk: int, saved: tuple[Array, Array | None], cotangent: Array
) -> tuple[Array, Array | None, None, None, None]:
    d_hidden, d_rows = saved
    scaled = (d_hidden * cotangent).astype(d_hidden.dtype)
    return scaled, None if d_rows is None else d_rows * cotangent, None, None, None


supervised_loss.defvjp(_forward, _backward)


def _chunks(chunk: int, *arrays: Array) -> tuple[Array, ...]:
    return tuple(a.reshape(-1, chunk, *a.shape[1:]) for a in arrays)


def head_logits(h: Array, token_rows: Array | None, embedding: Array, token_ids: tuple[int, ...]) -> Array:
    """float32 (S, V) logits of the tied head, trained rows in place."""
    logits = jnp.einsum("sd,vd->sv", h, embedding, preferred_element_type=jnp.float32)
    if token_rows is None:
        return logits
    own = jnp.einsum("sd,nd->sn", h.astype(jnp.float32), token_rows)
    ids = jnp.array(token_ids, jnp.int32)
    return logits.at[:, ids].set(own, unique_indices=True, indices_are_sorted=True)


def _losses(logits: Array, targets: Array) -> tuple[Array, Array]:
    """Cross-entropy and log-normaliser of each row."""
    lse = jax.nn.logsumexp(logits, axis=-1)
    return lse - jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0], lse
