# Follows the kind of TRL script that runs on GPUs and TPUs alike: FSDP keys in a dictionary, options by argparse.
import argparse

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-id", default="google/functiongemma-270m-it")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--num-epochs", type=int, default=6)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--max-length", type=int, default=512)
    options = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(
        options.model_id, use_cache=False, dtype=torch.bfloat16, low_cpu_mem_usage=True, device_map=None
    )
    dataset = load_dataset("json", data_files="fitness.jsonl")
    fsdp_arguments = {
        "fsdp": "full_shard",
        "fsdp_config": {"transformer_layer_cls_to_wrap": ["Gemma3DecoderLayer"], "xla": True, "xla_fsdp_v2": True},
    }
    lora = LoraConfig(
        r=32,
        lora_alpha=2 * 32,
        lora_dropout=0.05,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        task_type="CAUSAL_LM",
    )
    training = SFTConfig(
        pad_to_multiple_of=options.max_length,
        dataloader_drop_last=True,
        gradient_checkpointing=False,
        max_length=options.max_length,
        per_device_train_batch_size=options.batch_size,
        num_train_epochs=options.num_epochs,
        learning_rate=options.learning_rate,
        optim="adafactor",
        lr_scheduler_type="constant",
        output_dir=f"out/{options.model_id}",
        logging_steps=1,
        eval_strategy="epoch",
        report_to="trackio",
        dataset_text_field="text",
        packing=False,
        bf16=True,
        **fsdp_arguments,
    )
    trainer = SFTTrainer(
        model=model, train_dataset=dataset["train"], eval_dataset=dataset["test"], args=training, peft_config=lora
    )
    trainer.train()


if __name__ == "__main__":
    main()
