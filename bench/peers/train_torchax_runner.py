"""Train a work folder's batches with portlab_torchax: its own packing, step and optimiser.

    python train_torchax_runner.py FOLDER --name NAME [--rows packed|padded]

`packed` is what train-torchax does; `padded` gives every example a row of its own, as long as the longest.
"""

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from exchange import Job, Measured, peak_resident_bytes, read_job
from recipes import recipe_of

from portlab_hf.model import base_of, module_prefix
from portlab_spec.assets import ModelFolder
from portlab_spec.data.tokens import Row
from portlab_spec.packing import pack_batch
from portlab_torchax.programs import Programs
from portlab_torchax.setup import Setup, initial_state, jit_step, set_up


def start_at(setup: Setup, job: Job) -> None:
    """Put the job's initial adapter in the place of the one that was drawn."""
    prefix = f"base_model.model.{module_prefix(base_of(setup.program.model.module))}"
    for name, value in job.adapter.items():
        module, _, which = name.rpartition(".")
        own = f"{prefix}{module}.lora_{which.upper()}.default.weight"
        setup.start[own] = jax.device_put(jnp.asarray(value.T), setup.start[own].sharding)


def train(job: Job, measured: Measured, name: str, *, packed: bool) -> None:
    """Take the job's steps."""
    recipe = recipe_of(job, name, packed=packed)
    setup = set_up(recipe, ModelFolder(Path(job.settings.model), id="benchmark", revision=None), ())
    start_at(setup, job)
    batches = [[Row(str(i), tuple(row.ids), tuple(row.loss)) for i, row in enumerate(batch)] for batch in job.batches]
    plan = setup.plan(batches, accumulate=recipe.accumulate)
    layout = plan.layout(0)
    state = initial_state(setup)
    programs = Programs(lambda layout: jit_step(setup, state, layout))
    for rows in batches:
        started = time.perf_counter()
        batch = setup.placement.put_rows(pack_batch(rows, layout), axis=1)
        if not programs.ready(layout):
            programs.compile(layout, plan, state, setup.frozen, batch)
        state, metrics = programs(layout, state, setup.frozen, batch)
        measured.losses.append(float(metrics.loss))
        measured.record_step(time.perf_counter() - started)


def main() -> None:
    """Train and leave NAME.json in the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--name", required=True)
    parser.add_argument("--rows", choices=("packed", "padded"), default="packed")
    arguments = parser.parse_args()
    job, measured = read_job(arguments.folder), Measured()
    train(job, measured, arguments.name, packed=arguments.rows == "packed")
    statistics = jax.devices()[0].memory_stats() if job.settings.device == "cuda" else None
    measured.peak_memory_bytes = statistics["peak_bytes_in_use"] if statistics else peak_resident_bytes()
    versions = ("portlab-train-torchax", "jax", "torch", "torchax", "transformers", "peft", "optax")
    measured.write(arguments.folder, arguments.name, *versions)


if __name__ == "__main__":
    main()
