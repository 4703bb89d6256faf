"""`python -m portlab_xla` is `train-xla`."""

from portlab_xla.cli import entry

entry()
