"""FLOPs of attention kernels, which a compiled program calls without saying what they compute.

Splash attention (Pallas) states no cost. What it sees stands in its name (`portlab_jax.attention.attend.scope_name`),
its shapes in its operands. The forward kernel takes two products per pair of tokens, the backward pass has a kernel
for the queries' gradient with three and one for keys and values with four, since both compute the scores anew.
"""

import re
from collections.abc import Sequence

from portlab_jax.attention.splash import computed_pairs
from portlab_jax.planner.hlo import Array

PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}

_NAME = re.compile(r"attend_(splash|splash_tree)_(\d+|full)\b.*splash_m[hq]a_(fwd|dq|dkv)")


def kernel_flops(op_name: str, operands: Sequence[Array]) -> float | None:
    """FLOPs of one run of a kernel; None for a kernel that is not known.

    Rows of trees are counted as if every token saw all before it: what their masks leave out is data.

    Args:
        op_name: where JAX put the call.
        operands: among them the queries (..., heads, tokens, head size), the largest.
    """
    found = _NAME.search(op_name)
    if found is None:
        return None
    _, window, role = found.groups()
    queries = max(operands, key=lambda array: array.size)
    length = queries.dims[-2]
    pairs = computed_pairs(length, None if window == "full" else int(window))
    return 2.0 * PRODUCTS[role] * (queries.size // length) * pairs
