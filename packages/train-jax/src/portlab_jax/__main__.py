"""`python -m portlab_jax` is `train-jax`."""

from portlab_jax.cli import entry

entry()
