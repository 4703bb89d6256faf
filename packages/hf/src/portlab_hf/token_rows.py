"""Trained rows of a tied embedding, without a copy of the embedding.

PEFT writes trained rows into a copy of the whole matrix, once for the embedding and once for the head, and the gradient
of each copy is as large again: with Gemma's 262,144 rows, of which seven are trained, 0.7 GB in float32 each time, on
every device, in every step and for every generated token. The same values and gradients follow from the rows alone:
what the embedding looked up is replaced where a trained token stands, and so are the logits of the trained tokens.
"""

from functools import partial

import torch
from peft import PeftModel
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from torch import nn
from torch.nn import functional

ADAPTER = "default"
INDEX = "trained_token_index"


def use_rows_alone(model: PeftModel) -> None:
    """Have every embedding and head with trained rows compute from these rows; names and values stay PEFT's."""
    for module in list(model.modules()):
        if isinstance(module, TrainableTokensLayer):
            rows = module.trainable_tokens_delta[ADAPTER]
            # A buffer goes where the model goes, also to where it is a value of a function.
            index = torch.tensor(module.token_indices[ADAPTER], device=rows.device)
            module.register_buffer(INDEX, index, persistent=False)
            module.forward = partial(_forward, module)  # type: ignore[method-assign]


def _forward(layer: TrainableTokensLayer, inputs: torch.Tensor) -> torch.Tensor:
    base, rows, index = layer.get_base_layer(), layer.trainable_tokens_delta[ADAPTER], getattr(layer, INDEX)
    output: torch.Tensor = base(inputs)
    if isinstance(base, nn.Embedding):
        return _looked_up(output, inputs, rows, index, getattr(base, "embed_scale", None))
    columns = functional.linear(inputs, rows.to(inputs.dtype))
    # Not index_copy: JAX differentiates it by numbering every logit, two more arrays of their size.
    vocabulary = torch.arange(output.shape[-1], device=output.device)
    others = (vocabulary[:, None] != index).all(-1)
    return torch.where(others, output, 0).index_add(-1, index, columns)


def _looked_up(
    output: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor, index: torch.Tensor, scale: torch.Tensor | None
) -> torch.Tensor:
    """The embedding's output (..., D), with the rows (n, D) of trained tokens in it; Gemma scales what it looks up."""
    is_row = tokens[..., None] == index  # (..., n)
    values = rows.to(output.dtype) if scale is None else rows.to(output.dtype) * scale.to(output.dtype)
    return torch.where(is_row.any(-1, keepdim=True), is_row.to(output.dtype) @ values, output)
