"""The folder of a run, and what marks it as one.

    <run>/recipe.json     the resolved recipe; a folder that holds it is a run
          backend.json    {"backend": "xla"}: the trainer that made it; without the file it is train-jax

The trainers keep checkpoints that only they can read, so that none of them goes on in a folder of another's. The
backend has a file of its own because recipe.json is a recipe, to be trained again by any of them with `--recipe`.
"""

from pathlib import Path
from typing import Any

from portlab_spec.errors import UserError
from portlab_spec.files import read_json, sha256_json, write_json
from portlab_spec.recipe import Recipe

STAMP = "recipe.json"
BACKEND = "backend.json"
DEFAULT_BACKEND = "jax"


def run_folder(recipe: Recipe, out: Path | None, backend: str = DEFAULT_BACKEND) -> Path:
    """The run's folder: `--out`, or one under runs/ named after the recipe, the backend and a digest of all values.

    Raises:
        UserError: the folder holds a run of another recipe or trainer, or is not a run folder.
    """
    resolved = recipe.model_dump(mode="json")
    folder = out or _default_folder(recipe.name, backend, resolved)
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if not names:
        return folder
    if not names & {STAMP, BACKEND}:
        raise UserError("is not empty and holds no run", where=str(folder), fix="Choose another --out")
    if (found := _backend_of(folder)) != backend:
        raise UserError(f"holds a run of train-{found}", where=str(folder), fix="Choose another --out")
    # A process that was killed between its two stamps left the first alone.
    if STAMP in names and (saved := read_json(folder / STAMP, "the run's recipe")) != resolved:
        keys = _differences(saved, resolved)
        raise UserError(
            f"holds a run with other settings ({', '.join(keys)})", where=str(folder), fix="Choose another --out"
        )
    return folder


def write_stamp(folder: Path, recipe: Recipe, backend: str = DEFAULT_BACKEND) -> None:
    """Make a folder a run, so that the same command goes on in it and no other does."""
    if backend != DEFAULT_BACKEND:
        write_json(folder / BACKEND, {"backend": backend})
    write_json(folder / STAMP, recipe.model_dump(mode="json"))


def _default_folder(name: str, backend: str, resolved: dict[str, Any]) -> Path:
    parts = [name, *([] if backend == DEFAULT_BACKEND else [backend]), sha256_json(resolved)[:8]]
    return Path("runs") / "-".join(parts)


def _backend_of(folder: Path) -> str:
    if not (folder / BACKEND).exists():
        return DEFAULT_BACKEND
    return str(read_json(folder / BACKEND, "the run's backend")["backend"])


def _differences(a: dict[str, Any], b: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of the values in which two recipes differ."""
    keys: list[str] = []
    for key in sorted(a.keys() | b.keys()):
        if isinstance(a.get(key), dict) and isinstance(b.get(key), dict):
            keys += _differences(a[key], b[key], f"{prefix}{key}.")
        elif a.get(key) != b.get(key):
            keys.append(prefix + key)
    return keys
