"""Orbax LoRA checkpoint + Hugging Face base -> merged safetensors or PEFT adapter."""
