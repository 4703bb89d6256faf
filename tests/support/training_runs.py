"""Short training runs on tiny models: called as a function, or run by a process with other devices.

python training_runs.py RUNS.json    prints {name: result} for each run of the file, on process 0
"""

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file
from toy_rows import plain_rows, tool_rows

from portlab_jax import distributed
from portlab_jax.checkpoint import Checkpoints
from portlab_jax.setup import initial_state, set_up
from portlab_jax.trainer import TrainedLeaves, train
from portlab_spec.assets import ModelFolder
from portlab_spec.models import GemmaConfig, param_table
from portlab_spec.packing import BatchOrder
from portlab_spec.recipe import Recipe

TOKEN_IDS = (3, 5)
STEPS = 20

# A rate at which the loss falls by half in 20 steps, and rounding does not grow from step to step.
SETTINGS: dict[str, Any] = {
    "steps": STEPS,
    "batch_size": 8,
    "max_length": 64,
    "save_every": STEPS,
    "dtype": "float32",
    "lora": {"rank": 4, "targets": ["q_proj", "v_proj", "down_proj"]},
    "optimizer": {"learning_rate": 1e-2},
}


def save_random_model(folder: Path, config: dict[str, Any], seed: int = 0) -> Path:
    """A base with random float32 weights, larger than a fresh model's: attention is far from uniform."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(seed)
    tensors = {}
    for param in param_table(GemmaConfig.load(folder)):
        scale = 1.7 * param.shape[-1] ** -0.5 if len(param.shape) > 1 else 0.3
        center = 1.0 if param.name == "layer_scalar" else 0.0
        for name in param.tensor_names("model."):
            tensors[name] = rng.normal(center, scale, param.shape).astype(np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        model: folder of the base.
        folder: of the run; a second run in the same folder goes on from the first one's checkpoints.
        changes: of `SETTINGS`, key -> value; sections replace whole sections.
        plain: train on plain rows instead of rows of tools.
        monitored: so many other rows are monitored.
    """

    model: str
    folder: str
    changes: dict[str, Any] = field(default_factory=dict)
    plain: bool = False
    monitored: int = 0

    def __call__(self) -> TrainedLeaves:
        """Train."""
        recipe = Recipe.model_validate(SETTINGS | self.changes)
        token_ids = TOKEN_IDS if recipe.method == "lora" else ()
        setup = set_up(recipe, ModelFolder(Path(self.model), "tiny", None), token_ids)
        folder = Path(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        rows = plain_rows() if self.plain else tool_rows()
        order = BatchOrder(rows, recipe.batch_size, recipe.steps, recipe.seed, group_by_prefix=recipe.group_by_prefix)
        options = {"keep": recipe.keep, "keep_best": recipe.keep_best}
        with jax.set_mesh(setup.mesh.mesh), Checkpoints(folder / "checkpoints", **options) as checkpoints:
            return train(
                setup,
                initial_state(setup),
                order,
                checkpoints,
                monitored=tool_rows(self.monitored, seed=1),
                folder=folder,
            )


def result(trained: TrainedLeaves) -> dict[str, Any]:
    """What can be told to another process."""
    return {
        "losses": trained.log.losses,
        "evals": trained.log.evals,
        "fresh_steps": trained.fresh_steps,
        "compilations": trained.compilations,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
    }


def run_elsewhere(file: Path, runs: dict[str, Run], *, devices: int, processes: int = 1) -> dict[str, Any]:
    """Do runs in other processes.

    Args:
        file: to write, for this module to read as a program.
        runs: by name.
        devices: virtual ones of each process.
        processes: that train together.

    Returns:
        `result` of each run by its name.
    """
    file.write_text(json.dumps({name: asdict(run) for name, run in runs.items()}))
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # compiles in half the time
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    if processes > 1:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            environment["PORTLAB_COORDINATOR"] = f"127.0.0.1:{listener.getsockname()[1]}"
        environment["PORTLAB_PROCESSES"] = str(processes)
    started = [
        subprocess.Popen(
            [sys.executable, __file__, str(file)],
            env=environment | ({"PORTLAB_PROCESS": str(i)} if processes > 1 else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(processes)
    ]
    try:
        outputs = [process.communicate(timeout=600) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, stderr) in zip(started, outputs, strict=True):
        assert process.returncode == 0, stderr
    return json.loads(outputs[0][0].splitlines()[-1])


def main(path: Path) -> None:
    """Do the runs of a file, one after the other."""
    distributed.initialize()
    runs = {name: Run(**arguments) for name, arguments in json.loads(path.read_text()).items()}
    results = {name: result(run()) for name, run in runs.items()}
    if distributed.is_main():
        print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
