# Follows Unsloth's FunctionGemma notebooks: mobile actions, an evaluation every few steps, 16-bit LoRA.
import torch
from unsloth import FastLanguageModel
from unsloth.chat_templates import train_on_responses_only
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

max_seq_length = 4096
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name="unsloth/functiongemma-270m-it",
    max_seq_length=max_seq_length,
    load_in_4bit=False,
    load_in_8bit=False,
    load_in_16bit=True,
    full_finetuning=False,
    token="hf_not_a_real_token",
)
model = FastLanguageModel.get_peft_model(model, r=16, lora_alpha=16, random_state=3407)
dataset = load_dataset("google/mobile-actions", split="train")
dataset = dataset.map(lambda row: {"text": tokenizer.apply_chat_template(row["messages"], tools=row["tools"])})
split_dataset = dataset.train_test_split(test_size=50, shuffle=True, seed=3407)

trainer = SFTTrainer(
    model=model,
    tokenizer=tokenizer,
    train_dataset=split_dataset["train"],
    eval_dataset=split_dataset["test"],
    args=SFTConfig(
        dataset_text_field="text",
        warmup_steps=5,
        max_steps=100,
        eval_steps=2,
        eval_strategy="steps",
        learning_rate=2e-4,
        logging_steps=1,
        weight_decay=0.001,
        lr_scheduler_type="linear",
        seed=3407,
        report_to="none",
    ),
)
trainer = train_on_responses_only(trainer)
trainer.train()
