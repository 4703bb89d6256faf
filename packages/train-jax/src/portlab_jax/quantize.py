"""QLoRA: frozen linear weights in 8 or 4 bits, dequantised where they are used (arXiv 2305.14314).

Storage and arithmetic are qwix's `QArray`: values of a small type and a float32 scale for each tile of inputs, which
indexes by layer and shards like the weight. Every device quantises the part that it holds, one layer at a time, and a
layer's gather over `fsdp` moves the small values. Embeddings, norms and routers stay as they are: they are few, or
they are the head, whose rounding would show in every logit.

| kind | values                                   | tile | bytes a weight | rms error of normal weights |
|------|------------------------------------------|------|----------------|-----------------------------|
| int8 | evenly spaced                            | 128  | 1.03           | 0.7 %                       |
| nf4  | 16 quantiles of the normal distribution  | 64   | 0.56           | 9 %                         |
"""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from portlab_jax.mesh import shard
from portlab_spec.errors import UserError
from portlab_spec.models import Param

Array = jax.Array
Kind = Literal["none", "int8", "nf4"]
Weight = Any  # an array, or qwix's QArray, a pytree of two

TILES = {"int8": 128, "nf4": 64}  # inputs that share a scale, at most; nf4's as in the paper


def require_qwix() -> Any:
    """The module.

    Raises:
        UserError: it is not installed.
    """
    try:
        import qwix
    except ImportError:
        raise UserError(
            "quantised weights need qwix, which is not installed",
            where="lora.quantize",
            fix="pip install 'portlab-train-jax[qlora]'",
        ) from None
    return qwix


def is_quantized(param: Param, kind: Kind) -> bool:
    """Is this parameter held in few bits? The linear layers that LoRA may adapt are, adapted or not."""
    return kind != "none" and param.target


def quantize(stack: Array, kind: Kind) -> Weight:
    """A stack of weights (n, ..., out, in) as a QArray, cut over the mesh as the stack is.

    Raises:
        UserError: qwix is not installed.
    """
    qwix = require_qwix()
    sharding = stack.sharding
    assert isinstance(sharding, NamedSharding)
    # A tile lies within one device's part, so that scales are cut as the values are.
    tile = math.gcd(sharding.shard_shape(stack.shape)[-1], TILES[kind])
    lead = range(stack.ndim - 2)  # of one layer: experts, outputs

    def one(weight: Array) -> Weight:
        how = {"channelwise_axes": tuple(lead), "tiled_axes": {weight.ndim - 1: tile}}
        return qwix.quantize(weight.astype(jnp.float32), jnp.int8 if kind == "int8" else kind, **how)

    def local(part: Array) -> Weight:
        return jax.lax.map(one, part)

    return jax.jit(_on_parts(local, sharding.spec, sharding.mesh))(stack)


def gathered(weight: Weight, *axes: str | None, parts: tuple[int, ...] | None = None, dtype: Any) -> Array:
    """A layer's weight, laid out as `portlab_jax.mesh.shard` does, in the type of the activations.

    Args:
        weight: an array (..., out, in) or its QArray.
        axes: logical axis of each dimension for this use.
        parts: how many ways each dimension can be cut at most, if that is not its length.
        dtype: of the result.
    """
    if isinstance(weight, Array):
        return shard(weight, *axes, parts=parts).astype(dtype)
    parts = parts or weight.shape
    small = jax.tree.map(lambda leaf: shard(leaf, *axes, parts=parts), weight)
    qwix = require_qwix()

    def local(part: Weight) -> Array:
        return qwix.dequantize(part).astype(dtype)

    mesh = jax.sharding.get_abstract_mesh()
    return local(small) if mesh.empty else _on_parts(local, jax.typeof(small.qvalue).sharding.spec)(small)


def _on_parts(function: Any, spec: PartitionSpec, mesh: Any = None) -> Any:
    """A function of an array, or of what is cut like it, on each device's part."""
    return jax.shard_map(function, in_specs=spec, out_specs=spec, **({"mesh": mesh} if mesh is not None else {}))
