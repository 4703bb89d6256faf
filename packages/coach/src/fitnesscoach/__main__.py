"""`python -m fitnesscoach`."""

from fitnesscoach.cli import entry

entry()
