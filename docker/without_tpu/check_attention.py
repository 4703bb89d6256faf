"""In the image: is the plain attention what the kernel's own reference computes? Prints the largest difference."""

import jax
import jax.numpy as jnp
import numpy as np
import tpu_inference.kernels.ragged_paged_attention.v3.kernel as kernel

CASES = ((4, 1, 256, None), (4, 1, 256, 5), (8, 4, 128, 7), (2, 2, 96, None))  # heads, of keys, their size, window
QUERIES, LENGTHS, SEQUENCES = [1, 1, 5, 9], [7, 20, 5, 12], 6  # two decode, two prefill; two places are empty
PAGE, PAGES, TOKENS = 8, 4, 24


def difference(heads: int, groups: int, dim: int, window: int | None, rng: np.random.Generator) -> float:
    """Between outputs, and between caches, on random values in float32."""
    q, k, v = (jnp.asarray(rng.standard_normal((TOKENS, n, dim)), jnp.float32) for n in (heads, groups, groups))
    total = SEQUENCES * PAGES + 2
    cache = rng.standard_normal(kernel.get_kv_cache_shape(total, PAGE, groups, dim, jnp.float32))
    empty = SEQUENCES - len(QUERIES)
    arguments = (
        q, k, v, jnp.asarray(cache, jnp.float32),
        jnp.asarray(LENGTHS + [0] * empty, jnp.int32),
        jnp.asarray(rng.permutation(total)[: SEQUENCES * PAGES], jnp.int32),
        jnp.asarray([0, *np.cumsum(QUERIES), *[1] * empty], jnp.int32),
        jnp.asarray([2, 2, len(QUERIES)], jnp.int32),
    )  # fmt: skip
    options = {"sm_scale": 0.1, "sliding_window": window}
    expected = kernel.ref_ragged_paged_attention(*arguments, **options)
    found = jax.jit(lambda *a: kernel.ragged_paged_attention(*a, **options))(*arguments)
    pairs = ((expected[0], found[0][: sum(QUERIES)]), (expected[1], found[1]))
    return max(float(jnp.abs(a - b).max()) for a, b in pairs)


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    print(max(difference(*case, rng) for case in CASES))
