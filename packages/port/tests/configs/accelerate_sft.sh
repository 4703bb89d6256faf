#!/bin/bash
# Follows the commands in TRL's documentation: its sft.py under accelerate with DeepSpeed, on a node of eight GPUs.
export NCCL_DEBUG=WARN
MODEL=google/gemma-4-31B-it
LR=1e-4
accelerate launch --config_file accelerate/zero3.yaml --num_processes 8 --mixed_precision bf16 \
    trl/scripts/sft.py \
    --model_name_or_path ${MODEL} \
    --dataset_name example/tool-calls \
    --use_peft --lora_r 32 --lora_alpha 64 --lora_target_modules q_proj k_proj v_proj o_proj \
    --learning_rate $LR --lr_scheduler_type cosine --warmup_steps 10 \
    --max_steps 500 --per_device_train_batch_size 2 --gradient_accumulation_steps 2 \
    --gradient_checkpointing --max_length 4096 --assistant_only_loss \
    --optim paged_adamw_8bit --attn_implementation sdpa --use_liger_kernel \
    --eval_strategy steps --eval_steps 50 --save_steps 50 --logging_steps 1 --dataloader_num_workers=4 \
    --report_to trackio --output_dir out/gemma4-tools --push_to_hub
