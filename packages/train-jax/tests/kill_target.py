"""A training run for test_kill.py to kill: python kill_target.py MODEL RUN. Prints each step as it is done."""

import sys
from pathlib import Path

import jax
import numpy as np

from portlab_jax.checkpoint import Checkpoints
from portlab_jax.compiled import use_compilation_cache
from portlab_jax.setup import initial_state, set_up
from portlab_jax.trainer import train
from portlab_spec.assets import ModelFolder
from portlab_spec.data.tokens import Row
from portlab_spec.files import write_json
from portlab_spec.packing import BatchOrder
from portlab_spec.recipe import Recipe

STEPS, SAVE_EVERY = 400, 3


def make_rows() -> list[Row]:
    """Rows behind one prompt."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, 96, 30).tolist()
    rows = []
    for i in range(16):
        ids = (*prompt, *rng.integers(3, 96, 8).tolist())
        rows.append(Row(f"r{i}", ids, (False,) * 34 + (True,) * 4))
    return rows


def main(model: Path, folder: Path) -> None:
    """Train, or go on training."""
    use_compilation_cache()
    settings = {
        "steps": STEPS,
        "batch_size": 4,
        "max_length": 64,
        "save_every": SAVE_EVERY,
        "lora": {"rank": 2, "targets": ["q_proj"], "train_control_rows": False},
        "optimizer": {"learning_rate": 1e-3},
    }
    setup = set_up(Recipe.model_validate(settings), ModelFolder(model, "tiny", None), ())
    order = BatchOrder(make_rows(), setup.recipe.batch_size, STEPS, setup.recipe.seed)
    with jax.set_mesh(setup.mesh.mesh), Checkpoints(folder / "checkpoints") as checkpoints:
        trained = train(setup, initial_state(setup), order, checkpoints, folder=folder)
    write_json(folder / "losses.json", trained.log.losses)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
