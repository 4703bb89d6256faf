"""Attention over packed rows: one interface, and the fastest implementation that is right for the rows at hand."""

from portlab_jax.attention.attend import attend
from portlab_jax.attention.blockwise import RESIDUALS
from portlab_jax.attention.choice import Choice, choose

__all__ = ["RESIDUALS", "Choice", "attend", "choose"]
