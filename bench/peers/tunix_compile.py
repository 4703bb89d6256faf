"""Compile the step that Tunix's PeftTrainer jits for a TPU slice, with no TPU and no weights.

    python tunix_compile.py FOLDER

Reads job.json in FOLDER and leaves the files that compile_job.py describes. Runs in Tunix's environment with the
libtpu that its JAX asks for. Everything is Tunix's own: its Gemma 3 built under `nnx.eval_shape`, its LoRA through
qwix, its trainer, loss, optimiser and jit with its donation, its sharding rules for weights, activations, optimiser
state and batch. Attention masks and positions are made from the tokens inside the step, as in Tunix's examples.

Rematerialisation is switched on after LoRA is applied: in the other order some Tunix models lose the adapter. Its
Gemma 3 has no flash attention to switch on, and its supervised trainer no packing.

qwix makes the adapter in the base's type. A float32 adapter over a bfloat16 base works, but nothing casts its sum with
the base's output back, so that activations become float32 and take more memory.
"""

import importlib.metadata
import math
import re
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax
import qwix
from compile_job import CompileJob, enter_environment, read_job, write_json
from flax import nnx
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from tunix.models.gemma3 import model as gemma3
from tunix.sft import peft_trainer
from tunix.sft import utils as sft_utils

CONFIGS = {"gemma3_270m": gemma3.ModelConfig.gemma3_270m, "gemma3_1b": gemma3.ModelConfig.gemma3_1b_it}
DISTRIBUTIONS = ("google-tunix", "qwix", "flax", "optax", "jax", "jaxlib", "libtpu")


def slice_mesh(job: CompileJob) -> jax.sharding.Mesh:
    """Mesh (fsdp, tp) over the devices of a slice that need not be there."""
    topology = topologies.get_topology_desc(topology_name=job.topology, platform="tpu")
    kinds = {device.device_kind for device in topology.devices}
    if kinds != {job.device_kind} or len(topology.devices) != job.fsdp * job.tp:
        sys.exit(f"{job.topology} is {len(topology.devices)} of {sorted(kinds)}, not what the job says: {job}")
    return topologies.make_mesh(topology, (job.fsdp, job.tp), ("fsdp", "tp"))


def adapted_model(job: CompileJob) -> nnx.Module:
    """The model with its LoRA layers; to be called under eval_shape."""
    config = CONFIGS[job.model]()
    config.param_dtype = jnp.dtype(job.dtype)
    base = gemma3.Gemma3(config, rngs=nnx.Rngs(0))
    provider = qwix.LoraProvider(module_path=job.module_path, rank=job.rank, alpha=job.alpha)
    model = qwix.apply_lora_to_model(base, provider, rngs=nnx.Rngs(0), **base.get_model_input())
    if job.adapter_dtype:
        adapter = nnx.state(model, nnx.LoRAParam)
        nnx.update(model, jax.tree.map(lambda leaf: leaf.astype(job.adapter_dtype), adapter))
    return model


def require_adapter(job: CompileJob, model: nnx.Module) -> None:
    """Stop unless every module that the job names has its two adapter leaves."""
    named = [path for path, _ in nnx.iter_modules(model) if re.fullmatch(job.module_path, "/".join(map(str, path)))]
    leaves = jax.tree.leaves(nnx.state(model, nnx.LoRAParam))
    if not named or len(leaves) != 2 * len(named):
        sys.exit(f"{job.module_path!r} matches {len(named)} modules, but the adapter has {len(leaves)} leaves")


def switch_remat(model: gemma3.Gemma3, setting: str) -> None:
    """Attention keeps its own copy of the setting; all else asks the shared configuration."""
    model.config.remat_config = gemma3.RematConfig[setting.upper()]
    for layer in model.layers:
        layer.attn.remat_config = model.config.remat_config


def place(node: nnx.Module, mesh: jax.sharding.Mesh) -> None:
    """Give every abstract leaf the sharding that its metadata names."""
    state = nnx.state(node)
    shardings = nnx.get_named_sharding(state, mesh)
    nnx.update(node, jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings))


def model_inputs(batch: peft_trainer.TrainingInput) -> dict[str, jax.Array]:
    """Arguments of Tunix's loss: tokens and mask (B, T), positions (B, T), attention mask (B, T, T)."""
    real = batch.input_tokens != 0
    return {
        "input_tokens": batch.input_tokens,
        "input_mask": batch.input_mask,
        "positions": sft_utils.build_positions_from_mask(real),
        "attention_mask": sft_utils.make_causal_attn_mask(real),
    }


def abstract_trainer(job: CompileJob, mesh: jax.sharding.Mesh) -> peft_trainer.PeftTrainer:
    """Tunix's trainer over an abstract model and an abstract optimiser state, both placed on the mesh."""
    model = nnx.eval_shape(lambda: adapted_model(job))
    require_adapter(job, model)
    switch_remat(model, job.remat)
    trainer = peft_trainer.PeftTrainer(
        model,
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4)),
        peft_trainer.TrainingConfig(
            eval_every_n_steps=1,
            gradient_accumulation_steps=job.accumulation if job.accumulation > 1 else None,
        ),
    )
    place(trainer.model, mesh)
    place(trainer.optimizer, mesh)
    # It would move real arrays to where `place` has put the abstract ones.
    trainer._shard_optimizer = lambda mesh: None
    return trainer.with_gen_model_input_fn(model_inputs)


def abstract_batch(job: CompileJob, mesh: jax.sharding.Mesh) -> peft_trainer.TrainingInput:
    """Rows are split over fsdp, as the trainer splits what it is given."""
    tokens = jax.ShapeDtypeStruct(
        (job.batch, job.length), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec("fsdp"))
    )
    return peft_trainer.TrainingInput(input_tokens=tokens, input_mask=tokens)


def count_parameters(model: nnx.Module) -> dict[str, int]:
    """Values in the frozen model and in the adapter."""
    adapter, base = nnx.state(model, nnx.LoRAParam, nnx.Param)
    return {
        name: sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state))
        for name, state in (("base", base), ("adapter", adapter))
    }


def memory_bytes(compiled: jax.stages.Compiled) -> dict[str, int]:
    """The compiler's own accounting of one device's HBM."""
    analysis: Any = compiled.memory_analysis()
    kinds = ("argument", "output", "alias", "temp", "generated_code")
    sizes = {kind: getattr(analysis, f"{kind}_size_in_bytes") for kind in kinds}
    return {**sizes, "peak": analysis.peak_memory_in_bytes}


def main(folder: Path) -> None:
    """Compile the job's step and describe it in the folder."""
    enter_environment()
    job = read_job(folder)
    mesh = slice_mesh(job)
    # Not jax.set_mesh: Tunix asks the context that this sets. Its activation sharding is off where the first device is
    # a CPU, which is not so on the machine that would run this program.
    with mesh, mock.patch("jax.devices", return_value=list(mesh.devices.flat)):
        trainer = abstract_trainer(job, mesh)
        step, _ = trainer.jit_train_and_eval_step()
        started = time.perf_counter()
        lowered = step.func.lower(*step.args, abstract_batch(job, mesh))
        seconds = {"lower": time.perf_counter() - started}
        write_json(folder, "parameters", count_parameters(trainer.model))
        write_json(folder, "versions", {name: importlib.metadata.version(name) for name in DISTRIBUTIONS})
        started = time.perf_counter()
        try:
            compiled = lowered.compile().compiled
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            (folder / "refused.txt").write_text(str(error))
            compiled = None
        write_json(folder, "seconds", {**seconds, "compile": time.perf_counter() - started})
    if compiled is not None:
        (folder / "compiled.hlo.txt").write_text(compiled.as_text())
        write_json(folder, "memory", memory_bytes(compiled))
        write_json(folder, "cost", compiled.cost_analysis())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
