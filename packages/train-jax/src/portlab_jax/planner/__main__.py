"""`python -m portlab_jax.planner` is `plan-tpu`."""

from portlab_jax.planner.cli import entry

entry()
