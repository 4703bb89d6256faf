"""Train a work folder's batches the way torchax's tutorials do: `torchax.train.make_train_step`, called from a loop.

    python torchax_loop_runner.py FOLDER --name NAME [--jit]

What they do, and what is kept of it: the model is loaded with torchax disabled and moved to its device, parameters are
told from buffers by `requires_grad`, the model's own loss over padded rows is differentiated, the attention mask is
left out (rows are padded on the right here, where that changes nothing), every step's loss is read. `make_train_step`
compiles nothing by itself: each operation runs as it is met. `--jit` compiles its step, with the state donated.

Their accuracy mode (64-bit types) is left off, which is faster.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import optax
import torch
import torchax
import torchax.train
from exchange import Job, Measured, Row, Settings, peak_resident_bytes, read_job
from peft import LoraConfig, PeftModel, get_peft_model
from torchax import interop
from transformers import AutoModelForCausalLM


def adapted_model(job: Job) -> PeftModel:
    """The base with LoRA layers that hold the given initial values."""
    settings = job.settings
    base = AutoModelForCausalLM.from_pretrained(settings.model, dtype=getattr(torch, settings.dtype))
    base.config.use_cache = False  # transformers' cache is no type that JAX knows
    lora = LoraConfig(
        r=settings.rank, lora_alpha=settings.alpha, target_modules=list(settings.targets), task_type="CAUSAL_LM"
    )
    model = get_peft_model(base, lora)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in job.adapter.items():
            module, _, which = name.rpartition(".")
            leaf = parameters[f"base_model.model.model.{module}.lora_{which.upper()}.default.weight"]
            leaf.copy_(torch.from_numpy(value.T.copy()))
    return model


def padded(rows: list[Row], length: int) -> dict[str, torch.Tensor]:
    """Rows of one length, padded on the right; labels -100 where nothing is to be learnt."""
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for i, row in enumerate(rows):
        ids[i, : len(row.ids)] = torch.tensor(row.ids)
        labels[i, : len(row.ids)] = torch.tensor([t if f else -100 for t, f in zip(row.ids, row.loss, strict=True)])
    return {"input_ids": ids, "labels": labels}


def optimizer(settings: Settings) -> optax.GradientTransformation:
    """AdamW behind a clip."""
    return optax.chain(
        optax.clip_by_global_norm(settings.clip_norm),
        optax.adamw(
            settings.learning_rate,
            b1=settings.b1,
            b2=settings.b2,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        ),
    )


def train(job: Job, measured: Measured, *, jit: bool) -> None:
    """Take the job's steps."""
    model = adapted_model(job)
    torchax.enable_globally()
    model.to("jax")
    model.train()
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    buffers = dict(model.named_buffers()) | {n: p for n, p in model.named_parameters() if not p.requires_grad}
    transform = optimizer(job.settings)
    state = interop.call_jax(transform.init, params)

    def forward(weights: Any, buffers: Any, batch: Any) -> Any:
        return torch.func.functional_call(model, {**weights, **buffers}, args=(), kwargs=batch)

    step = torchax.train.make_train_step(forward, lambda output, labels: output.loss, transform)
    if jit:
        step = interop.jax_jit(step, kwargs_for_jax_jit={"donate_argnums": (0, 2)})
    for rows in job.batches:
        batch = {name: tensor.to("jax") for name, tensor in padded(rows, job.longest).items()}
        started = time.perf_counter()
        loss, params, state = step(params, buffers, state, batch, batch["labels"])
        measured.losses.append(float(loss.item()))
        measured.record_step(time.perf_counter() - started)


def main() -> None:
    """Train and leave NAME.json in the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--name", required=True)
    parser.add_argument("--jit", action=argparse.BooleanOptionalAction, default=False)
    arguments = parser.parse_args()
    job, measured = read_job(arguments.folder), Measured()
    train(job, measured, jit=arguments.jit)
    measured.peak_memory_bytes = peak_resident_bytes()
    measured.write(arguments.folder, arguments.name, "torchax", "jax", "torch", "transformers", "peft", "optax")


if __name__ == "__main__":
    main()
