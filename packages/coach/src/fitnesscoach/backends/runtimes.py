"""Who runs a model folder in this process: JAX, by an entry point of train-jax, or transformers."""

from pathlib import Path
from typing import Literal

from portlab_spec.decoding import Decoder, Load, find_decoder
from portlab_spec.errors import UserError
from portlab_spec.models import UnsupportedModel

Runtime = Literal["jax", "transformers"]
RUNTIMES: tuple[Runtime, ...] = ("jax", "transformers")  # each with an extra of its name; the first is preferred


def load_decoder(folder: Path, runtime: Runtime | None = None) -> Decoder:
    """Load a model folder.

    Args:
        folder: complete.
        runtime: who runs it; left out, the first of `RUNTIMES` that is installed and knows the model.

    Raises:
        UserError: none is installed, or none knows the model; the folder is damaged.
    """
    wanted = (runtime,) if runtime else RUNTIMES
    loaders = [load for name in wanted if (load := find_loader(name))]
    if not loaders:
        raise UserError(
            f"--runtime {runtime} is not installed" if runtime else "nothing that runs a model folder is installed",
            where=str(folder),
            fix=f"Install {' or '.join(f'fitnesscoach[{name}]' for name in wanted)}, or serve it and pass --endpoint",
        )
    for load in loaders:
        try:
            return load(folder)
        except UnsupportedModel as error:
            refused = error
    fix = "Pass --runtime transformers" if runtime else "Install fitnesscoach[transformers]"
    raise UserError(refused.what, where=str(folder), fix=fix)


def find_loader(runtime: Runtime) -> Load | None:
    """What loads models into a runtime; None if it is not installed."""
    try:
        if runtime == "transformers":
            from fitnesscoach.backends.torch_decoder import load

            return load
        entry = find_decoder(runtime)
        return entry.load() if entry else None
    except ImportError:  # of the framework itself
        return None
