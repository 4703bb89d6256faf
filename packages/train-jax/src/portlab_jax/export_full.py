"""After full fine-tuning: the trained weights as a Hugging Face folder, in the place of the base's.

Tensors of the text model are written in the dtype that the base stores them in; every other tensor (a vision tower,
say) and every other file is copied as it is.
"""

import json
import shutil
from pathlib import Path

import jax
import numpy as np

from portlab_jax.model import Params
from portlab_spec.errors import CheckFailed
from portlab_spec.files import new_folder
from portlab_spec.models import GemmaConfig, find_prefix, param_table
from portlab_spec.safetensors_file import Writer, model_files, open_tensors


def export_full(base: Path, config: GemmaConfig, trained: Params, out: Path) -> int:
    """Write a model folder; the number of tensors that come from training.

    Args:
        base: the folder that training started from.
        config: its configuration.
        trained: all weights, as `load_params` lays them out.
        out: must not exist.

    Raises:
        UserError: `out` exists.
        CheckFailed: a file read back does not hold what was trained.
    """
    tensors = open_tensors(base)
    prefix = find_prefix(tensors, str(base))
    sources = {}
    for param in (p for p in param_table(config) if not p.buffer):
        leaf = trained["layers"][param.stack][param.name] if param.stack else trained[param.name]
        for row, name in enumerate(param.tensor_names(prefix)):
            sources[name] = (leaf, row if param.stack else None)
    with new_folder(out) as folder:
        for file in model_files(base):
            # A shard's own tensors, in the order of the base's file.
            names = [name for name, view in tensors.items() if view.path == file]
            layout = {name: (tensors[name].dtype, tensors[name].shape) for name in names}
            with Writer(folder / file.name, layout) as writer:
                for name in names:
                    writer.write(name, _value(sources.get(name), tensors[name].numpy()))
        for file in base.iterdir():
            if file.is_file() and not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)
        _verify(folder, sources)
    return len(sources)


def _value(source: tuple[jax.Array, int | None] | None, base: np.ndarray) -> np.ndarray:
    if source is None:
        return base
    leaf, row = source
    return np.asarray(leaf if row is None else leaf[row]).astype(base.dtype)


def _verify(folder: Path, sources: dict[str, tuple[jax.Array, int | None]]) -> None:
    written = open_tensors(folder)
    for name, source in sources.items():
        stored = written[name].numpy()
        if not np.array_equal(stored, _value(source, stored)):
            raise CheckFailed(f"{name} read back differs from what was trained", where=str(folder))
    json.loads((folder / "config.json").read_text(encoding="utf-8"))
