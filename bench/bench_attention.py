"""Attention over packed rows on this machine: block-sparse against a mask written out.

    python bench/bench_attention.py     prints the table and writes bench/results/bench_attention.json

Output and gradients together, in f32, with the heads of Gemma 3 270M (4 query heads on one key/value head of size 256).
Rows: a tool-call prompt of 282 tokens with 32 suffixes of 30, and one causal row.
Memory is what the compiled program needs beyond its arguments.
"""

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from portlab_jax.attention import attend
from portlab_spec.packing import Blocks, Rows
from portlab_spec.packing.blocks import table, visible_blocks, widest
from result_file import write_result

HEADS, KV_HEADS, HEAD_DIM, SCALE = 4, 1, 256, 1 / 16
PREFIX, SUFFIX, SUFFIXES = 282, 30, 32
LENGTH = 1280
BLOCKS = (32, 64, 128)
REPEATS = 9
WRITTEN_OUT = "mask written out"


def tool_call_row() -> Rows:
    """One prefix shared by all suffixes, then padding."""
    ends, positions = np.zeros(LENGTH, np.int32), np.zeros(LENGTH, np.int32)
    real = PREFIX + SUFFIX * SUFFIXES
    ends[:PREFIX], positions[:PREFIX] = real, np.arange(PREFIX)
    starts = np.arange(PREFIX, real, SUFFIX)
    ends[PREFIX:real] = np.repeat(starts + SUFFIX, SUFFIX)
    positions[PREFIX:real] = np.tile(PREFIX + np.arange(SUFFIX), SUFFIXES)
    return Rows(*(jnp.asarray(x)[None, None] for x in (np.zeros(LENGTH, np.int32), positions, ends)))


def causal_row() -> Rows:
    """One segment."""
    index = np.arange(LENGTH, dtype=np.int32)
    return Rows(*(jnp.asarray(x)[None, None] for x in (index, index, np.full(LENGTH, LENGTH, np.int32))))


def block_sparse(rows: Rows, block: int) -> Callable[..., jax.Array]:
    """Our attention over blocks of a size."""
    pairs = visible_blocks(np.asarray(rows.ends[0, 0]), np.asarray(rows.positions[0, 0]), block, None)
    listed = jnp.asarray(table(pairs, LENGTH // block, widest(pairs)))[None, None]
    return lambda q, k, v: attend(q, k, v, rows, Blocks(listed, listed), window=None, scale=SCALE)


def written_out(rows: Rows) -> Callable[..., jax.Array]:
    """JAX's own attention with a (T, T) mask."""
    index = jnp.arange(LENGTH)
    mask = (index[None, :] <= index[:, None]) & (index[:, None] < rows.ends[0, 0][None, :])
    return lambda q, k, v: jax.nn.dot_product_attention(q[0], k[0], v[0], mask=mask[None, None], scale=SCALE)[None]


def measure(attention: Callable[..., jax.Array], rows: Rows) -> dict[str, float]:
    """Milliseconds (median) and MiB of one output with its gradients."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(1, 1, LENGTH, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    q, k, v, d_out = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))

    def step(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array) -> tuple[jax.Array, ...]:
        out, pullback = jax.vjp(attention, q, k, v)
        return out, *pullback(d_out * (rows.ends > 0)[..., None, None])

    compiled = jax.jit(step).lower(q, k, v, d_out).compile()
    jax.block_until_ready(compiled(q, k, v, d_out))
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(compiled(q, k, v, d_out))
        seconds.append(time.perf_counter() - start)
    memory = compiled.memory_analysis().temp_size_in_bytes
    return {"milliseconds": 1e3 * statistics.median(seconds), "temporaries_mib": memory / 2**20}


def main() -> None:
    """Measure every contender on both rows."""
    figures, ratios = {}, {}
    for name, rows in (("tool-call tree", tool_call_row()), ("causal row", causal_row())):
        figures[f"{name}, {WRITTEN_OUT}"] = reference = measure(written_out(rows), rows)
        for block in BLOCKS:
            figures[f"{name}, blocks of {block}"] = ours = measure(block_sparse(rows, block), rows)
            ratios[f"{name}, blocks of {block}: times faster"] = reference["milliseconds"] / ours["milliseconds"]
    write_result("bench_attention", ("jax", "jaxlib", "numpy"), figures, ratios)
    print("| contender | ms | temporaries, MiB |")
    print("|---|---:|---:|")
    for name, figure in figures.items():
        print(f"| {name} | {figure['milliseconds']:.1f} | {figure['temporaries_mib']:.0f} |")


if __name__ == "__main__":
    main()
