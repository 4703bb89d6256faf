# Follows older scripts: TrainingArguments with fp16 and 8-bit weights, a data class for settings, a collator for the mask.
from dataclasses import dataclass, field

import torch
from datasets import load_dataset
from peft import LoraConfig, prepare_model_for_kbit_training
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    EarlyStoppingCallback,
    TrainingArguments,
)
from trl import DataCollatorForCompletionOnlyLM, SFTTrainer


@dataclass
class Config:
    model_id: str = "google/gemma-3-27b-it"
    rank: int = field(default=64)
    learning_rate: float = 1e-4


config = Config()
tokenizer = AutoTokenizer.from_pretrained(config.model_id)
tokenizer.padding_side = "right"
model = AutoModelForCausalLM.from_pretrained(
    config.model_id, quantization_config=BitsAndBytesConfig(load_in_8bit=True), torch_dtype=torch.float16
)
model = prepare_model_for_kbit_training(model)
arguments = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=2,
    gradient_accumulation_steps=8,
    learning_rate=config.learning_rate,
    max_steps=400,
    num_train_epochs=1,
    warmup_steps=0.05,
    fp16=True,
    group_by_length=True,
    gradient_checkpointing=True,
    lr_scheduler_type="cosine_with_min_lr",
    lr_scheduler_kwargs={"min_lr": 1e-5},
    evaluation_strategy="steps",
    eval_steps=50,
    save_steps=50,
    load_best_model_at_end=True,
    metric_for_best_model="eval_loss",
    max_grad_norm=0.0,
    report_to=["wandb", "tensorboard"],
)
trainer = SFTTrainer(
    model=model,
    args=arguments,
    train_dataset=load_dataset("json", data_files="train.jsonl")["train"],
    eval_dataset=load_dataset("json", data_files="train.jsonl")["test"],
    peft_config=LoraConfig(r=config.rank, lora_alpha=16, use_rslora=True, target_modules="all-linear"),
    data_collator=DataCollatorForCompletionOnlyLM("<start_of_turn>model\n", tokenizer=tokenizer),
    callbacks=[EarlyStoppingCallback(early_stopping_patience=3)],
    max_seq_length=1024,
)
trainer.train()
