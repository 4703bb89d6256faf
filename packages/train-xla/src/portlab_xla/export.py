"""Golden logits of the trained model, against which its export is verified."""

from typing import Any

import torch

from portlab_hf.export import TOP_K
from portlab_hf.model import head_logits
from portlab_spec.data.tokens import Row
from portlab_spec.packing import pack_batch
from portlab_spec.run.export import golden_logits
from portlab_xla.inputs import MicroBatch, micro_batches
from portlab_xla.loss import supervised_hidden
from portlab_xla.setup import Setup


def probe(setup: Setup, row: Row) -> dict[str, Any]:
    """Golden logits of base plus adapter at the supervised positions of one row, for verification after export."""
    top, values = _top_logits(setup, row)
    return golden_logits(row, top.numpy(), values.numpy())


def _top_logits(setup: Setup, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
    layout = setup.plan([[row] * setup.device.groups]).layout(0)
    tensors = micro_batches(pack_batch([row] * setup.device.groups, layout))[0]
    held = tensors["weights"][0] > 0
    order = tensors["slots"][0][held].argsort()
    setup.adapted.eval()
    with torch.no_grad():
        batch = MicroBatch(**setup.device.put_rows(tensors))
        logits = head_logits(setup.base, supervised_hidden(setup.base, setup.config, batch))
        values, top = logits.topk(min(TOP_K, logits.shape[-1]), -1)
        setup.device.sync()
    return top[0].cpu()[held][order], values[0].cpu()[held][order]
