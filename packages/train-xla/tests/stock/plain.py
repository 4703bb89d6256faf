"""What the stock stack does where nobody asked for XLA or for SPMD: torch_xla is merely installed.

Run without PJRT_DEVICE; CPU_NUM_DEVICES=4 stands for a host of four chips. The last observation ends the process.
"""

from typing import Any

import torch
import torch_xla.core.xla_model as xm
from observe import observe
from peft import LoraConfig, get_peft_model
from toys import arguments, gemma3, gemma4, rows
from transformers import Gemma4Config, Gemma4ForConditionalGeneration, Trainer, TrainingArguments
from trl import SFTConfig


def device_of_a_cpu_run() -> dict[str, Any]:
    return {"device": arguments().device.type}


def calls_of_old_tutorials() -> dict[str, Any]:
    return {name: hasattr(xm, name) for name in ("xrt_world_size", "get_ordinal", "mark_step", "xla_device")}


def default_optimizer() -> dict[str, Any]:
    return {kind.__name__: kind(output_dir="unused").optim.value for kind in (TrainingArguments, SFTConfig)}


def automatic_padding() -> dict[str, Any]:
    return {"pad_to_multiple_of": SFTConfig(output_dir="unused", pad_to_multiple_of="auto").pad_to_multiple_of}


def default_targets_of_gemma4_text() -> dict[str, Any]:
    return {"targets": get_peft_model(gemma4(), LoraConfig(task_type="CAUSAL_LM")).targeted_module_names}


def suffix_targets_of_gemma4_with_images() -> dict[str, Any]:
    with torch.device("meta"):
        model = Gemma4ForConditionalGeneration(Gemma4Config(vision_config={}, audio_config={}))
    return {"targets": get_peft_model(model, LoraConfig(target_modules=["q_proj"])).targeted_module_names}


def one_process_of_four_devices() -> dict[str, Any]:
    return {"steps": Trainer(model=gemma3(), args=arguments(max_steps=1), train_dataset=rows()).train().global_step}


if __name__ == "__main__":
    observe(
        device_of_a_cpu_run,
        calls_of_old_tutorials,
        default_optimizer,
        automatic_padding,
        default_targets_of_gemma4_text,
        suffix_targets_of_gemma4_with_images,
        one_process_of_four_devices,
    )
