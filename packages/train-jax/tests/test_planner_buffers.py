"""Which arrays are in memory at the fullest moment: hand-written schedules with known lifetimes, and a real program."""

import jax
import jax.numpy as jnp
import pytest

from portlab_jax.planner.buffers import largest_buffers
from portlab_jax.planner.hlo import parse

ROW, STACK = "f32[256]{0}", "f32[9,256]{1,0}"
SIZE = 1024  # bytes of a row; a stack holds nine


def fullest(*lines, before=""):
    """Bytes of the buffers at the fullest moment of a schedule, largest first, and their sum."""
    body = "\n".join(f"  {line}" for line in lines)
    module = parse(f"HloModule jit_step\n{before}\nENTRY %main () -> f32[] {{\n{body}\n}}\n")
    buffers, total = largest_buffers(module)
    assert sum(buffer.bytes for buffer in buffers) == total
    return [buffer.bytes for buffer in buffers]


@pytest.mark.parametrize(
    ("lines", "sizes"),
    [
        # Arguments are not temporaries.
        ([f"ROOT %a = {ROW} parameter(0)"], []),
        # Operand and result of an instruction are there together; nothing longer than it is needed.
        (
            [
                f"%a = {ROW} parameter(0)",
                f"%b = {ROW} negate(%a)",
                f"%c = {ROW} negate(%b)",
                f"ROOT %d = {ROW} negate(%c)",
            ],
            [SIZE] * 2,
        ),
        # What is used at the end stays until then.
        (
            [
                f"%a = {ROW} parameter(0)",
                f"%b = {ROW} negate(%a)",
                f"%c = {ROW} negate(%b)",
                f"%d = {ROW} negate(%c)",
                f"ROOT %e = {ROW} add(%b, %d)",
            ],
            [SIZE] * 3,
        ),
        # Views take no memory, and keep what they look at.
        (
            [
                f"%a = {ROW} parameter(0)",
                f"%b = {ROW} negate(%a)",
                "%v = f32[16,16]{1,0} bitcast(%b)",
                f"%c = {ROW} negate(%a)",
                f"%d = {ROW} negate(%c)",
                f"ROOT %e = {ROW} add(%v, %d)",
            ],
            [SIZE] * 3,
        ),
        # On-chip memory is not HBM.
        ([f"%a = {ROW} parameter(0)", "ROOT %b = f32[256]{0:S(1)} negate(%a)"], []),
        # Padding counts.
        (
            ["%a = f32[3,5]{1,0:T(8,128)} parameter(0)", "ROOT %b = f32[3,5]{1,0:T(8,128)} negate(%a)"],
            [8 * 128 * 4],
        ),
        # A start's tuple names its operand, which is no second copy.
        (
            [
                f"%a = {ROW} parameter(0)",
                f"%s = ({ROW}, {STACK}) all-gather-start(%a)",
                f"ROOT %d = {STACK} all-gather-done(%s)",
            ],
            [9 * SIZE],
        ),
        (
            [
                f"%a = {STACK} parameter(0)",
                f"%s = (({STACK}), f32[1,256]{{1,0:S(1)}}, u32[]{{:S(2)}}) slice-start(%a)",
                "ROOT %d = f32[1,256]{1,0:S(1)} slice-done(%s)",
            ],
            [],
        ),
    ],
    ids=[
        *("argument", "chain", "kept to the end", "view", "on the chip", "padding"),
        *("all-gather-start", "slice-start"),
    ],
)
def test_a_buffer_lives_from_its_making_to_its_last_use(lines, sizes):
    assert fullest(*lines) == sizes


UPDATES = f"""
%second (i: s32[], u: f32[256], p: f32[9,256]) -> f32[9,256] {{
  %i = s32[] parameter(0)
  %u = {ROW} parameter(1)
  %p = {STACK} parameter(2)
  %b = f32[1,256]{{1,0}} bitcast(%u)
  ROOT %d = {STACK} dynamic-update-slice(%p, %b, %i, %i)
}}

%viewed (p: f32[9,256], u: f32[1,256], i: s32[]) -> f32[2304] {{
  %p = {STACK} parameter(0)
  %u = f32[1,256]{{1,0}} parameter(1)
  %i = s32[] parameter(2)
  %d = {STACK} dynamic-update-slice(%p, %u, %i, %i)
  ROOT %b = f32[2304]{{0}} bitcast(%d)
}}

%fresh (u: f32[256], i: s32[]) -> f32[9,256] {{
  %u = {ROW} parameter(0)
  %i = s32[] parameter(1)
  %z = f32[] constant(0)
  %p = {STACK} broadcast(%z), dimensions={{}}
  %b = f32[1,256]{{1,0}} bitcast(%u)
  ROOT %d = {STACK} dynamic-update-slice(%p, %b, %i, %i)
}}
"""


@pytest.mark.parametrize(
    ("update", "stacks"),
    [
        (f"{STACK} dynamic-update-slice(%p, %v, %i, %i)", 1),
        (f"{STACK} fusion(%i, %u, %p), kind=kLoop, calls=%second", 1),
        ("f32[2304]{0} fusion(%p, %v, %i), kind=kLoop, calls=%viewed", 1),
        (f"{STACK} fusion(%u, %i), kind=kLoop, calls=%fresh", 2),
    ],
    ids=["plain", "fused, third operand", "fused, behind a view", "into a new array"],
)
def test_an_update_in_place_shares_the_memory_of_what_it_updates(update, stacks):
    sizes = fullest(
        "%i = s32[] parameter(0)",
        f"%u = {ROW} parameter(1)",
        "%v = f32[1,256]{1,0} bitcast(%u)",
        f"%p = {STACK} broadcast(%i), dimensions={{}}",
        f"%w = {update}",
        f"ROOT %t = ({STACK}, f32[]) tuple(%w, %p)",
        before=UPDATES,
    )
    assert sizes == [9 * SIZE] * stacks


LOOP = f"""
%body (p: (f32[256])) -> (f32[256]) {{
  %p = ({ROW}) parameter(0)
  %g = {ROW} get-tuple-element(%p), index=0
  %b = {STACK} broadcast(%g), dimensions={{1}}
  %r = {ROW} reduce(%b)
  ROOT %t = ({ROW}) tuple(%r)
}}

%around (p: (f32[256])) -> (f32[256]) {{
  %p = ({ROW}) parameter(0)
  ROOT %w = ({ROW}) while(%p), condition=%condition, body=%body
}}
"""


@pytest.mark.parametrize("loop", ["while(%t), condition=%condition, body=%body", "call(%t), to_apply=%around"])
def test_the_inside_of_a_loop_is_in_memory_beside_what_lives_across_it(loop):
    sizes = fullest(
        f"%a = {ROW} parameter(0)",
        f"%b = {ROW} negate(%a)",
        f"%kept = {ROW} negate(%a)",
        f"%t = ({ROW}) tuple(%b)",
        f"%w = ({ROW}) {loop}",
        f"%g = {ROW} get-tuple-element(%w), index=0",
        f"ROOT %e = {ROW} add(%g, %kept)",
        before=LOOP,
    )
    # The state, what is kept, and in the loop the broadcast array with its sum.
    assert sizes == [9 * SIZE, SIZE, SIZE, SIZE]


def test_a_conditional_needs_its_largest_branch():
    branches = f"""
%small (p: f32[256]) -> f32[256] {{
  %p = {ROW} parameter(0)
  ROOT %n = {ROW} negate(%p)
}}

%large (p: f32[256]) -> f32[256] {{
  %p = {ROW} parameter(0)
  %b = {STACK} broadcast(%p), dimensions={{1}}
  ROOT %r = {ROW} reduce(%b)
}}
"""
    sizes = fullest(
        f"%a = {ROW} parameter(0)",
        "%q = pred[] parameter(1)",
        f"ROOT %c = {ROW} conditional(%q, %a, %a), true_computation=%small, false_computation=%large",
        before=branches,
    )
    assert sizes == [9 * SIZE, SIZE]


def test_only_the_largest_are_listed_and_all_are_summed():
    lines = [f"%a{n} = f32[{n}]{{0}} broadcast(%s), dimensions={{}}" for n in range(1, 31)]
    names = ", ".join(f"%a{n}" for n in range(1, 31))
    text = "\n".join(["  %s = f32[] parameter(0)", *(f"  {line}" for line in lines), f"  ROOT %t = () tuple({names})"])
    buffers, total = largest_buffers(parse(f"HloModule m\n\nENTRY %main () -> () {{\n{text}\n}}\n"), count=3)
    assert [buffer.shape for buffer in buffers] == ["f32[30]", "f32[29]", "f32[28]"]
    assert total == 4 * sum(range(1, 31))


def widened(x_bd, w_df):
    wide_bf = x_bd @ w_df
    return jnp.sin(wide_bf) @ wide_bf.T


def test_the_largest_buffer_of_a_real_program_is_named_with_its_line():
    shapes = jax.ShapeDtypeStruct((8, 16), jnp.float32), jax.ShapeDtypeStruct((16, 4096), jnp.float32)
    buffers, _ = largest_buffers(parse(jax.jit(widened).lower(*shapes).compile().as_text()))
    product = next(buffer for buffer in buffers if "dot_general" in buffer.op)
    assert (product.bytes, product.shape) == (8 * 4096 * 4, "f32[8,4096]")
    assert product.bytes == buffers[0].bytes
    assert product.source == f"{__file__}:{widened.__code__.co_firstlineno + 1}"


def test_a_scan_holds_its_stacked_result_once():
    def stacked(x_b, ys_nb):
        return jax.lax.scan(lambda h, y: (h, h * y), x_b, ys_nb)[1]

    shapes = jax.ShapeDtypeStruct((512,), jnp.float32), jax.ShapeDtypeStruct((64, 512), jnp.float32)
    buffers, total = largest_buffers(parse(jax.jit(stacked).lower(*shapes).compile().as_text()))
    assert buffers[0].bytes == 64 * 512 * 4
    assert total < 1.1 * 64 * 512 * 4
