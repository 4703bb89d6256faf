"""Accelerators and the slices that Google Cloud rents: what the published sheets say, each figure once."""

from portlab_spec.hardware.chips import CHIPS, Chip, find_chip
from portlab_spec.hardware.slices import Slice, parse_slice, standard_slices

__all__ = ["CHIPS", "Chip", "Slice", "find_chip", "parse_slice", "standard_slices"]
