"""Train a work folder's batches with Tunix's PeftTrainer.

    python tunix_runner.py FOLDER

What Tunix is allowed: its own loader, LoRA through qwix, its trainer and jitted step, no rematerialisation, one static
shape for the whole run (so that it compiles once). It has neither packing nor a loss that spares the logits of
unsupervised positions. Its gradient accumulation takes the mean of the micro-batches' means; each micro-batch's own
loss is therefore weighted with its share of the supervised tokens, so that all contenders minimise the same mean.
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import qwix
from exchange import Job, Measured, Settings, peak_resident_bytes, read_job
from flax import nnx
from tunix.models.gemma3 import model as gemma3
from tunix.models.gemma3 import params_safetensors
from tunix.sft import hooks, peft_trainer
from tunix.sft import utils as sft_utils

# PEFT's module -> Tunix's module, its weight, and how a (in, rank) and b (rank, out) split: N heads of width H.
MODULES = {
    "self_attn.q_proj": ("attn", "q_einsum", "w"),
    "self_attn.o_proj": ("attn", "attn_vec_einsum", "w"),
    "mlp.gate_proj": ("mlp", "gate_proj", "kernel"),
    "mlp.up_proj": ("mlp", "up_proj", "kernel"),
    "mlp.down_proj": ("mlp", "down_proj", "kernel"),
}


@flax.struct.dataclass
class Batch:
    """One micro-batch; `share` is its part of the step's supervised tokens times the number of micro-batches."""

    input_tokens: Any
    input_mask: Any
    share: Any


def model_config(settings: Settings) -> gemma3.ModelConfig:
    """Tunix's configuration from Hugging Face's; for Gemma 3 270M it equals `ModelConfig.gemma3_270m()`."""
    raw = json.loads((Path(settings.model) / "config.json").read_text())
    return gemma3.ModelConfig(
        num_layers=raw["num_hidden_layers"],
        num_embed=raw["vocab_size"],
        embed_dim=raw["hidden_size"],
        hidden_dim=raw["intermediate_size"],
        num_heads=raw["num_attention_heads"],
        head_dim=raw["head_dim"],
        num_kv_heads=raw["num_key_value_heads"],
        sliding_window_size=raw["sliding_window"],
        local_base_frequency=int(raw["rope_local_base_freq"]),
        global_base_frequency=int(raw["rope_theta"]),
        param_dtype=jnp.dtype(settings.dtype),
    )


def adapted_model(job: Job, mesh: jax.sharding.Mesh) -> nnx.Module:
    """The base with LoRA layers that hold the given initial values."""
    settings = job.settings
    base = params_safetensors.create_model_from_safe_tensors(
        settings.model, model_config(settings), mesh, dtype=jnp.dtype(settings.dtype)
    )
    names = [module for path, (_, module, _) in MODULES.items() if path.rpartition(".")[2] in settings.targets]
    # qwix matches the whole path.
    provider = qwix.LoraProvider(
        module_path=f".*({'|'.join(names)})", rank=settings.rank, alpha=settings.alpha, dropout=0.0
    )
    model = qwix.apply_lora_to_model(base, provider, rngs=nnx.Rngs(0), **base.get_model_input())
    for name, value in job.adapter.items():
        _, layer, *path, which = name.split(".")
        block, module, weight = MODULES[".".join(path)]
        leaf = getattr(getattr(getattr(model.layers[int(layer)], block), module), f"{weight}_lora_{which}")
        held = leaf.get_value()
        leaf.set_value(jnp.asarray(value.reshape(held.shape), held.dtype))
    return model


def micro_batches(job: Job) -> Iterator[Batch]:
    """All micro-batches of all steps, every row padded to the longest of the run."""
    size, length = job.settings.micro_batch["tunix"], job.longest
    for batch in job.batches:
        total = sum(sum(row.loss) for row in batch)
        for start in range(0, len(batch), size):
            rows = batch[start : start + size]
            tokens, mask = np.zeros((size, length), np.int32), np.zeros((size, length), np.int32)
            for r, row in enumerate(rows):
                tokens[r, : len(row.ids)] = row.ids
                mask[r, : len(row.ids)] = row.loss
            yield Batch(tokens, mask, np.float32(mask.sum() / total * (len(batch) / size)))


class StepTimes(hooks.TrainingHooks):
    """Notes the losses, and the time between steps."""

    def __init__(self, measured: Measured, accumulate: int) -> None:
        self.measured = measured
        self.accumulate = accumulate
        self.started = 0.0

    def on_train_start(self, train_ctx: Any) -> None:
        pass

    def on_train_step_start(self, train_ctx: Any) -> None:
        """Called for each micro-batch, once the ones before it are done as far as the trainer waits for them."""
        if train_ctx.iter_steps % self.accumulate == 0:
            self.step_boundary()

    def step_boundary(self) -> None:
        """One step has ended, the next one begins."""
        now = time.perf_counter()
        if self.started:
            self.measured.record_step(now - self.started)
        self.started = now

    def on_train_step_end(self, train_ctx: Any, train_step: int, train_loss: float) -> None:
        self.measured.losses.append(float(train_loss))

    def on_train_end(self, train_ctx: Any) -> None:
        self.step_boundary()

    def on_eval_step_start(self, train_ctx: Any) -> None:
        pass

    def on_eval_step_end(self, train_ctx: Any, eval_loss: float) -> None:
        pass


def main(folder: Path) -> None:
    """Train and leave tunix.json in the folder."""
    job = read_job(folder)
    settings = job.settings
    accumulate = len(job.batches[0]) // settings.micro_batch["tunix"]
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    measured = Measured()
    adamw = optax.adamw(
        settings.learning_rate, settings.b1, settings.b2, settings.eps, weight_decay=settings.weight_decay
    )
    config = peft_trainer.TrainingConfig(
        eval_every_n_steps=len(job.batches) + 1,
        max_steps=len(job.batches),
        gradient_accumulation_steps=accumulate if accumulate > 1 else None,
        # On a CPU nothing is gained by running ahead, and step times are exact without.
        max_inflight_computations=1 if settings.device == "cpu" else 2,
    )
    with mesh:  # not jax.set_mesh: Tunix asks the context that this sets
        model = adapted_model(job, mesh)
        trainer = peft_trainer.PeftTrainer(
            model, optax.chain(optax.clip_by_global_norm(settings.clip_norm), adamw), config
        )
        own_loss = trainer.loss_fn

        def inputs(batch: Batch) -> dict[str, jax.Array]:
            real = batch.input_tokens != 0
            return {
                "input_tokens": batch.input_tokens,
                "input_mask": batch.input_mask,
                "positions": sft_utils.build_positions_from_mask(real),
                "attention_mask": sft_utils.make_causal_attn_mask(real),
                "share": batch.share,
            }

        # nnx matches keywords to named parameters: none may be keyword-only or collected.
        def loss(
            model: nnx.Module,
            input_tokens: jax.Array,
            input_mask: jax.Array,
            positions: jax.Array,
            attention_mask: jax.Array,
            share: jax.Array,
        ) -> jax.Array:
            return own_loss(model, input_tokens, input_mask, positions, attention_mask) * share

        trainer.with_gen_model_input_fn(inputs).with_loss_fn(loss)
        trainer.with_training_hooks(StepTimes(measured, accumulate))
        trainer.train(micro_batches(job))
    statistics = jax.local_devices()[0].memory_stats() if settings.device == "cuda" else None
    measured.peak_memory_bytes = statistics["peak_bytes_in_use"] if statistics else peak_resident_bytes()
    measured.write(folder, "tunix", "google-tunix", "qwix", "jax", "jaxlib", "flax", "optax")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
