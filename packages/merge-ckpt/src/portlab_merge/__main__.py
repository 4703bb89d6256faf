"""`python -m portlab_merge` is `merge-ckpt`."""

from portlab_merge.cli import entry

entry()
