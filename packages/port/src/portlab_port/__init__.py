"""GPU fine-tuning recipes of other trainers, as Portlab recipes."""
