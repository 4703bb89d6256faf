"""What torchax does by itself, printed as JSON. Apart from the tests' process, which Portlab has changed."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torchax
from torch.nn import functional
from torchax import interop

ENVIRONMENT = torchax.default_env()


def row_that_sees_nothing() -> list[bool]:
    """Is attention finite, by rows, and is its gradient, if the second row's mask is all False?"""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 1, 3, 4)), jnp.float32)
    mask = jnp.ones((1, 1, 3, 3), bool).at[..., 1, :].set(False)

    def attend(x: jax.Array) -> jax.Array:
        with ENVIRONMENT:
            q, m = interop.torch_view((x, mask))
            return interop.jax_view(functional.scaled_dot_product_attention(q, q, q, attn_mask=m))

    gradient = jax.grad(lambda x: attend(x)[..., 0, :].sum())(x)
    return [bool(jnp.isfinite(row).all()) for row in (*attend(x)[0, 0], gradient)]


def switch_after_exception() -> bool:
    """Is torchax enabled after an exception under `disable_temporarily`, as it was before?"""
    torchax.enable_globally()
    try:
        with torchax.disable_temporarily():
            raise ValueError
    except ValueError:
        found: bool = ENVIRONMENT.enabled
    if found:
        torchax.disable_globally()
    return found


def switch_after_nested_use() -> bool:
    """Does torchax know that it is enabled after an inner `with` has ended?"""
    torchax.enable_globally()
    with ENVIRONMENT:
        pass
    found: bool = ENVIRONMENT.enabled
    torchax.disable_globally()
    return found


def type_as() -> dict[str, object]:
    """The type of a tensor after `type_as` was asked of it, and whether that may be asked beside a view."""
    with ENVIRONMENT:
        x, like = torch.ones(2, 2, device="jax"), torch.ones(2, 2, device="jax", dtype=torch.bfloat16)
        x.type_as(like)
        try:
            x.type_as(like[0])
        except AttributeError:
            return {"changed": str(x.dtype), "beside a view": False}
        return {"changed": str(x.dtype), "beside a view": True}


def dropout() -> dict[str, object]:
    """Are two draws of a compiled dropout the same, and does drawing work in another program?"""
    layer = torch.nn.Dropout(0.5)

    def dropped(x: jax.Array) -> jax.Array:
        with ENVIRONMENT:
            return interop.jax_view(layer(interop.torch_view(x)))

    compiled, x = jax.jit(dropped), jnp.ones(64)
    found: dict[str, object] = {"always the same": bool((compiled(x) == compiled(x)).all())}
    try:
        jax.jit(lambda x: dropped(x) + 1)(x)
    except jax.errors.UnexpectedTracerError:
        return found | {"leaks": True}
    return found | {"leaks": False}


if __name__ == "__main__":
    # Dropout last: it leaves the environment with a tracer in it.
    faults = (row_that_sees_nothing, switch_after_exception, switch_after_nested_use, type_as, dropout)
    print(json.dumps({fault.__name__: fault() for fault in faults}))
