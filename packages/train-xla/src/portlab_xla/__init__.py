"""TRL + PEFT trainer for Gemma on PyTorch/XLA, CUDA or CPU."""
