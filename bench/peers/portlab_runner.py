"""Train a work folder's batches with portlab_jax: the trainer's own packing, step and optimiser.

    python portlab_runner.py FOLDER [--name NAME] [--rows packed|padded]

`padded` gives every example a row of its own, as long as the longest, and keeps all activations.
"""

import argparse
import time
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from exchange import Job, Measured, peak_resident_bytes, read_job
from recipes import optimizer_of

from portlab_jax.compiled import Compiled
from portlab_jax.lora import Adapter, AdapterOptions, adapter_shardings
from portlab_jax.mesh import MeshPlan
from portlab_jax.optim import make_optimizer
from portlab_jax.setup import choose_attention
from portlab_jax.step import StepOptions, TrainState, make_step
from portlab_jax.weights import load_params
from portlab_spec.data.tokens import Row
from portlab_spec.models import AdapterLeaf, GemmaConfig, plan_adapter
from portlab_spec.packing import Packing, pack_batch, plan
from portlab_spec.recipe import Lora, Mesh


def initial_adapter(values: Mapping[str, np.ndarray], leaves: tuple[AdapterLeaf, ...]) -> Adapter:
    """The given values, stacked as the trainer holds them."""

    def stacked(leaf: AdapterLeaf, which: str) -> np.ndarray:
        return np.stack([values[f"{module}.{which}"] for module in leaf.modules("")])

    return {"lora": {leaf.key: {which: stacked(leaf, which) for which in ("a", "b")} for leaf in leaves}}


def train(job: Job, measured: Measured, name: str, *, packed: bool) -> None:
    """Take the job's steps."""
    settings, dtype = job.settings, jnp.dtype(job.settings.dtype)
    config = GemmaConfig.load(Path(settings.model))
    lora = Lora(rank=settings.rank, alpha=settings.alpha, targets=settings.targets, train_control_rows=False)
    leaves = plan_adapter(config, lora)
    batches = [[Row(str(i), tuple(row.ids), tuple(row.loss)) for i, row in enumerate(batch)] for batch in job.batches]
    window = next((kind.window for kind in config.layers if kind.window), None)
    accumulate = len(batches[0]) // settings.micro_batch[name]
    # Tiles of accelerators are 128 wide.
    min_block = 32 if settings.device == "cpu" else 128
    packing = Packing(accumulate=accumulate, window=window, share_prefix=packed, pack=packed)
    layout = plan(batches, packing, min_block=min_block).layout(0)
    mesh = MeshPlan.create(Mesh(), jax.devices()[:1])
    with jax.set_mesh(mesh.mesh):
        params, _ = load_params(Path(settings.model), config, dtype, mesh)
        adapter = jax.device_put(initial_adapter(job.adapter, leaves), adapter_shardings(leaves, mesh))
        transform = make_optimizer(optimizer_of(job), len(batches))
        # Packed, layers are recomputed: about a tenth slower here, at a third of the memory.
        remat = "block" if packed else "none"
        rows = {
            "plain": layout.plain,
            "one_segment": layout.one_segment,
            "row_length": layout.row_length,
            "device": mesh.device,
        }
        attention = choose_attention("auto", config, dtype, **rows)
        options = StepOptions(config, AdapterOptions(leaves), dtype=dtype, attention=attention, remat=remat)
        key = jax.random.key_data(jax.random.key(0))
        whole = mesh.replicated
        step_number = jax.device_put(jnp.zeros((), jnp.int32), whole)
        state = TrainState(adapter, jax.jit(transform.init)(adapter), step_number, jax.device_put(key, whole))
        shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
        function = jax.jit(make_step(options, transform, layout), donate_argnums=0, out_shardings=(shardings, None))
        step = Compiled(function, "the training step")
        for rows in batches:
            started = time.perf_counter()
            state, metrics = step(state, params, mesh.put_rows(pack_batch(rows, layout), axis=1))
            measured.losses.append(float(metrics.loss))
            measured.record_step(time.perf_counter() - started)


def main() -> None:
    """Train and leave NAME.json in the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--name", default="portlab")
    parser.add_argument("--rows", choices=("packed", "padded"), default="packed")
    arguments = parser.parse_args()
    job, measured = read_job(arguments.folder), Measured()
    train(job, measured, arguments.name, packed=arguments.rows == "packed")
    statistics = jax.devices()[0].memory_stats() if job.settings.device == "cuda" else None
    measured.peak_memory_bytes = statistics["peak_bytes_in_use"] if statistics else peak_resident_bytes()
    measured.write(arguments.folder, arguments.name, "portlab-train-jax", "jax", "jaxlib", "optax")


if __name__ == "__main__":
    main()
