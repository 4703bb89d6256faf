"""JAX LoRA trainer for Gemma."""

TRAINER = "train-jax"  # as messages, checkpoints and packages name it
