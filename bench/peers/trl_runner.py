"""Train a work folder's batches with TRL's SFTTrainer and PEFT.

    python trl_runner.py FOLDER

What TRL is allowed: its own trainer, fused LM head and collator, rows that are already tokens, no gradient
checkpointing (it would be slower), the same micro-batches as the others, and on a CPU padding-free micro-batches:
the rows of one are laid end to end, which transformers' masks for PyTorch's attention keep apart. The loss shows that
they do. Packing of whole data sets would save no more than that and would change which rows form a step. On a GPU its
head scores the supervised positions alone, on a CPU all of them; that is its own choice.
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from exchange import Job, Measured, Settings, peak_resident_bytes, read_job
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer


def adapted_model(job: Job) -> PeftModel:
    """The base with LoRA layers that hold the given initial values."""
    settings = job.settings
    base = AutoModelForCausalLM.from_pretrained(settings.model, dtype=getattr(torch, settings.dtype))
    lora = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=list(settings.targets),
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, lora)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in job.adapter.items():
            module, _, which = name.rpartition(".")
            leaf = parameters[f"base_model.model.model.{module}.lora_{which.upper()}.default.weight"]
            leaf.copy_(torch.from_numpy(value.T.copy()))
    return model


def dataset(job: Job) -> Dataset:
    """All rows in the order of the steps, labels -100 where nothing is to be learnt."""
    rows = [row for batch in job.batches for row in batch]
    labels = [[t if flag else -100 for t, flag in zip(row.ids, row.loss, strict=True)] for row in rows]
    return Dataset.from_dict({"input_ids": [row.ids for row in rows], "labels": labels})


def arguments(settings: Settings, batch_size: int, steps: int, folder: str) -> SFTConfig:
    """TRL's settings for one run."""
    cpu, rows = settings.device == "cpu", settings.micro_batch["trl"]
    return SFTConfig(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=batch_size // rows,
        train_sampling_strategy="sequential",
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=None,
        # With a GPU all rows have one length, and a mask would only keep PyTorch from its fastest kernel.
        padding_free=cpu and rows > 1,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="constant",
        warmup_steps=0,
        adam_beta1=settings.b1,
        adam_beta2=settings.b2,
        adam_epsilon=settings.eps,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.clip_norm,
        bf16=settings.dtype == "bfloat16",
        gradient_checkpointing=False,
        use_cpu=cpu,
        dataloader_pin_memory=not cpu,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


class StepTimes(TrainerCallback):
    """Times the steps."""

    def __init__(self, measured: Measured) -> None:
        self.measured = measured
        self.started = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.measured.record_step(time.perf_counter() - self.started)


def main(folder: Path) -> None:
    """Train and leave trl.json in the folder."""
    job = read_job(folder)
    measured = Measured()
    # Rows are tokens already: the trainer asks its tokenizer for no more than the padding token.
    vocabulary = {"<pad>": 0, "<eos>": 1, "<bos>": 2}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary)), pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
    )
    with tempfile.TemporaryDirectory() as output:
        trainer = SFTTrainer(
            adapted_model(job),
            args=arguments(job.settings, len(job.batches[0]), len(job.batches), output),
            train_dataset=dataset(job),
            processing_class=tokenizer,
            callbacks=[StepTimes(measured)],
        )
        trainer.train()
    measured.losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    on_device = job.settings.device == "cuda"
    measured.peak_memory_bytes = torch.cuda.max_memory_allocated() if on_device else peak_resident_bytes()
    measured.write(folder, "trl", "trl", "peft", "transformers", "torch")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
