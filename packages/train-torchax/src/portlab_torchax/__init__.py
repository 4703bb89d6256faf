"""Hugging Face models, trained by a JAX step: PyTorch's code, XLA's program."""

TRAINER = "train-torchax"
BACKEND = "torchax"
