"""LoRA adapters and trained token rows beside a frozen base.

An adapter is a pytree of float32 leaves, stacked over the adapted layers of a stack on axis 0:

    {"lora": {"sliding.self_attn.q_proj": {"a": (m, in, r), "b": (m, r, out)}, ...}, "token_rows": (n, D)}

`a` and `b` are the transposes of PEFT's `lora_A` (r, in) and `lora_B` (out, r); those of experts have the experts'
axis behind m. `token_rows` are whole embedding rows that replace those of the base (PEFT:
`trainable_token_indices`); the key is absent if none are trained.
"""

import functools
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from portlab_jax.mesh import MeshPlan, partition, shard
from portlab_jax.quantize import Weight, gathered
from portlab_spec.errors import UserError
from portlab_spec.models import AdapterLeaf, Dim

Adapter = dict[str, Any]
Array = jax.Array


@dataclass(frozen=True)
class AdapterOptions:
    """What the forward pass needs to know of the recipe; static under jit.

    Attributes:
        leaves: what is adapted.
        dropout: probability that an input of `a` is zeroed while training.
        token_ids: rows of the embedding that are trained, ascending.

    Raises:
        UserError: dropout beside adapted experts, which PEFT refuses too.
    """

    leaves: tuple[AdapterLeaf, ...] = ()
    dropout: float = 0.0
    token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.dropout and any(leaf.experts for leaf in self.leaves):
            raise UserError("dropout does not act on experts", where="lora.dropout", fix="Set it to 0")


class Low(NamedTuple):
    """Low-rank update of one linear layer, the scaling in b.

    Attributes:
        a: float32 (in, r); (E, in, r) for experts; with a leading axis of layers before a stack is taken apart.
        b: float32 (r, out); (E, r, out) for experts.
    """

    a: Array
    b: Array


def init_adapter(
    leaves: Sequence[AdapterLeaf],
    key: Array,
    *,
    embedding: Any = None,
    token_ids: tuple[int, ...] = (),
) -> Adapter:
    """A fresh adapter with PEFT's initialisation: the model's output is unchanged until training.

    `a` is uniform in ±1/sqrt(in), which is what PEFT's kaiming_uniform(a=sqrt(5)) amounts to; `b` is zero; token
    rows start as the base's rows.

    Args:
        leaves: what is adapted, from `plan_adapter`.
        key: PRNG key.
        embedding: the base's embedding (V, D), needed for token rows.
        token_ids: rows to train, ascending.
    """
    lora: dict[str, dict[str, Array]] = {}
    for leaf in leaves:
        # The key depends on the name alone: adding a target does not change the others' initial values.
        leaf_key = jax.random.fold_in(key, zlib.crc32(leaf.key.encode()))
        bound = 1.0 / math.sqrt(leaf.into.size)
        lead = (len(leaf.index), *(dim.size for dim in leaf.experts))
        lora[leaf.key] = {
            "a": jax.random.uniform(leaf_key, (*lead, leaf.into.size, leaf.rank), jnp.float32, -bound, bound),
            "b": jnp.zeros((*lead, leaf.rank, leaf.out.size), jnp.float32),
        }
    adapter: Adapter = {"lora": lora}
    if token_ids:
        ids = jnp.array(token_ids)
        adapter["token_rows"] = embedding.at[ids].get(out_sharding=partition((None, None), (1, 1))).astype(jnp.float32)
    return adapter


def adapter_shardings(leaves: Sequence[AdapterLeaf], mesh: MeshPlan, token_ids: tuple[int, ...] = ()) -> Adapter:
    """Where each leaf of an adapter lives: cut as the dimensions of the weight that it adapts."""
    rank = Dim(1)
    tree: Adapter = {
        "lora": {
            leaf.key: {
                "a": mesh.sharding((*leaf.experts, leaf.into, rank), lead=1),
                "b": mesh.sharding((*leaf.experts, rank, leaf.out), lead=1),
            }
            for leaf in leaves
        }
    }
    if token_ids:
        tree["token_rows"] = mesh.replicated
    return tree


def assemble(adapter: Adapter, options: AdapterOptions) -> dict[str, dict[str, Low]]:
    """The adapter by stack and parameter, one entry for every layer of a stack, as the forward pass scans it.

    Layers that are not adapted get zeros, smaller ranks are filled up with zeros: both add nothing.
    """
    stacks: dict[str, dict[str, Low]] = {}
    for leaf in options.leaves:
        a, b = adapter["lora"][leaf.key]["a"], adapter["lora"][leaf.key]["b"] * leaf.scaling
        rank = max(other.rank for other in options.leaves if other.param.key == leaf.param.key)
        if leaf.rank < rank:
            spare = [(0, 0)] * (a.ndim - 2)
            a = jnp.pad(a, [*spare, (0, 0), (0, rank - leaf.rank)])
            b = jnp.pad(b, [*spare, (0, rank - leaf.rank), (0, 0)])
        if not leaf.whole:
            place = (
                jnp.zeros((leaf.param.count, len(leaf.index)))
                .at[jnp.array(leaf.index), :]
                .set(jnp.eye(len(leaf.index)))
            )
            a, b = (jnp.tensordot(place, x, 1) for x in (a, b))
        names = stacks.setdefault(leaf.param.stack, {})
        earlier = names.get(leaf.param.name)
        names[leaf.param.name] = Low(a, b) if earlier is None else Low(earlier.a + a, earlier.b + b)
    return stacks


@dataclass(frozen=True)
class Ends:
    """The logical axes of a linear layer's input and output, static under jit."""

    into: str | None
    into_parts: int
    out: str | None
    out_parts: int

    @staticmethod
    def of(dims: Sequence[Dim]) -> "Ends":
        """Ends of a matrix (out, in). The hidden dimension of activations is never cut, only that of weights."""
        out, into = dims[-2:]
        return Ends(_activation(into.axis), into.parts, _activation(out.axis), out.parts)


def _activation(axis: str | None) -> str | None:
    return None if axis == "embed" else axis


def linear(
    x: Array, weight: Weight, low: Low | None, ends: Ends, keep: Array | None = None, dropout: float = 0.0
) -> Array:
    """x (G, N, in) through a weight (out, in), plus the adapter's update where there is one.

    The weight is gathered over `fsdp` here, for this use. Products accumulate in float32; the result has x's dtype.

    Args:
        x: activations.
        weight: frozen, quantised or not, or trained.
        low: the adapter's matrices.
        ends: how input and output are cut.
        keep: bool like x, the inputs of the adapter that dropout lets through; None for all.
        dropout: what they are scaled up for.
    """
    weight = gathered(weight, ends.out, ends.into, parts=(ends.out_parts, ends.into_parts), dtype=x.dtype)
    y = _product("gni,oi->gno", x, weight, ("group", None, ends.out), (x.shape[0], 1, ends.out_parts))
    if low is not None:
        h = x if keep is None else jnp.where(keep, x / (1.0 - dropout), 0)
        a = shard(low.a, ends.into, None, parts=(ends.into_parts, 1)).astype(x.dtype)
        b = shard(low.b, None, ends.out, parts=(1, ends.out_parts)).astype(x.dtype)
        y += low_rank(h, a, b, ends)
    return y.astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def low_rank(x: Array, a: Array, b: Array, ends: Ends) -> Array:
    """x (G, N, in) @ a (in, r) @ b (r, out) -> float32 (G, N, out).

    The gradients are written out to choose the orientation of their products: the tall operand always stands on the
    right, untransposed. Left to the compiler, XLA on CPU materialises transposes of (N, out) for every layer.
    """
    return _low_rank_forward(x, a, b, ends)[0]


def _low_rank_forward(x: Array, a: Array, b: Array, ends: Ends) -> tuple[Array, tuple[Array, ...]]:
    g = x.shape[0]
    low = _product("gni,ir->gnr", x, a, ("group", None, None), (g, 1, 1)).astype(x.dtype)
    y = _product("gnr,ro->gno", low, b, ("group", None, ends.out), (g, 1, ends.out_parts))
    return y, (x, low, a, b)


def _low_rank_backward(ends: Ends, saved: tuple[Array, ...], d_y: Array) -> tuple[Array, Array, Array]:
    x, low, a, b = saved
    g = x.shape[0]
    d_y = d_y.astype(x.dtype)
    d_low = _product("gno,ro->gnr", d_y, b, ("group", None, None), (g, 1, 1)).astype(x.dtype)
    d_b = _product("gnr,gno->ro", low, d_y, (None, ends.out), (1, ends.out_parts))
    if x.dtype == jnp.float32:
        d_a = _product("gnr,gni->ri", d_low, x, (None, ends.into), (1, ends.into_parts)).T
    else:
        # XLA on CPU cannot multiply bfloat16 in the form that it makes of a transposed product.
        d_a = _product("gni,gnr->ir", x, d_low, (ends.into, None), (ends.into_parts, 1))
    d_x = _product("gnr,ir->gni", d_low, a, ("group", None, ends.into), (g, 1, ends.into_parts))
    return d_x.astype(x.dtype), d_a.astype(a.dtype), d_b.astype(b.dtype)


low_rank.defvjp(_low_rank_forward, _low_rank_backward)


def _product(formula: str, x: Array, y: Array, axes: tuple[str | None, ...], parts: tuple[int, ...]) -> Array:
    return jnp.einsum(formula, x, y, preferred_element_type=jnp.float32, out_sharding=partition(axes, parts))


def replace_token_rows(rows: Array, ids: Array, token_rows: Array | None, options: AdapterOptions) -> Array:
    """Embedding rows (G, N, D) of ids (G, N), with trained rows put in place of the base's."""
    if token_rows is None:
        return rows
    hit = ids[..., None] == jnp.array(options.token_ids)
    # A product with a 0/1 matrix instead of a gather: its transpose is a product too, not a scatter.
    trained = _product("gnt,td->gnd", hit.astype(jnp.float32), token_rows, ("group", None, None), (rows.shape[0], 1, 1))
    return jnp.where(hit.any(axis=-1, keepdims=True), trained.astype(rows.dtype), rows)


def count(adapter: Adapter) -> int:
    """Number of trained values."""
    return sum(leaf.size for leaf in jax.tree.leaves(adapter))
