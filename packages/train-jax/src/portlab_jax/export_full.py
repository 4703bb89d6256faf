"""After full fine-tuning: where each tensor of the base is in the trained weights."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import numpy as np

from portlab_jax.model import Params
from portlab_spec.models import GemmaConfig, find_prefix, param_table
from portlab_spec.run import export_full as files
from portlab_spec.safetensors_file import open_tensors


def export_full(base: Path, config: GemmaConfig, trained: Params, out: Path) -> int:
    """Write a model folder; the number of tensors that come from training.

    Args:
        base: the folder that training started from.
        config: its configuration.
        trained: all weights, as `load_params` lays them out.
        out: to make; an older one is replaced.

    Raises:
        CheckFailed: a file read back does not hold what was trained.
    """
    prefix = find_prefix(open_tensors(base), str(base))
    sources: dict[str, Callable[[], np.ndarray]] = {}
    for param in (p for p in param_table(config) if not p.buffer):
        leaf = trained["layers"][param.stack][param.name] if param.stack else trained[param.name]
        for row, name in enumerate(param.tensor_names(prefix)):
            sources[name] = partial(_value, leaf, row if param.stack else None)
    files.export_full(base, sources, out)
    return len(sources)


def _value(leaf: jax.Array, row: int | None) -> np.ndarray:
    return np.asarray(leaf if row is None else leaf[row])
