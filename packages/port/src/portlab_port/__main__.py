"""`python -m portlab_port` is `portlab-port`."""

from portlab_port.cli import entry

entry()
