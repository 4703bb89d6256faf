"""Cross-entropy where it counts: logits of supervised tokens alone, some at a time.

A vocabulary of 262,144 makes logits the largest tensor of a step. TRL computes them for every token; here hidden
states are gathered at the supervised ones first, and a chunk's logits are computed again in the backward pass rather
than kept.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from portlab_hf.masks import attention_masks, for_model
from portlab_hf.model import head_logits, text_model
from portlab_spec.models import GemmaConfig
from portlab_xla.inputs import MicroBatch

Checkpoint = Callable[..., Any]


class Sums(NamedTuple):
    """Sums over supervised tokens, float32 scalars.

    Attributes:
        loss: cross-entropy and what is added to it.
        nll: cross-entropy alone.
        correct: tokens whose logit is the largest.
    """

    loss: torch.Tensor
    nll: torch.Tensor
    correct: torch.Tensor


def supervised_hidden(base: Any, config: GemmaConfig, batch: MicroBatch) -> torch.Tensor:
    """Last hidden states of the tokens that predict, (G, S, D)."""
    output = text_model(base)(
        input_ids=batch.input_ids,
        position_ids=batch.positions,
        attention_mask=for_model(base, attention_masks(batch.ends, batch.positions, config.window)),
        use_cache=False,
    )
    hidden = output.last_hidden_state
    hidden = hidden.reshape(batch.slots.shape[0], -1, hidden.shape[-1])
    return hidden.gather(1, batch.slots[..., None].expand(-1, -1, hidden.shape[-1]))


def batch_sums(
    base: Any, config: GemmaConfig, batch: MicroBatch, checkpoint: Checkpoint, *, chunk: int, z_loss: float = 0.0
) -> Sums:
    """Loss sums of a micro-batch.

    Args:
        base: transformers' model, with the adapter in it.
        config: of it.
        batch: on its device.
        checkpoint: calls a function whose intermediates are computed again in the backward pass.
        chunk: supervised slots of a group whose logits are in memory at once.
        z_loss: weight of the squared log-partition.
    """
    hidden = supervised_hidden(base, config, batch)

    def chunk_sums(hidden: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        logits = head_logits(base, hidden)
        partition = torch.logsumexp(logits, -1)
        nll = partition - logits.gather(-1, targets[..., None]).squeeze(-1)
        correct = (logits.detach().argmax(-1) == targets).float()
        loss = nll + z_loss * partition.square() if z_loss else nll
        return torch.stack([(value * weights).sum() for value in (loss, nll, correct)])

    size = batch.slots.shape[-1]
    sums = torch.zeros(3, device=hidden.device)
    for start in range(0, size, chunk):
        part = slice(start, min(start + chunk, size))
        inputs = hidden[:, part], batch.targets[:, part], batch.weights[:, part]
        sums = sums + (checkpoint(chunk_sums, *inputs) if torch.is_grad_enabled() else chunk_sums(*inputs))
    return Sums(*sums.unbind())
