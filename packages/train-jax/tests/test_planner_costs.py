"""FLOPs and HBM bytes of compiled programs: real ones of the CPU compiler, and the forms that a TPU's text has."""

import jax
import jax.numpy as jnp
import pytest

from portlab_jax.planner.costs import count
from portlab_jax.planner.hlo import parse

B, D, N, M = 8, 16, 5, 3  # rows, width, rounds of the loops


def compiled(function, *shapes):
    """Counts of a function compiled for arrays of these shapes."""
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return count(parse(jax.jit(function).lower(*arguments).compile().as_text()))


def layer(h_bd, w_dd):
    return jnp.tanh(h_bd @ w_dd), None


def scan(x_bd, ws_ndd):
    return jax.lax.scan(layer, x_bd, ws_ndd)[0]


def nested(x_bd, ws_mndd):
    return jax.lax.scan(lambda h, ws: (scan(h, ws), None), x_bd, ws_mndd)[0]


PRODUCT = 2 * B * D * D


@pytest.mark.parametrize(
    ("function", "shapes", "flops"),
    [
        (jnp.matmul, [(B, D), (D, 7)], 2 * B * D * 7),
        (lambda a, b: jnp.einsum("bqnh,bknh->bnqk", a, b), [(2, 4, 3, 8), (2, 6, 3, 8)], 2 * 2 * 3 * 4 * 6 * 8),
        (lambda a, b: jnp.einsum("abc,bcd->ad", a, b), [(4, 3, 5), (3, 5, 6)], 2 * 4 * 3 * 5 * 6),
        (scan, [(B, D), (N, D, D)], N * PRODUCT),
        (nested, [(B, D), (M, N, D, D)], M * N * PRODUCT),
        # Forward, and in the backward pass one product for each of the two operands.
        (jax.grad(lambda x, ws: scan(x, ws).sum(), argnums=(0, 1)), [(B, D), (N, D, D)], 3 * N * PRODUCT),
        # Recomputed layers run forward twice.
        (
            jax.grad(lambda x, ws: jax.lax.scan(jax.checkpoint(layer), x, ws)[0].sum(), argnums=(0, 1)),
            [(B, D), (N, D, D)],
            4 * N * PRODUCT,
        ),
    ],
    ids=["matmul", "batched", "two contracted", "scan", "nested scans", "gradient", "gradient, recomputed"],
)
def test_flops_of_products_are_the_mathematics(function, shapes, flops):
    counted = compiled(function, *shapes)
    assert counted.flops == flops
    assert counted.unknown_loops == 0


def test_a_scan_reads_each_slice_of_a_stack_once():
    few, many = (compiled(scan, (B, 64), (n, 64, 64)).bytes for n in (8, 16))
    stack = 8 * 64 * 64 * 4
    # Each slice is read from the stack, written, and read again by the product; the rest is small.
    assert many - few == pytest.approx(3 * stack, rel=0.2)


def test_a_scan_writes_each_slice_of_its_stacked_result_once():
    def stacked(x_b, ys_nb):
        return jax.lax.scan(lambda h, y: (h, h * y), x_b, ys_nb)[1]

    few, many = (compiled(stacked, (512,), (n, 512)).bytes for n in (8, 16))
    # Zeros of the whole before the loop; in it the operand's slice, the carried row and the result's slice.
    assert many - few == pytest.approx(4 * 8 * 512 * 4, rel=0.01)


def test_a_loop_whose_rounds_depend_on_data_is_reported():
    def until_small(x_bd, w_dd):
        return jax.lax.while_loop(lambda h: h.sum() > 1, lambda h: h @ w_dd, x_bd)

    counted = compiled(until_small, (B, D), (D, D))
    assert (counted.flops, counted.unknown_loops) == (PRODUCT, 1)


def tpu(*lines, before=""):
    """Counts of an entry computation in a TPU's text."""
    body = "\n".join(f"  {line}" for line in lines)
    return count(parse(f"HloModule jit_step, num_partitions=8\n{before}\nENTRY %main () -> f32[] {{\n{body}\n}}\n"))


HBM = "bf16[64,128]{1,0:T(8,128)(2,1)}"
CHIP = "bf16[64,128]{1,0:T(8,128)(2,1)S(1)}"
SIZE = 64 * 128 * 2
STACK = "bf16[9,64,128]{2,1,0:T(8,128)(2,1)}"
SLICE = "bf16[1,64,128]{2,1,0:T(8,128)(2,1)}"
INDEX = "%i = s32[]{:T(128)S(6)} parameter(9)"


@pytest.mark.parametrize(
    ("lines", "size"),
    [
        ([f"%a = {HBM} parameter(0)"], 0),
        ([f"%a = {HBM} parameter(0)", f"%n = {HBM} negate(%a)"], 2 * SIZE),
        ([f"%a = {HBM} parameter(0)", f"%n = {CHIP} negate(%a)"], SIZE),
        ([f"%a = {CHIP} parameter(0)", f"%n = {CHIP} negate(%a)"], 0),
        (
            [
                f"%a = {HBM} parameter(0)",
                f"%s = ({CHIP}, {HBM}, u32[]{{:S(2)}}) copy-start(%a)",
                f"%d = {CHIP} copy-done(%s)",
                f"%n = {CHIP} negate(%d)",
            ],
            SIZE,
        ),
        # Prefetching one layer of a stack reads that layer.
        (
            [
                f"%a = {STACK} parameter(0)",
                INDEX,
                f"%s = (({STACK}, s32[]), {SLICE[:-1]}S(1)}}, s32[]{{:S(2)}}) dynamic-slice-start(%a, %i)",
                f"%d = {SLICE[:-1]}S(1)}} dynamic-slice-done(%s)",
            ],
            SIZE,
        ),
        ([f"%a = {STACK} parameter(0)", INDEX, f"%s = {SLICE} dynamic-slice(%a, %i, %i, %i)"], 2 * SIZE),
        ([f"%a = {STACK} parameter(0)", INDEX, f"%s = {SLICE[:-1]}S(1)}} dynamic-slice(%a, %i, %i, %i)"], SIZE),
        (
            [
                f"%a = {STACK} parameter(0)",
                f"%u = {SLICE} parameter(1)",
                INDEX,
                f"%w = {STACK} dynamic-update-slice(%a, %u, %i, %i, %i)",
            ],
            2 * SIZE,
        ),
        (
            [
                f"%a = {STACK} parameter(0)",
                f"%u = {SLICE[:-1]}S(1)}} parameter(1)",
                INDEX,
                f"%w = {STACK} dynamic-update-slice(%a, %u, %i, %i, %i)",
            ],
            SIZE,
        ),
        ([f'%a = {STACK} custom-call(), custom_call_target="AllocateBuffer"'], 0),
    ],
    ids=[
        *("parameter", "in HBM", "onto the chip", "on the chip", "copy to the chip", "slice to the chip, awaited"),
        *("slice", "slice to the chip", "update", "update from the chip", "buffer without contents"),
    ],
)
def test_hbm_bytes_of_an_instruction(lines, size):
    assert tpu(*lines).bytes == size


INSIDE_SLICE = f"""
%sliced (p: bf16[9,64,128], i: s32[]) -> bf16[64,128] {{
  %p = {STACK} parameter(0)
  %i = s32[] parameter(1)
  %s = {SLICE} dynamic-slice(%p, %i, %i, %i)
  ROOT %b = {HBM} bitcast(%s)
}}
"""
INSIDE_PRODUCT = f"""
{INSIDE_SLICE}
%product (x: bf16[32,64], w: bf16[9,64,128], i: s32[]) -> bf16[32,128] {{
  %x = bf16[32,64]{{1,0:T(8,128)(2,1)}} parameter(0)
  %w = {STACK} parameter(1)
  %i = s32[] parameter(2)
  %f = {HBM} fusion(%w, %i), kind=kLoop, calls=%sliced
  ROOT %c = bf16[32,128]{{1,0:T(8,128)(2,1)}} convolution(%x, %f), dim_labels=bf_io->bf
}}
"""


def test_a_product_fused_with_the_slice_of_a_nested_fusion_reads_the_slice():
    counted = tpu(
        "%x = bf16[32,64]{1,0:T(8,128)(2,1)} parameter(0)",
        f"%w = {STACK} parameter(1)",
        "%i = s32[]{:S(6)} parameter(2)",
        "ROOT %f = bf16[32,128]{1,0:T(8,128)(2,1)} fusion(%x, %w, %i), kind=kOutput, calls=%product",
        before=INSIDE_PRODUCT,
    )
    assert counted.flops == 2 * 32 * 64 * 128
    assert counted.bytes == 32 * 64 * 2 + SIZE + 32 * 128 * 2


INSIDE_UPDATE = f"""
%updated (i: s32[], u: bf16[64,128], p: bf16[9,64,128]) -> bf16[9,64,128] {{
  %i = s32[] parameter(0)
  %u = {HBM} parameter(1)
  %p = {STACK} parameter(2)
  %b = {SLICE} bitcast(%u)
  ROOT %d = {STACK} dynamic-update-slice(%p, %b, %i, %i, %i)
}}

%outer (u: bf16[64,128], p: bf16[9,64,128], i: s32[]) -> bf16[9,64,128] {{
  %u = {HBM} parameter(0)
  %p = {STACK} parameter(1)
  %i = s32[] parameter(2)
  ROOT %f = {STACK} fusion(%i, %u, %p), kind=kLoop, calls=%updated
}}

%fresh (u: bf16[64,128], i: s32[]) -> bf16[9,64,128] {{
  %u = {HBM} parameter(0)
  %i = s32[] parameter(1)
  %z = bf16[] constant(0)
  %p = {STACK} broadcast(%z), dimensions={{}}
  %b = {SLICE} bitcast(%u)
  ROOT %d = {STACK} dynamic-update-slice(%p, %b, %i, %i, %i)
}}
"""


@pytest.mark.parametrize(
    ("fusion", "written"),
    [
        ("fusion(%i, %u, %p), kind=kLoop, calls=%updated", SIZE),
        ("fusion(%u, %p, %i), kind=kLoop, calls=%outer", SIZE),
        ("fusion(%u, %i), kind=kLoop, calls=%fresh", 9 * SIZE),  # zeros are written around the slice
    ],
    ids=["in place", "in place, nested", "into a new array"],
)
def test_a_fusion_that_updates_a_slice_writes_the_slice(fusion, written):
    counted = tpu(
        f"%u = {HBM} parameter(0)",
        f"%p = {STACK} parameter(1)",
        "%i = s32[]{:S(6)} parameter(2)",
        f"ROOT %f = {STACK} {fusion}",
        before=INSIDE_UPDATE,
    )
    assert counted.bytes == SIZE + written


def test_the_inside_of_an_asynchronous_call_counts_once():
    inside = f"""
%later (p: bf16[64,128]) -> bf16[64,128] {{
  %p = {HBM} parameter(0)
  ROOT %n = {HBM} negate(%p)
}}
"""
    counted = tpu(
        f"%a = {HBM} parameter(0)",
        f"%s = (({HBM}), {HBM}, u32[]) async-start(%a), calls=%later",
        f"%d = {HBM} async-done(%s)",
        before=inside,
    )
    assert counted.bytes == 2 * SIZE


def test_a_kernel_counts_what_it_states():
    stated = '"custom_call_config":{"cost_estimate":{"flops":"1000","transcendentals":"0","bytes_accessed":"7"}}'
    counted = tpu(
        f"%a = {HBM} parameter(0)",
        f'%k = {HBM} custom-call(%a), custom_call_target="tpu_custom_call", backend_config={{{stated}}}',
    )
    assert (counted.flops, counted.bytes, dict(counted.kernels)) == (1000, 2 * SIZE, {})


def test_a_kernel_that_states_nothing_is_named():
    counted = tpu(
        f"%a = {HBM} parameter(0)",
        f'%k = {HBM} custom-call(%a), custom_call_target="tpu_custom_call", metadata={{op_name="jit(f)/splash"}}',
        f'%o = {HBM} custom-call(%a), custom_call_target="Sharding"',
    )
    assert dict(counted.kernels) == {"jit(f)/splash": 1}
