"""transformers' models with PEFT's adapters, as every trainer that is written in PyTorch has them."""
