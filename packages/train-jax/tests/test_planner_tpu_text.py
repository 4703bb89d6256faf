"""Forms that only a TPU's text has, each as libtpu writes it, shortened; and a step compiled for every generation."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from portlab_jax.planner.buffers import largest_buffers
from portlab_jax.planner.costs import count
from portlab_jax.planner.hlo import parse
from portlab_jax.planner.topology import VARIABLES

PART, WHOLE = "bf16[64,128]{1,0:T(8,128)(2,1)}", "bf16[256,128]{1,0:T(8,128)(2,1)}"
SIZE = 64 * 128 * 2  # bytes of a part; the whole is four
GROUPS = "replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}"


def module(entry, computations=""):
    return parse(f"HloModule jit_step, num_partitions=8\n{computations}\nENTRY %main () -> f32[] {{\n{entry}\n}}\n")


# An all-gather beside two products: every fusion of the chain repeats it.
CHAIN = f"""
%begin (p: bf16[64,128]) -> (bf16[64,128], bf16[256,128], s32[2], u32[]) {{
  %p = {PART} parameter(0)
  %g = {WHOLE} all-gather(%p), channel_id=6, {GROUPS}, dimensions={{0}}, frontend_attributes={{chain_id="1"}}
  ROOT %s = ({PART}, {WHOLE}, s32[2]{{0:S(4)}}, u32[]{{:S(2)}}) custom-call(%g), \
custom_call_target="AsyncCollectiveStart"
}}

%meanwhile (p: bf16[64,128], q: bf16[256,128], s: s32[2], u: u32[], x: bf16[32,64]) -> (bf16[32,128], bf16[64,128], \
bf16[256,128], s32[2], u32[]) {{
  %p = {PART} parameter(0)
  %q = {WHOLE} parameter(1)
  %s = s32[2]{{0:S(4)}} parameter(2)
  %u = u32[]{{:S(2)}} parameter(3)
  %x = bf16[32,64]{{1,0:T(8,128)(2,1)}} parameter(4)
  %w = {PART} constant({{...}})
  %c = bf16[32,128]{{1,0:T(8,128)(2,1)}} convolution(%x, %w), dim_labels=bf_io->bf
  %g = {WHOLE} all-gather(%p), channel_id=6, {GROUPS}, dimensions={{0}}, frontend_attributes={{chain_id="1"}}
  ROOT %t = (bf16[32,128]{{1,0:T(8,128)(2,1)}}, {PART}, {WHOLE}, s32[2]{{0:S(4)}}, u32[]{{:S(2)}}) \
tuple(%c, %p, %g, %s, %u)
}}

%end (p: bf16[64,128], q: bf16[256,128], s: s32[2], u: u32[]) -> bf16[256,128] {{
  %p = {PART} parameter(0)
  %q = {WHOLE} parameter(1)
  %s = s32[2]{{0:S(4)}} parameter(2)
  %u = u32[]{{:S(2)}} parameter(3)
  %g = {WHOLE} all-gather(%p), channel_id=6, {GROUPS}, dimensions={{0}}, frontend_attributes={{chain_id="1"}}
  ROOT %d = {WHOLE} custom-call(%p, %q, %g, %s, %u), custom_call_target="AsyncCollectiveDone"
}}
"""
CHAINED = f"""
  %x = bf16[32,64]{{1,0:T(8,128)(2,1)}} parameter(1)
  %p = {PART} parameter(0)
  %b = ({PART}, {WHOLE}, s32[2]{{0:S(4)}}, u32[]{{:S(2)}}) fusion(%p), kind=kCustom, \
output_to_operand_aliasing={{{{0}}: (0, {{}})}}, calls=%begin
  %b0 = {PART} get-tuple-element(%b), index=0
  %b1 = {WHOLE} get-tuple-element(%b), index=1
  %b2 = s32[2]{{0:S(4)}} get-tuple-element(%b), index=2
  %b3 = u32[]{{:S(2)}} get-tuple-element(%b), index=3
  %m = (bf16[32,128]{{1,0:T(8,128)(2,1)}}, {PART}, {WHOLE}, s32[2]{{0:S(4)}}, u32[]{{:S(2)}}) fusion(%b0, %b1, %b2, \
%b3, %x), kind=kOutput, output_to_operand_aliasing={{{{1}}: (0, {{}}), {{2}}: (1, {{}}), {{3}}: (2, {{}}), {{4}}: (3, \
{{}})}}, calls=%meanwhile
  %m0 = bf16[32,128]{{1,0:T(8,128)(2,1)}} get-tuple-element(%m), index=0
  %m1 = {PART} get-tuple-element(%m), index=1
  %m2 = {WHOLE} get-tuple-element(%m), index=2
  %m3 = s32[2]{{0:S(4)}} get-tuple-element(%m), index=3
  %m4 = u32[]{{:S(2)}} get-tuple-element(%m), index=4
  %d = {WHOLE} fusion(%m1, %m2, %m3, %m4), kind=kCustom, output_to_operand_aliasing={{{{}}: (1, {{}})}}, calls=%end
  ROOT %t = ({WHOLE}, bf16[32,128]{{1,0:T(8,128)(2,1)}}) tuple(%d, %m0)
"""


class TestACollectiveBesideOtherWork:
    def test_it_is_sent_once(self):
        costs = count(module(CHAINED, CHAIN))
        assert (costs.collectives, costs.sent_bytes) == ({"all-gather": 1}, 3 * SIZE)

    def test_it_is_read_and_written_once(self):
        # The part is read and the whole written; the product reads its operand and writes its result.
        assert count(module(CHAINED, CHAIN)).bytes == SIZE + 4 * SIZE + (32 * 64 + 32 * 128) * 2

    def test_the_product_beside_it_counts(self):
        assert count(module(CHAINED, CHAIN)).flops == 2 * 32 * 64 * 128

    def test_its_result_is_in_memory_once(self):
        buffers, total = largest_buffers(module(CHAINED, CHAIN))
        assert [buffer.bytes for buffer in buffers] == [4 * SIZE, 32 * 128 * 2]
        assert total == 4 * SIZE + 32 * 128 * 2


SCATTER = f"""
%all-reduce-scatter (p: bf16[256,128]) -> bf16[64,128] {{
  %p = {WHOLE} parameter(0)
  %r = {WHOLE} all-reduce(%p), channel_id=9, replica_groups={{{{0,1,2,3}},{{4,5,6,7}}}}, to_apply=%add
  %i = u32[] partition-id()
  %z = s32[] constant(0)
  ROOT %s = {PART} dynamic-slice(%r, %i, %z), dynamic_slice_sizes={{64,128}}
}}
"""


def test_an_all_reduce_of_which_a_part_is_kept_is_a_reduce_scatter():
    entry = f"  %p = {WHOLE} parameter(0)\n  ROOT %s = {PART} fusion(%p), kind=kCustom, calls=%all-reduce-scatter"
    costs = count(module(entry, SCATTER))
    assert (costs.collectives, costs.sent_bytes) == ({"reduce-scatter": 1}, 3 * SIZE)
    assert costs.bytes == 4 * SIZE + SIZE


OFFLOADED = f"""
%called (p: bf16[64,128]) -> bf16[256,128] {{
  %p = {PART} parameter(0)
  ROOT %g = {WHOLE} all-gather(%p), channel_id=13, {GROUPS}, dimensions={{0}}
}}, execution_thread="sparsecore"
"""


def test_a_collective_of_the_sparse_core_counts():
    entry = f"""
  %p = {PART} parameter(0)
  %s = ((), (), (s32[1]{{0:T(128)S(2)}})) call-start(), async_execution_thread="sparsecore", to_apply=%called
  %u = (({PART}), {WHOLE}) call-update(%s, %p)
  ROOT %d = {WHOLE} call-done(%u)
"""
    parsed = module(entry, OFFLOADED)
    costs = count(parsed)
    assert (costs.collectives, costs.sent_bytes) == ({"all-gather": 1}, 3 * SIZE)
    assert costs.bytes == SIZE + 4 * SIZE
    assert [buffer.bytes for buffer in largest_buffers(parsed)[0]] == [4 * SIZE]


VIEWS = f"""
%same (p: bf16[64,128]) -> bf16[64,128] {{
  %p = {PART} parameter(0)
  ROOT %b = {PART} bitcast(%p)
}}

%product (x: bf16[32,64], w: bf16[64,128]) -> bf16[32,128] {{
  %x = bf16[32,64]{{1,0:T(8,128)(2,1)}} parameter(0)
  %w = {PART} parameter(1)
  %v = {PART} fusion(%w), kind=kLoop, calls=%same
  ROOT %c = bf16[32,128]{{1,0:T(8,128)(2,1)S(1)}} convolution(%x, %v), dim_labels=bf_io->bf
}}

%retiled (p: bf16[256,128]) -> bf16[256,128] {{
  %p = bf16[256,128]{{1,0:T(16,128)(2,1)}} parameter(0)
  ROOT %c = {WHOLE} copy(%p)
}}

%sliced (p: bf16[256,128], i: s32[]) -> bf16[64,128] {{
  %p = bf16[256,128]{{1,0:T(16,128)(2,1)}} parameter(0)
  %i = s32[] parameter(1)
  %v = {WHOLE} fusion(%p), kind=kLoop, output_to_operand_aliasing={{{{}}: (0, {{}})}}, calls=%retiled
  ROOT %s = bf16[64,128]{{1,0:T(8,128)(2,1)S(1)}} dynamic-slice(%v, %i, %i), dynamic_slice_sizes={{64,128}}
}}

%updated (p: bf16[256,128], u: bf16[64,128], i: s32[]) -> bf16[256,128] {{
  %p = bf16[256,128]{{1,0:T(16,128)(2,1)}} parameter(0)
  %u = bf16[64,128]{{1,0:T(8,128)(2,1)S(1)}} parameter(1)
  %i = s32[] parameter(2)
  %v = {WHOLE} fusion(%p), kind=kLoop, output_to_operand_aliasing={{{{}}: (0, {{}})}}, calls=%retiled
  ROOT %d = bf16[256,128]{{1,0:T(16,128)(2,1)}} dynamic-update-slice(%v, %u, %i, %i)
}}
"""


class TestFusionsThatAreViews:
    def test_what_is_behind_one_is_read(self):
        entry = f"""
  %x = bf16[32,64]{{1,0:T(8,128)(2,1)S(1)}} parameter(0)
  %w = {PART} parameter(1)
  ROOT %c = bf16[32,128]{{1,0:T(8,128)(2,1)S(1)}} fusion(%x, %w), kind=kOutput, calls=%product
"""
        assert count(module(entry, VIEWS)).bytes == SIZE

    def test_of_a_change_of_tiling_only_the_slice_is_read(self):
        entry = """
  %p = bf16[256,128]{1,0:T(16,128)(2,1)} parameter(0)
  %i = s32[]{:S(6)} parameter(1)
  ROOT %s = bf16[64,128]{1,0:T(8,128)(2,1)S(1)} fusion(%p, %i), kind=kLoop, calls=%sliced
"""
        assert count(module(entry, VIEWS)).bytes == SIZE

    def test_an_update_behind_a_change_of_tiling_is_in_place(self):
        entry = """
  %p = bf16[256,128]{1,0:T(16,128)(2,1)} parameter(0)
  %u = bf16[64,128]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  %i = s32[]{:S(6)} parameter(2)
  ROOT %d = bf16[256,128]{1,0:T(16,128)(2,1)} fusion(%p, %u, %i), kind=kLoop, calls=%updated
"""
        parsed = module(entry, VIEWS)
        assert count(parsed).bytes == SIZE
        assert largest_buffers(parsed) == ([], 0)


def test_neighbouring_slices_seen_as_one_array_cost_nothing():
    entry = f"""
  %a = {WHOLE} parameter(0)
  %s = (({WHOLE}), {PART}, s32[]{{:S(2)}}) slice-start(%a), slice={{[0:64], [0:128]}}
  %d = {PART} slice-done(%s)
  %e = {PART} negate(%d)
  ROOT %c = bf16[128,128]{{1,0:T(8,128)(2,1)}} custom-call(%d, %e), custom_call_target="ConcatBitcast"
"""
    parsed = module(entry)
    assert count(parsed).bytes == 2 * SIZE + 2 * SIZE
    assert [buffer.bytes for buffer in largest_buffers(parsed)[0]] == [SIZE, SIZE]


# Six layers of two products, sharded over 4 of 8 devices, recomputed in the backward pass.
STEP = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from portlab_jax.planner import topology
from portlab_jax.planner.costs import count
from portlab_jax.planner.hlo import parse
from portlab_spec.hardware import parse_slice

L, B, D, F = 6, 4096, 256, 512

def layer(h, w):
    return h + jnp.tanh(h @ w[0]) @ w[1], None

def loss(ws, x):
    return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, ws)[0].astype(jnp.float32) ** 2)

def step(ws, x):
    return jax.tree.map(lambda w, g: w - g, ws, jax.grad(loss)(ws, x))

found = {}
for name in sys.argv[1:]:
    mesh = Mesh(np.array(topology.devices(parse_slice(name))).reshape(2, 4), ("data", "fsdp"), (AxisType.Auto,) * 2)
    def array(shape, *axes):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*axes)))
    ws = array((L, D, F), None, "fsdp", None), array((L, F, D), None, "fsdp", None)
    lowered = jax.jit(step, donate_argnums=0).lower(ws, array((B, D), ("data", "fsdp"), None))
    costs = count(parse(lowered.compile().as_text()))
    found[name] = [costs.flops, costs.collectives["all-gather"], costs.sent["all-gather"], costs.unknown_loops]
print(json.dumps(found))
"""


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler (extra plan)")
def test_a_sharded_step_counts_the_same_on_every_generation():
    slices = ["v5e-8", "v6e-8", "v5p-16", "tpu7x-8"]
    done = subprocess.run(
        [sys.executable, "-c", STEP, *slices], env=os.environ | VARIABLES, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    # Products: two forward, four backward, one again. Gathered: both weights in each pass.
    product = 2 * 4096 * 256 * 512 // 8
    gathered = 256 * 512 * 2 * 3 // 4
    expected = [7 * 6 * product, 4 * 6, 4 * 6 * gathered, 0]
    assert json.loads(done.stdout) == dict.fromkeys(slices, expected)
