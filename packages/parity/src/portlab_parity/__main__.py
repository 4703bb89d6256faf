"""`python -m portlab_parity`."""

from portlab_parity.cli import entry

entry()
