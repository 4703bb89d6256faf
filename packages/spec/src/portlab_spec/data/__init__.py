"""Data sets as lists of `Conversation`: `load_dataset` takes a built-in name or a file."""

from portlab_spec.data.rows import load_dataset

__all__ = ["load_dataset"]
