"""What the stock FSDPv2 wrapper does under SPMD on four devices.

Nothing after the first observation would run without `CreatesOptimizer`, which mends that failure alone.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from toys import arguments, fsdp_v2, gemma4, lora, one_layer, rows, tokenizer
from transformers import Trainer, TrainerCallback
from trl import SFTConfig, SFTTrainer

GEMMA3 = fsdp_v2("Gemma3DecoderLayer")
GEMMA4 = fsdp_v2("Gemma4TextDecoderLayer")


class CreatesOptimizer:
    """Creates the optimiser where stock transformers leaves it None."""

    def _wrap_model(self, model: Any, training: bool = True, **more: Any) -> Any:
        wrapped = super()._wrap_model(model, training, **more)  # type: ignore[misc]
        if training and self.optimizer is None:
            self.create_optimizer(wrapped)
        return wrapped


class MendedTrainer(CreatesOptimizer, Trainer):
    pass


class MendedSFTTrainer(CreatesOptimizer, SFTTrainer):
    pass


def accelerator_before_the_first_annotation() -> dict[str, Any]:
    return {"available": torch.accelerator.is_available()}


def optimizer_creation() -> dict[str, Any]:
    return {"steps": Trainer(model=one_layer(), args=arguments(**GEMMA3), train_dataset=rows()).train().global_step}


def global_batch() -> dict[str, Any]:
    trainer = Trainer(model=one_layer(), args=arguments(**GEMMA3), train_dataset=rows(16))
    return {
        "devices": xr.global_runtime_device_count(),
        "world_size": trainer.args.world_size,
        "per_device": trainer.args.per_device_train_batch_size,
        "rows_per_step": 16 // len(trainer.get_train_dataloader()),
    }


def output_of_gemma4() -> dict[str, Any]:
    return {"steps": MendedTrainer(model=gemma4(), args=arguments(**GEMMA4), train_dataset=rows()).train().global_step}


def output_of_the_fused_head() -> dict[str, Any]:
    args = arguments(SFTConfig, dataset_kwargs={"skip_prepare_dataset": True}, **GEMMA3)
    trainer = MendedSFTTrainer(model=one_layer(), args=args, train_dataset=rows(), processing_class=tokenizer())
    return {"steps": trainer.train().global_step}


def pinned_batches() -> dict[str, Any]:
    """Stock arguments pin memory; an annotation has imported torchax, if JAX is there, before the loader starts."""
    xs.mark_sharding(torch.zeros(4, 4).to("xla"), xs.Mesh(np.arange(4), (4,), ("fsdp",)), ("fsdp", None))
    available = torch.accelerator.is_available()
    args = arguments(dataloader_pin_memory=True)
    return {
        "accelerator": available,
        "steps": Trainer(model=one_layer(), args=args, train_dataset=rows()).train().global_step,
    }


def adapter_of_a_wrapped_model() -> dict[str, Any]:
    """The adapter as accelerate's one level of unwrapping leaves it, loaded over the base in plain PEFT."""
    trainer = MendedTrainer(model=get_peft_model(one_layer(), lora()), args=arguments(**GEMMA3), train_dataset=rows())
    trainer.train()
    unwrapped = trainer.accelerator.unwrap_model(trainer.model)
    folder = tempfile.mkdtemp()
    trainer.model.module.to("cpu").save_pretrained(folder)
    weights = load_file(f"{folder}/adapter_model.safetensors")
    ids_BT = torch.tensor(rows(1)["input_ids"])
    base = one_layer().eval()(ids_BT).logits
    reloaded = PeftModel.from_pretrained(one_layer(), folder).eval()(ids_BT).logits
    return {
        "unwrapped_is": type(unwrapped).__name__,
        "key": next(iter(weights)),
        "trained": max(w.abs().max().item() for name, w in weights.items() if "lora_B" in name) > 0,
        "reloaded_differs_from_base": bool((reloaded - base).abs().max() > 0),
    }


class WeightsAtStart(TrainerCallback):
    """The embedding as training begins, after a checkpoint has been loaded."""

    embedding: torch.Tensor

    def on_train_begin(self, *_args: Any, model: torch.nn.Module, **_kwargs: Any) -> None:
        self.embedding = next(w for name, w in model.state_dict().items() if "embed_tokens" in name).cpu()


def resumed_run() -> dict[str, Any]:
    """A checkpoint after one step, and what a run resumed from it begins with."""
    args = arguments(save_strategy="steps", save_steps=1, max_steps=1, **GEMMA3)
    MendedTrainer(model=one_layer(), args=args, train_dataset=rows()).train()
    checkpoint = Path(args.output_dir) / "checkpoint-1"
    saved = torch.load(checkpoint / "pytorch_model.bin", weights_only=True)
    key = next(name for name in saved if "embed_tokens" in name)
    head = next(name for name in saved if "lm_head" in name)

    start = WeightsAtStart()
    MendedTrainer(model=one_layer(), args=args, train_dataset=rows(), callbacks=[start]).train(str(checkpoint))
    base = one_layer().model.embed_tokens.weight
    return {
        "files": sorted(path.name for path in checkpoint.iterdir()),
        "key": key,
        "tied": torch.equal(saved[key], saved[head]),
        "saved_is_base": torch.equal(saved[key], base),
        "resumed_is_base": torch.equal(start.embedding, base),
    }


OBSERVATIONS = (
    accelerator_before_the_first_annotation,
    optimizer_creation,
    global_batch,
    output_of_gemma4,
    output_of_the_fused_head,
    pinned_batches,
    adapter_of_a_wrapped_model,
    resumed_run,
)
