"""JAX LoRA trainer for Gemma."""
