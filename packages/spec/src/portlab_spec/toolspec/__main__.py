"""`python -m portlab_spec.toolspec`."""

from portlab_spec.toolspec.cli import entry

entry()
