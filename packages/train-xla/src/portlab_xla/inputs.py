"""Packed batches as tensors, and the masks that make packed rows mean what their examples mean."""

from typing import NamedTuple

import numpy as np
import torch

from portlab_spec.packing import Batch
from portlab_xla.devices.device import Tensors


class MicroBatch(NamedTuple):
    """One micro-batch; G groups, R packed rows of each, T tokens, S supervised slots.

    Attributes:
        input_ids, positions, ends: int64 (G * R, T), see `portlab_spec.packing.Rows`.
        slots: int64 (G, S), index into a group's R * T tokens of the one that predicts.
        targets: int64 (G, S).
        weights: float32 (G, S), 0 at padding.
        total: float32 (), supervised tokens of the whole step, by which the loss is divided.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    ends: torch.Tensor
    slots: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor
    total: torch.Tensor


def micro_batches(batch: Batch) -> list[Tensors]:
    """The micro-batches of a step, on the CPU, by the names of `MicroBatch`."""
    total = np.float32(max(batch.weights.sum(), 1.0))
    parts = []
    for rows, slots, targets, weights in zip(
        zip(*batch.rows, strict=True), batch.slots, batch.targets, batch.weights, strict=True
    ):
        arrays = [array.reshape(-1, array.shape[-1]).astype(np.int64) for array in (*rows, slots, targets)]
        tensors = [torch.from_numpy(np.array(array)) for array in (*arrays, weights, total)]
        parts.append(dict(zip(MicroBatch._fields, tensors, strict=True)))
    return parts


def visible(ends: torch.Tensor, positions: torch.Tensor, window: int | None) -> torch.Tensor:
    """Bool (rows, 1, T, T): token i sees token j, for every head alike.

    Every token sees itself, padding too: a softmax over nothing is not a number.

    Args:
        ends: int64 (rows, T), one past the last token that may see this one; 0 at padding.
        positions: int64 (rows, T).
        window: only j with positions[i] - positions[j] < window are seen.
    """
    index = torch.arange(ends.shape[-1], device=ends.device)
    i, j = index[:, None], index[None, :]
    mask = (j <= i) & (i < ends[:, None, :])
    if window is not None:
        mask = mask & (positions[:, :, None] - positions[:, None, :] < window)
    return (mask | (i == j))[:, None]


def attention_masks(ends: torch.Tensor, positions: torch.Tensor, window: int | None) -> dict[str, torch.Tensor]:
    """The mask of each kind of layer, as transformers' Gemmas take them ready-made."""
    masks = {"full_attention": visible(ends, positions, None)}
    if window is not None:
        masks["sliding_attention"] = visible(ends, positions, window)
    return masks
