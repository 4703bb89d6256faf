"""Packed batches as tensors."""

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
