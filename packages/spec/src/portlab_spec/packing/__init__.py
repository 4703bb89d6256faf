"""From rows of tokens to batches of few static shapes.

The rows of a step are dealt to micro-batches and groups; those of one part form radix tries (`trie`), what they start
with in common is held once, and the tries are packed into rows (`dealing`, `batch`). The shapes are planned over the
whole run, so that the step compiles once for each (`planning`). All in numpy, for
any framework to move to its devices.
"""

from portlab_spec.packing.batch import Batch, Blocks, Layout, Packing, Rows, pack_batch
from portlab_spec.packing.order import BatchOrder
from portlab_spec.packing.planning import Plan, plan

__all__ = ["Batch", "BatchOrder", "Blocks", "Layout", "Packing", "Plan", "Rows", "pack_batch", "plan"]
