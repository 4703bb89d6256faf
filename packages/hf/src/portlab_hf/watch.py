"""Intermediate values of transformers' Gemma, seen through hooks: the computation is left as it is."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from portlab_hf.model import decoder_layers, text_model


@contextmanager
def watch(base: Any) -> Iterator[dict[str, Any]]:
    """Collect what a forward pass within computes, under the names of `portlab_spec.evidence.record`.

    Each is (B, T, ...): all tokens that the model was given. Of several passes the last one counts.

    Args:
        base: transformers' model, with an adapter in it or without.
    """
    seen: dict[str, Any] = {}
    handles: list[Any] = []

    def after(module: nn.Module, name: str, shape: Any = None) -> None:
        def hook(_: Any, __: Any, output: Any) -> None:
            found = output[0] if isinstance(output, tuple) else output
            seen[name] = (found if shape is None else shape(found)).detach()

        handles.append(module.register_forward_hook(hook))

    def before(module: nn.Module, name: str) -> None:
        def hook(_: Any, args: Any, kwargs: Any) -> None:
            seen[name] = (args[0] if args else kwargs["hidden_states"]).detach()

        handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    layers = decoder_layers(base)
    before(layers[0], "hidden.embedding")
    for number, layer in enumerate(layers):
        _watch_attention(layer.self_attn, f"inner.{number:02}", after, before, seen)
        after(layer, f"hidden.layer.{number:02}")
    norm: Any = text_model(base).norm
    after(norm, "hidden.final")
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _watch_attention(attention: Any, name: str, after: Any, before: Any, seen: dict[str, Any]) -> None:
    """Queries, keys and values as they are before RoPE, (B, T, heads, d), and what the output projection is given."""

    def by_token(x: torch.Tensor) -> torch.Tensor:
        # Gemma 3 norms (B, heads, T, d), Gemma 4 (B, T, heads, d).
        length, heads_first = seen["hidden.embedding"].shape[1], type(attention).__name__.startswith("Gemma3")
        return x.transpose(1, 2) if heads_first and x.shape[2] == length else x

    def by_head(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(*x.shape[:-1], -1, attention.head_dim)

    if hasattr(attention, "q_norm"):
        after(attention.q_norm, f"{name}.query", by_token)
    before(attention.o_proj, f"{name}.attended")
    if getattr(attention, "is_kv_shared_layer", False):
        return
    if hasattr(attention, "k_norm"):
        after(attention.k_norm, f"{name}.key", by_token)
    if hasattr(attention, "v_norm"):
        after(attention.v_norm, f"{name}.value", by_token)
    elif getattr(attention, "v_proj", None) is not None:
        after(attention.v_proj, f"{name}.value", by_head)
