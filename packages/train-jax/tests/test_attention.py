"""Attention over packed rows, against attention written out with a (T, T) mask."""

import re
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eight_devices import on_eight_devices, run_on_eight_devices
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from portlab_jax.attention import attend, blockwise, cudnn, splash

T, BLOCK, HEADS, SIZE, SCALE = 32, 8, 4, 16, 0.3


class Rows(NamedTuple):
    positions: np.ndarray
    ends: np.ndarray


class Blocks(NamedTuple):
    full: np.ndarray
    sliding: np.ndarray


def forest(trees, length=T):
    """Ends and positions of nested nodes (tokens, children) laid out depth first, padded to a length."""
    ends, positions = np.zeros(length, np.int32), np.zeros(length, np.int32)

    def place(node, at, depth):
        tokens, children = node
        start, at = at, at + tokens
        positions[start:at] = depth + np.arange(tokens)
        own = slice(start, at)
        for child in children:
            at = place(child, at, depth + tokens)
        ends[own] = at
        return at

    at = 0
    for tree in trees:
        at = place(tree, at, 0)
    return ends, positions


def leaf(tokens):
    return (tokens, [])


CASES = {
    "prefix and suffixes": [[(10, [leaf(5), leaf(4), leaf(7)])], [(3, [leaf(20), leaf(9)])]],
    "deeper trees": [[(4, [(3, [leaf(2), (1, [leaf(6), leaf(3)])]), leaf(9)])], [leaf(2), (5, [leaf(1), leaf(11)])]],
    "segments": [[leaf(9), leaf(1), leaf(17)], [leaf(16), leaf(16)]],
    "one row": [[leaf(32)], [leaf(21)]],
    "padding only": [[leaf(8)], []],
}


def random_tree(generator, tokens):
    """A node over at most `tokens` tokens."""
    own = int(generator.integers(1, tokens + 1))
    children, left = [], tokens - own
    while left > 0 and generator.random() < 0.8:
        part = int(generator.integers(1, left + 1))
        children.append(random_tree(generator, part))
        left -= part
    return own, children


ALL_ROWS = [row for case in CASES.values() for row in case]
for generator in map(np.random.default_rng, range(6)):
    ALL_ROWS.append([random_tree(generator, T // 2), random_tree(generator, T // 2)])


def visible(ends, positions, window=None):
    """(R, T, T): token i sees token j."""
    i, j = np.arange(ends.shape[-1])[:, None], np.arange(ends.shape[-1])[None, :]
    mask = (j <= i) & (i < ends[..., None, :])
    if window is not None:
        mask &= positions[..., :, None] - positions[..., None, :] < window
    return mask


def block_table(mask, block):
    """(..., Q, W) of the key blocks that hold something visible, ascending, -1 behind them."""
    *lead, length, _ = mask.shape
    count = length // block
    seen = mask.reshape(*lead, count, block, count, block).any((-3, -1))
    width = max(1, seen.sum(-1).max())
    order = np.argsort(~seen, axis=-1, kind="stable")[..., :width]
    return np.where(np.take_along_axis(seen, order, -1), order, -1).astype(np.int32)


def packed(case, window=None, *, groups=1, block=BLOCK, length=T):
    ends, positions = (np.stack(x) for x in zip(*(forest(trees, length) for trees in case), strict=True))
    ends, positions = (np.broadcast_to(x, (groups, *x.shape)) for x in (ends, positions))
    tables = [block_table(visible(ends, positions, w), block) for w in (None, window)]
    return Rows(jnp.asarray(positions), jnp.asarray(ends)), Blocks(*map(jnp.asarray, tables))


def tensors(rows, *, kv_heads, heads=HEADS, size=SIZE, dtype=jnp.float32, seed=0):
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = [(*rows.ends.shape, n, size) for n in (heads, kv_heads, kv_heads, heads)]
    q, k, v, d_out = (jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True))
    return (q, k, v), d_out * (rows.ends > 0)[..., None, None]


def written_out(q, k, v, rows, window, scale):
    repeat = q.shape[3] // k.shape[3]
    k, v = (jnp.repeat(x, repeat, axis=3) for x in (k, v))
    mask = visible(rows.ends, rows.positions, window)[:, :, None]
    scores = jnp.where(mask, jnp.einsum("grihd,grjhd->grhij", q, k) * scale, -1e30)
    return jnp.einsum("grhij,grjhd->grihd", jax.nn.softmax(scores, axis=-1), v)


def value_and_gradients(attention, qkv, d_out):
    out, pullback = jax.vjp(attention, *qkv)
    return out, *pullback(d_out)


def against_written_out(attention, rows, qkv, d_out, window):
    """Output and gradients of an attention, and those of the mask written out."""

    def run(*qkv):
        return (
            value_and_gradients(attention, qkv, d_out),
            value_and_gradients(lambda *x: written_out(*x, rows, window, SCALE), qkv, d_out),
        )

    return jax.jit(run)(*qkv)


def both(rows, blocks, qkv, d_out, window, implementation="xla"):
    def attention(q, k, v):
        return attend(q, k, v, rows, blocks, window=window, scale=SCALE, implementation=implementation)

    return against_written_out(attention, rows, qkv, d_out, window)


def assert_equal(found, expected, rows, rtol=1e-5):
    real = (rows.ends > 0)[..., None, None]
    for name, a, b in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        a, b = (np.where(real, np.asarray(x, np.float32), 0) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * np.abs(b).max(), err_msg=name)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 3, 12, 64])
def test_values_and_gradients_are_those_of_the_mask_written_out(window, kv_heads):
    rows, blocks = packed(ALL_ROWS, window)
    qkv, d_out = tensors(rows, kv_heads=kv_heads)
    assert_equal(*both(rows, blocks, qkv, d_out, window), rows)


@pytest.mark.parametrize("step_bytes", [1, 40_000, 1 << 30])
def test_the_size_of_a_step_does_not_change_the_result(step_bytes, monkeypatch):
    monkeypatch.setattr(blockwise, "KEYS_AT_ONCE", 16)
    monkeypatch.setitem(blockwise.STEP_BYTES, "cpu", step_bytes)
    rows, blocks = packed(ALL_ROWS)
    qkv, d_out = tensors(rows, kv_heads=2)
    assert_equal(*both(rows, blocks, qkv, d_out, None), rows)


def test_padding_attends_to_nothing_and_passes_no_gradient():
    rows, blocks = packed([[leaf(8)], []])
    qkv, _ = tensors(rows, kv_heads=2)
    out, *gradients = value_and_gradients(
        lambda *x: attend(*x, rows, blocks, window=None, scale=1.0), qkv, jnp.ones_like(qkv[0])
    )
    for x in (out, *gradients):
        np.testing.assert_array_equal(np.asarray(x)[:, 0, 8:], 0)
        np.testing.assert_array_equal(np.asarray(x)[:, 1], 0)


def test_bfloat16_accumulates_in_float32():
    rows, blocks = packed(ALL_ROWS)
    qkv, d_out = tensors(rows, kv_heads=2, dtype=jnp.bfloat16)
    found, _ = both(rows, blocks, qkv, d_out, None)
    exact = value_and_gradients(
        lambda *x: written_out(*x, rows, None, SCALE), [x.astype(jnp.float32) for x in qkv], d_out.astype(jnp.float32)
    )
    assert [x.dtype for x in found] == [jnp.bfloat16] * 4
    assert_equal(found, exact, rows, rtol=2**-7)


def test_memory_does_not_grow_with_the_square_of_the_row():
    def temporaries(length):
        rows, blocks = packed([[leaf(length)]], block=64, length=length)
        qkv, d_out = tensors(rows, kv_heads=1)
        both = jax.jit(
            lambda *qkv: value_and_gradients(lambda *x: attend(*x, rows, blocks, window=None, scale=1.0), qkv, d_out)
        )
        return both.lower(*qkv).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(2048) < 2.5 * temporaries(1024)


# Splash works on blocks of 128 tokens, so that its cases are longer: segments, one row, padding; then trees.
PLAIN = [[leaf(100), leaf(1), leaf(140)], [leaf(256)], [leaf(130)]]
TREES = [[(100, [leaf(50), (20, [leaf(10), leaf(30)])])], [(3, [leaf(200), leaf(9)])], [leaf(128), leaf(128)]]


@pytest.fixture
def on_cpu(monkeypatch):
    """Run Pallas kernels for TPU in their interpreter."""
    interpreted = partial(splash.kernels.make_splash_mha, interpret=True)
    monkeypatch.setattr(splash.kernels, "make_splash_mha", interpreted)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("window", "kv_heads", "size"), [(None, 1, 256), (40, 2, 512), (300, 4, 128)])
@pytest.mark.parametrize(("implementation", "case"), [("splash", PLAIN), ("splash_tree", TREES)])
def test_splash_agrees(implementation, case, window, kv_heads, size):
    rows, blocks = packed(case, window, block=128, length=256)
    qkv, d_out = tensors(rows, kv_heads=kv_heads, size=size)
    assert_equal(*both(rows, blocks, qkv, d_out, window, implementation), rows)


@pytest.mark.parametrize("window", [None, 3, 12, 64])
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize(
    ("arguments", "case"),
    [(cudnn.segment_arguments, [[leaf(32)], [leaf(21)], [leaf(1)]]), (cudnn.mask_arguments, ALL_ROWS)],
)
def test_what_cudnn_is_told_means_the_same(arguments, case, kv_heads, window):
    rows, _ = packed(case, window)
    qkv, d_out = tensors(rows, kv_heads=kv_heads)

    def as_told(q, k, v):
        how = arguments(blockwise.Visible(rows.ends[0], rows.positions[0], None), window)
        return jax.nn.dot_product_attention(q[0], k[0], v[0], scale=SCALE, implementation="xla", **how)[None]

    assert_equal(*against_written_out(as_told, rows, qkv, d_out, window), rows)


MESHES = {
    "groups and heads": ((2, 2, 2), 4, 2),
    "one key/value head, groups only": ((4, 2, 1), 4, 1),
    "heads that do not divide": ((2, 2, 2), 3, 1),
}


@on_eight_devices
@pytest.mark.parametrize("case", MESHES)
def test_mesh_keeps_the_sharding_and_communicates_nothing(case):
    sizes, heads, kv_heads = MESHES[case]
    rows, blocks = packed(ALL_ROWS[:4], 12, groups=sizes[0] * sizes[1])
    qkv, d_out = tensors(rows, kv_heads=kv_heads, heads=heads)
    expected = value_and_gradients(lambda *x: written_out(*x, rows, 12, SCALE), qkv, d_out)

    def run(q, k, v, d_out, rows, blocks):
        return value_and_gradients(lambda *x: attend(*x, rows, blocks, window=12, scale=SCALE), (q, k, v), d_out)

    mesh = jax.make_mesh(sizes, ("data", "fsdp", "tp"), axis_types=(AxisType.Explicit,) * 3)
    divide = kv_heads % sizes[2] == 0
    by_head = PartitionSpec(("data", "fsdp"), None, None, "tp" if divide else None, None)
    with jax.set_mesh(mesh):
        tensors_on_mesh = jax.device_put((*qkv, d_out), NamedSharding(mesh, by_head))
        rows_on_mesh = jax.device_put((rows, blocks), NamedSharding(mesh, PartitionSpec(("data", "fsdp"))))
        compiled = jax.jit(run).lower(*tensors_on_mesh, *rows_on_mesh).compile()
        found = compiled(*tensors_on_mesh, *rows_on_mesh)
    assert [x.sharding.spec for x in found] == [by_head] * 4
    collectives = re.findall(r"(all-\w+|collective-permute|reduce-scatter)\(", compiled.as_text())
    assert collectives == [] or not divide
    assert_equal(found, expected, rows)


def test_on_a_mesh():
    assert f"{len(MESHES)} passed" in run_on_eight_devices(__file__, "--noconftest", "-k", "test_mesh")
