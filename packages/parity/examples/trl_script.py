"""TRL's SFTTrainer as it is, in the five functions by which `portlab-parity` runs a script.

    portlab-parity --recipe functiongemma-fitness --backends jax,packages/parity/examples/trl_script.py

Model, collator, loss, optimiser and clip are the trainer's own. Only the learning rates are the recipe's, since
transformers' schedules start their warm-up at zero: `portlab-parity` would name that, and stop there.
"""

import tempfile
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

trainer: SFTTrainer


def load(model: str, recipe: Any) -> tuple[Any, Any]:
    """A trainer around the model with its adapter; the rows that it would train on are never used."""
    global trainer
    if recipe.lora.train_control_rows:
        raise SystemExit("error: TRL's fused head does not go with trained rows: --set lora.train_control_rows=false")
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    settings = recipe.optimizer
    arguments = SFTConfig(
        output_dir=tempfile.mkdtemp(),
        max_length=recipe.max_length,
        learning_rate=1.0,
        adam_beta1=settings.b1,
        adam_beta2=settings.b2,
        adam_epsilon=settings.eps,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.clip_norm,
        optim="adamw_torch",
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        dataset_kwargs={"skip_prepare_dataset": True},
        report_to="none",
    )
    trainer = SFTTrainer(
        PeftModel.from_pretrained(base, recipe.lora.start_from, is_trainable=True),
        args=arguments,
        train_dataset=Dataset.from_dict({"input_ids": [[2, 1]], "labels": [[-100, 1]]}),
        processing_class=tokenizer(),
    )
    trained: Any = trainer.model
    return trained.train(), None


def tokenizer() -> PreTrainedTokenizerFast:
    """What TRL asks its tokenizer for where rows are tokens already: the padding token."""
    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1, "<bos>": 2}))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>")


def batch(rows: list[Any], tokenizer: Any) -> dict[str, torch.Tensor]:
    """TRL's own collator."""
    examples = [
        {"input_ids": row.ids, "labels": [i if held else -100 for i, held in zip(row.ids, row.supervised, strict=True)]}
        for row in rows
    ]
    found: dict[str, torch.Tensor] = dict(trainer.data_collator(examples))
    return found


def loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """TRL's own loss."""
    count = (batch["labels"][:, 1:] != -100).sum()
    found: torch.Tensor = trainer.compute_loss(model, dict(batch), num_items_in_batch=count)
    return found


def optimizer(model: Any, recipe: Any) -> tuple[Any, Any]:
    """The trainer's optimiser, with the recipe's rates."""
    from portlab_spec.schedule import learning_rates

    found: Any = trainer.create_optimizer()
    rates = learning_rates(recipe.optimizer, recipe.steps)
    return found, torch.optim.lr_scheduler.LambdaLR(found, lambda step: float(rates[min(step, len(rates) - 1)]))


def clip(model: Any, recipe: Any) -> torch.Tensor:
    """The trainer's clip."""
    found: Any = trainer.accelerator.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
    return found
