"""`python -m portlab_serve`."""

from portlab_serve.cli import entry

entry()
