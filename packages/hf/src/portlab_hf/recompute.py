"""Gradient checkpointing: layers whose insides are computed again in the backward pass.

transformers hands every layer to a function of PyTorch's that torch_xla cannot run; torch_xla's own takes part in the
gradient of positional tensors alone, and JAX lets no tensor out by another way. What layers of Gemma 4 E2B and E4B
share, keys and values that a later layer reads from a dictionary, would silently get no gradient. Here it goes in and
comes out by position.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import KVSharingDict

from portlab_hf.model import decoder_layers

SHARED = "shared_kv_states"


def recompute_layers(base: PreTrainedModel, checkpoint: Callable[..., Any], *, reentrant: bool = True) -> None:
    """Have every decoder layer computed again in the backward pass.

    Args:
        base: the model, adapter included.
        checkpoint: of the device.
        reentrant: whether it differentiates a layer only if an input of it needs a gradient.
    """
    layers: list[Any] = list(decoder_layers(base))
    for layer in layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(_layer, checkpoint)
    if reentrant:
        base.enable_input_require_grads()


def _layer(checkpoint: Callable[..., Any], forward: "partial[torch.Tensor]", *args: Any) -> torch.Tensor:
    """Compute a layer.

    Args:
        checkpoint: of the device.
        forward: the layer's, with its keyword arguments.
        args: its tensors that need gradients, and None.
    """
    shared = forward.keywords.get(SHARED)
    if shared is None:
        output: torch.Tensor = checkpoint(forward, *args)
        return output
    known = sorted(shared)
    written: list[str] = []

    def run(*inputs: Any) -> tuple[torch.Tensor, ...]:
        flat = inputs[len(args) :]
        own = KVSharingDict({name: (flat[2 * i], flat[2 * i + 1]) for i, name in enumerate(known)})
        before = dict(own)
        output = forward.func(*forward.args, *inputs[: len(args)], **{**forward.keywords, SHARED: own})
        written[:] = [name for name in sorted(own) if own[name] is not before.get(name)]
        return output, *(tensor for name in written for tensor in own[name])

    output, *states = checkpoint(run, *args, *(tensor for name in known for tensor in shared[name]))
    for i, name in enumerate(written):
        shared[name] = states[2 * i], states[2 * i + 1]
    return output
