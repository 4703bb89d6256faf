"""Experts in static shapes, for XLA: each computes every token, and routing weights keep what was sent to it.

transformers sorts tokens by expert, with operations that XLA lacks, or loops over the experts that were chosen, which
makes another graph of each batch. What is here costs `experts / top_k` times their products, and is one program that
cuts over devices like any other.
"""

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

NAME = "portlab_dense"


def use_dense_experts(base: PreTrainedModel) -> None:
    """Have a model compute its experts so."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, dense_experts)
    base.set_experts_implementation(NAME)


def dense_experts(
    experts: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Sum of what experts make of tokens, in the form in which transformers calls it.

    Args:
        experts: module with `gate_up_proj` (E, 2F, D) and `down_proj` (E, D, F).
        hidden: (N, D).
        top_k_index: int64 (N, K), experts that a token is sent to.
        top_k_weights: (N, K).

    Returns:
        (N, D) in the dtype of `hidden`.
    """
    numbers = torch.arange(experts.num_experts, device=hidden.device)
    sent = (top_k_index[..., None] == numbers) * top_k_weights[..., None]
    gated = experts._apply_gate(torch.einsum("nd,efd->enf", hidden, experts.gate_up_proj))
    weighted = gated * sent.sum(1).T[..., None].to(gated.dtype)
    return torch.einsum("enf,edf->nd", weighted, experts.down_proj)
