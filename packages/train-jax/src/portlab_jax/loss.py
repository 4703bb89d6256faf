"""Cross-entropy over a vocabulary of 262,144, only where it counts.

Logits are the largest tensor of the step. They are computed only at supervised positions, in chunks, and are
never kept: since the loss is the end of the graph, each chunk's gradients are taken while its logits are at hand.
That is two products with the embedding per supervised token (three where the embedding is trained), against one
more for recomputation, and one chunk of logits in memory.

Under an explicit mesh each part computes the logits of the vocabulary rows it holds, and only three numbers per
position cross the mesh to make a softmax of them (Megatron-LM's vocabulary-parallel cross-entropy): the largest
logit, the sum of exponentials and the target's logit. The embedding's width, shared out over fsdp, is gathered
once per call: gathered per chunk it would cross the network once for every chunk, while the gathered part is only
V * D / tp numbers in the dtype of the hidden states.

Shape letters: G groups, S supervised slots of a group, C slots of a chunk, V vocabulary rows (on one part of the
mesh inside a shard), D width, N trained token rows.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

Array = jax.Array


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """What is fixed when the loss is compiled.

    Attributes:
        token_ids: the N vocabulary rows that `token_rows` replaces, ascending.
        chunk: positions whose logits are in memory at once; S must be a multiple of it.
        softcap: Gemma 4's final_logit_softcapping c: logits become c * tanh(logits / c).
        z_loss: weight of logsumexp^2 beside each cross-entropy (PaLM, section 5).
        train_embedding: whether the embedding gets a gradient, accumulated in float32.
    """

    token_ids: tuple[int, ...] = ()
    chunk: int = 512
    softcap: float | None = None
    z_loss: float = 0.0
    train_embedding: bool = False


class LossSums(NamedTuple):
    """Weighted sums over all supervised positions, float32 scalars. Only `loss` has a gradient."""

    loss: Array  # cross-entropy plus z-loss
    nll: Array  # cross-entropy alone
    correct: Array  # weight of the positions whose target has the largest logit


def supervised_loss(
    hidden: Array,
    token_rows: Array | None,
    embedding: Array,
    targets: Array,
    weights: Array,
    options: LossOptions,
) -> LossSums:
    """Cross-entropy of the tied head at supervised positions, weighted and summed.

    Args:
        hidden: (G, S, D), final normed hidden states at the positions that predict. Products run in their dtype.
            Under an explicit mesh, G is shared out as it comes and every part of tp sees the same rows.
        token_rows: float32 (N, D), trained rows that replace the embedding's, or None.
        embedding: (V, D); under an explicit mesh its sharding says which rows and columns each part holds. Its
            gradient is zero unless `options.train_embedding`.
        targets: int32 (G, S).
        weights: float32 (G, S); 0 for padding.
        options: see LossOptions.

    Raises:
        ValueError: S is not a multiple of the chunk.
    """
    if hidden.shape[1] % options.chunk:
        raise ValueError(f"{hidden.shape[1]} supervised slots are not a multiple of the chunk, {options.chunk}")
    layout = _Layout.of(hidden, embedding)
    hidden = layout.place(hidden, layout.rows, None, None)
    targets, weights = (layout.place(a, layout.rows, None) for a in (targets, weights))
    if token_rows is not None:
        token_rows = layout.place(token_rows, None, None)
    sums = _loss(hidden, token_rows, embedding, targets, weights, options)
    return LossSums(sums.loss, lax.stop_gradient(sums.nll), lax.stop_gradient(sums.correct))


def head_logits(h: Array, token_rows: Array | None, embedding: Array, options: LossOptions) -> Array:
    """float32 (..., V) logits of the tied head at h (..., D), trained rows in place, softcap applied.

    Under an explicit mesh the vocabulary stays shared out as the embedding's rows are.
    """
    layout = _Layout.of(h, embedding)
    lead = layout.spec_of(h)[:-1]
    if token_rows is not None:
        token_rows = layout.place(token_rows, None, None)

    def shard(h: Array, token_rows: Array | None, embedding: Array) -> Array:
        head = _Head.of(embedding, token_rows, h.dtype, options, layout)
        logits = head.logits(h)
        if token_rows is not None:
            logits = logits.at[..., head.replaced].set(head.own_logits(h), mode="drop", unique_indices=True)
        return _softcap(logits, options.softcap)

    run = layout.over(shard, (P(*lead, None), P(), layout.embedding), P(*lead, layout.vocab))
    return run(layout.place(h, *lead, None), token_rows, embedding)


@dataclass(frozen=True)
class _Layout:
    """Mesh axes that share out groups, vocabulary and width; none without an explicit mesh."""

    explicit: bool = False
    rows: tuple[str, ...] = ()
    vocab: tuple[str, ...] = ()
    width: tuple[str, ...] = ()

    @staticmethod
    def of(hidden: Array, embedding: Array) -> "_Layout":
        # With automatic axes the compiler partitions the plain program; a surrounding shard_map has its own parts.
        if not jax.sharding.get_abstract_mesh().explicit_axes:
            return _Layout()
        layout = _Layout(explicit=True)
        return _Layout(True, layout.spec_of(hidden)[0], *layout.spec_of(embedding))

    def spec_of(self, x: Array) -> tuple[tuple[str, ...], ...]:
        """Mesh axes of each dimension."""
        if not self.explicit:
            return ((),) * x.ndim
        spec = jax.typeof(x).sharding.spec
        return tuple((names,) if isinstance(names, str) else tuple(names or ()) for names in spec)

    @property
    def embedding(self) -> P:
        return P(self.vocab, self.width)

    def place(self, x: Array, *spec: tuple[str, ...] | None) -> Array:
        return jax.sharding.reshard(x, P(*spec)) if self.explicit else x

    def over(self, shard: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """The function on each part of the mesh; the function itself without one."""
        if not self.explicit:
            return shard
        # Replication is ours to see to: what is gathered over the width counts as varying, though it does not.
        return jax.shard_map(shard, in_specs=in_specs, out_specs=out_specs, check_vma=False)


class _Head(NamedTuple):
    """The part of the tied head that one part of the mesh holds, all columns."""

    table: Array  # (V, D)
    token_rows: Array | None  # float32 (N, D)
    first: Array | int  # token id of the table's first row
    replaced: Array  # int32 (N,), the table's rows that token_rows replaces; past the end if on another part

    @staticmethod
    def of(embedding: Array, token_rows: Array | None, dtype: Any, options: LossOptions, layout: _Layout) -> "_Head":
        table = embedding.astype(dtype)
        if _ways(layout.width) > 1:  # a trivial gather may be compiled to a copy of the table
            table = lax.all_gather(table, layout.width, axis=1, tiled=True)
        size = table.shape[0]
        first = lax.axis_index(layout.vocab) * size if layout.vocab else 0
        ids = jnp.array(options.token_ids, jnp.int32) - first
        here = (ids >= 0) & (ids < size)
        # Those of other parts get distinct places past the end, so that a scatter may rely on unique indices.
        return _Head(table, token_rows, first, jnp.where(here, ids, size + jnp.arange(ids.size)))

    def kept(self) -> Array | None:
        """bool (V,): rows that are not replaced; None where none is."""
        if self.token_rows is None:
            return None
        return jnp.ones(self.table.shape[0], bool).at[self.replaced].set(False, mode="drop", unique_indices=True)

    def logits(self, h: Array) -> Array:
        """float32 (..., V), before softcap; the columns of replaced rows are not meant."""
        return jnp.einsum("...d,vd->...v", h, self.table, preferred_element_type=jnp.float32)

    def own_logits(self, h: Array) -> Array:
        """float32 (..., N) logits of the trained rows, before softcap."""
        return _product("...d,nd->...n", h, self.token_rows)


class _Chunk(NamedTuple):
    """Logits of one chunk before softcap, in two blocks, and what the softmax over both needs."""

    table: Array  # (C, V)
    is_target: Array  # bool (C, V)
    own: Any  # (C, N), None without trained rows
    own_is_target: Any  # bool (C, N)
    lse: Array  # (C,)
    nll: Array  # (C,)
    correct: Array  # bool (C,)


def _softmax(head: _Head, kept: Array | None, h: Array, target: Array, options: LossOptions, layout: _Layout) -> _Chunk:
    cap = functools.partial(_softcap, cap=options.softcap)
    table = head.logits(h)
    row = target - head.first
    size = table.shape[1]
    # The softcap is monotonic: largest and target's logit are compared before it, where both are exact.
    at_target = jnp.take_along_axis(table, jnp.clip(row, 0, size - 1)[:, None], axis=1)[:, 0]
    at_target = lax.psum(jnp.where((row >= 0) & (row < size), at_target, 0.0), layout.vocab)
    top = lax.pmax(jnp.max(_where(kept, table, -jnp.inf), axis=1), layout.vocab)
    own = own_is_target = None
    if head.token_rows is not None:
        own = head.own_logits(h)
        own_is_target = target[:, None] == jnp.array(options.token_ids, jnp.int32)
        at_own = jnp.sum(jnp.where(own_is_target, own, 0.0), axis=1)
        at_target = jnp.where(own_is_target.any(axis=1), at_own, at_target)
        top = jnp.maximum(top, own.max(axis=1))
    shift = cap(top)[:, None]
    total = lax.psum(jnp.sum(_where(kept, jnp.exp(cap(table) - shift), 0.0), axis=1), layout.vocab)
    if own is not None:
        total += jnp.sum(jnp.exp(cap(own) - shift), axis=1)
    lse = shift[:, 0] + jnp.log(total)
    is_target = row[:, None] == jnp.arange(size)
    return _Chunk(table, is_target, own, own_is_target, lse, lse - cap(at_target), at_target >= top)


def _d_logits(logits: Array, is_target: Array, lse: Array, weight: Array, options: LossOptions) -> Array:
    """Gradient of the weighted loss with respect to logits before softcap, float32.

    softmax - one-hot is taken in float32 and rounded after. Rounding the softmax to bfloat16 first would lose the
    gradient of every position that is predicted well: 0.999 - 1 becomes 0.
    """
    capped = _softcap(logits, options.softcap)
    d_lse = weight * (1.0 + 2.0 * options.z_loss * lse)
    d = jnp.exp(capped - lse[:, None]) * d_lse[:, None] - jnp.where(is_target, weight[:, None], 0.0)
    return d if options.softcap is None else d * (1.0 - jnp.square(capped / options.softcap))


class _Gradients(NamedTuple):
    hidden: Array
    token_rows: Array | None
    embedding: Array | None


def _shard_loss(
    hidden: Array,
    token_rows: Array | None,
    embedding: Array,
    targets: Array,
    weights: Array,
    *,
    options: LossOptions,
    layout: _Layout,
    differentiate: bool,
) -> tuple[LossSums, _Gradients | None]:
    """Sums over the whole mesh, and the gradients of this part's arguments."""
    head = _Head.of(embedding, token_rows, hidden.dtype, options, layout)
    kept = head.kept()

    def one(carry: tuple[Any, ...], piece: tuple[Array, ...]) -> tuple[tuple[Any, ...], Any]:
        sums, d_rows, d_table = carry
        h, target, weight = piece
        chunk = _softmax(head, kept, h, target, options, layout)
        nll = jnp.sum(weight * chunk.nll)
        z_term = options.z_loss * jnp.sum(weight * jnp.square(chunk.lse)) if options.z_loss else 0.0
        correct = jnp.sum(weight * chunk.correct)
        sums = LossSums(sums.loss + nll + z_term, sums.nll + nll, sums.correct + correct)
        if not differentiate:
            return (sums, None, None), None
        d = _where(kept, _d_logits(chunk.table, chunk.is_target, chunk.lse, weight, options), 0.0).astype(h.dtype)
        d_h = jnp.einsum("cv,vd->cd", d, head.table, preferred_element_type=jnp.float32)
        d_h = lax.psum(d_h, layout.vocab)
        if chunk.own is not None:
            d_own = _d_logits(chunk.own, chunk.own_is_target, chunk.lse, weight, options)
            d_h += _product("cn,nd->cd", d_own, token_rows)
            d_rows += _product("cn,cd->nd", d_own, h)
        if d_table is not None:
            d_table += jnp.einsum("cv,cd->vd", d, h, preferred_element_type=jnp.float32)
        return (sums, d_rows, d_table), d_h.astype(h.dtype)

    zero = jnp.zeros((), jnp.float32)
    d_rows = d_table = None
    if differentiate and token_rows is not None:
        d_rows = jnp.zeros_like(token_rows, jnp.float32)
    if differentiate and options.train_embedding:
        d_table = jnp.zeros(head.table.shape, jnp.float32)
    pieces = tuple(a.reshape(-1, options.chunk, *a.shape[2:]) for a in (hidden, targets, weights))
    (sums, d_rows, d_table), d_hidden = lax.scan(one, (LossSums(zero, zero, zero), d_rows, d_table), pieces)
    sums = LossSums(*(lax.psum(s, layout.rows) for s in sums))
    if not differentiate:
        return sums, None
    if d_rows is not None:
        d_rows = lax.psum(d_rows, layout.rows)
    if d_table is not None:
        d_table = _scatter_width(d_table, layout).astype(embedding.dtype)
    return sums, _Gradients(d_hidden.reshape(hidden.shape), d_rows, d_table)


def _scatter_width(d_table: Array, layout: _Layout) -> Array:
    """Sum the gradient of the gathered table over all rows of the batch; leave each part its own columns."""
    d_table = lax.psum(d_table, tuple(axis for axis in layout.rows if axis not in layout.width))
    if _ways(layout.width) == 1:
        return d_table
    d_table = lax.psum_scatter(d_table, layout.width, scatter_dimension=1, tiled=True)
    # Along an axis that does not share out the batch, the same gradient was added up.
    copies = _ways(tuple(axis for axis in layout.width if axis not in layout.rows))
    return d_table / copies if copies > 1 else d_table


def _over_mesh(
    hidden: Array,
    token_rows: Array | None,
    embedding: Array,
    targets: Array,
    weights: Array,
    options: LossOptions,
    *,
    differentiate: bool,
) -> tuple[LossSums, _Gradients | None]:
    layout = _Layout.of(hidden, embedding)
    shard = functools.partial(_shard_loss, options=options, layout=layout, differentiate=differentiate)
    rows = P(layout.rows)
    in_specs = (rows, P(), layout.embedding, rows, rows)
    gradients: Any = (rows, P(), layout.embedding)
    run = layout.over(shard, in_specs, (P(), _Gradients(*gradients) if differentiate else None))
    result: tuple[LossSums, _Gradients | None] = run(hidden, token_rows, embedding, targets, weights)
    return result


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _loss(
    hidden: Array,
    token_rows: Array | None,
    embedding: Array,
    targets: Array,
    weights: Array,
    options: LossOptions,
) -> LossSums:
    return _over_mesh(hidden, token_rows, embedding, targets, weights, options, differentiate=False)[0]


def _forward(*arguments: Any) -> tuple[LossSums, _Gradients | None]:
    return _over_mesh(*arguments, differentiate=True)


def _backward(options: LossOptions, saved: _Gradients, cotangent: LossSums) -> tuple[Array | None, ...]:
    scaled = jax.tree.map(lambda g: (g * cotangent.loss).astype(g.dtype), saved)
    return scaled.hidden, scaled.token_rows, scaled.embedding, None, None


_loss.defvjp(_forward, _backward)


def _ways(axes: tuple[str, ...]) -> int:
    return math.prod(lax.axis_size(axis) for axis in axes)


def _softcap(logits: Array, cap: float | None) -> Array:
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def _where(mask: Array | None, x: Array, other: float) -> Array:
    return x if mask is None else jnp.where(mask, x, other)


def _product(equation: str, a: Array, b: Array | None) -> Array:
    """Product with the few trained rows, in full float32: their small steps must show in the logits."""
    return jnp.einsum(equation, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
