"""After full fine-tuning: the trained weights as a Hugging Face folder, in the place of the base's.

Tensors that were trained are written in the dtype that the base stores them in; every other tensor (a vision tower,
say) and every other file is copied as it is.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from portlab_spec.errors import CheckFailed
from portlab_spec.files import new_folder
from portlab_spec.safetensors_file import Writer, model_files, open_tensors

Sources = Mapping[str, Callable[[], np.ndarray]]  # by the tensor's name in the base's files


def export_full(base: Path, trained: Sources, out: Path) -> None:
    """Write a model folder; `out` appears whole or not at all, an older one is replaced.

    Args:
        base: the folder that training started from.
        trained: gives each trained tensor, in any floating-point type.
        out: to make.

    Raises:
        CheckFailed: a trained tensor is not one of the base's; a file read back does not hold what was trained.
    """
    tensors = open_tensors(base)
    if strange := sorted(trained.keys() - tensors.keys()):
        raise CheckFailed(f"{strange[0]} was trained and is no tensor of the base", where=str(base))
    fresh = out.with_name(f"{out.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    with new_folder(fresh) as folder:
        for file in model_files(base):
            # A shard's own tensors, in the order of the base's file.
            names = [name for name, view in tensors.items() if view.path == file]
            layout = {name: (tensors[name].dtype, tensors[name].shape) for name in names}
            with Writer(folder / file.name, layout) as writer:
                for name in names:
                    stored = tensors[name].numpy()
                    writer.write(name, trained[name]().astype(stored.dtype) if name in trained else stored)
        for file in base.iterdir():
            if file.is_file() and not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)
        _verify(folder, trained)
    shutil.rmtree(out, ignore_errors=True)
    fresh.rename(out)


def _verify(folder: Path, trained: Sources) -> None:
    written = open_tensors(folder)
    for name, value in trained.items():
        stored = written[name].numpy()
        if not np.array_equal(stored, value().astype(stored.dtype)):
            raise CheckFailed(f"{name} read back differs from what was trained", where=str(folder))
    json.loads((folder / "config.json").read_text(encoding="utf-8"))
