"""`python -m portlab_torchax` is `train-torchax`."""

from portlab_torchax.cli import entry

entry()
