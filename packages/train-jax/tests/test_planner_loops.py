"""How often instructions run: by the compiler's note, and read off loops that have lost it."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from portlab_jax.planner.hlo import parse
from portlab_jax.planner.loops import rounds, walk

BODIES = """
%inner (p: f32[]) -> f32[] {
  %p = f32[] parameter(0)
  ROOT %deep = f32[] add(%p, %p)
}

%outer (p: f32[]) -> f32[] {
  %p = f32[] parameter(0)
  ROOT %loop = f32[] while(%p), condition=%condition, body=%inner, backend_config={"known_trip_count":{"n":"5"}}
}

%condition (p: f32[]) -> pred[] {
  %p = f32[] parameter(0)
  ROOT %c = pred[] compare(%p, %p), direction=LT
}
"""


def runs(line):
    """How often each instruction runs in a module whose entry is one line."""
    entry = f"ENTRY %main (x: f32[]) -> f32[] {{\n  %x = f32[] parameter(0)\n  ROOT %r = f32[] {line}\n}}\n"
    times = Counter()
    for run, instruction in walk(parse(f"HloModule m\n{BODIES}\n{entry}")):
        times[instruction.name] += run.times
    return times


def test_nested_loops_multiply():
    found = runs('while(%x), condition=%condition, body=%outer, backend_config={"known_trip_count":{"n":"3"}}')
    assert (found["r"], found["loop"], found["deep"]) == (1, 3, 15)


def test_a_loop_that_never_runs_counts_nothing():
    found = runs('while(%x), condition=%condition, body=%outer, backend_config={"known_trip_count":{"n":"0"}}')
    assert found["deep"] == 0


def test_a_loop_that_depends_on_data_counts_once():
    assert runs("while(%x), condition=%condition, body=%inner")["deep"] == 1


@pytest.mark.parametrize("caller", ["call(%x), to_apply=%inner", "async-start(%x), calls=%inner"])
def test_what_is_called_runs(caller):
    assert runs(caller)["deep"] == 1


@pytest.mark.parametrize(
    "branches", ["true_computation=%inner, false_computation=%outer", "branch_computations={%inner, %outer}"]
)
def test_every_branch_of_a_conditional_counts(branches):
    assert runs(f"conditional(%x, %x, %x), {branches}")["deep"] == 1 + 5


def test_the_inside_of_a_fusion_is_not_visited():
    assert "deep" not in runs("fusion(%x), kind=kLoop, calls=%inner")


def counting(
    *, start="constant(0)", step="constant(1)", condition="compare(%n, %end), direction=LT", next="add(%i, %one)"
):
    """Rounds of a loop as a TPU's compiler leaves it: no note, and its numbers copied and handed in."""
    text = f"""HloModule m

%condition (s: (s32[], f32[8], s32[])) -> pred[] {{
  %s = (s32[], f32[8], s32[]) parameter(0)
  %n = s32[] get-tuple-element(%s), index=0
  %limit = s32[] get-tuple-element(%s), index=2
  %end = s32[] constant(6)
  ROOT %less = pred[] {condition}
}}

%body (s: (s32[], f32[8], s32[])) -> (s32[], f32[8], s32[]) {{
  %s = (s32[], f32[8], s32[]) parameter(0)
  %g = s32[] get-tuple-element(%s), index=0
  %i = s32[] copy(%g)
  %x = f32[8] get-tuple-element(%s), index=1
  %limit = s32[] get-tuple-element(%s), index=2
  %one = s32[] {step}
  %next = s32[] {next}
  %y = f32[8] negate(%x)
  ROOT %t = (s32[], f32[8], s32[]) tuple(%next, %y, %limit)
}}

ENTRY %main (x: f32[8], d: s32[]) -> f32[8] {{
  %x = f32[8] parameter(0)
  %d = s32[] parameter(1)
  %zero = s32[] {start}
  %copied = s32[] copy(%zero)
  %nine = s32[] constant(9)
  %t = (s32[], f32[8], s32[]) tuple(%copied, %x, %nine)
  %loop = (s32[], f32[8], s32[]) while(%t), condition=%condition, body=%body
  ROOT %r = f32[8] get-tuple-element(%loop), index=1
}}
"""
    module = parse(text)
    ((run, loop),) = [(run, i) for run, i in walk(module) if i.opcode == "while"]
    return rounds(module, run, loop)


def test_a_loop_that_counts_to_a_constant():
    assert counting() == 6


@pytest.mark.parametrize(
    ("start", "step", "expected"), [(2, 1, 4), (0, 4, 2), (1, 5, 1), (6, 1, 0), (9, 1, 0), (-3, 2, 5)]
)
def test_start_and_step_count(start, step, expected):
    assert counting(start=f"constant({start})", step=f"constant({step})") == expected


def test_the_sum_may_be_written_either_way():
    assert counting(next="add(%one, %i)") == 6


def test_the_limit_may_be_handed_from_round_to_round():
    assert counting(condition="compare(%n, %limit), direction=LT") == 9


@pytest.mark.parametrize(
    "changes",
    [
        {"start": "add(%d, %d)"},
        {"step": "add(%i, %i)"},
        {"step": "constant(0)"},
        {"step": "constant(-1)"},
        {"next": "multiply(%i, %one)"},
        {"condition": "compare(%n, %end), direction=GT"},
        {"condition": "compare(%limit, %end), direction=LT"},
        {"condition": "and(%n, %end)"},
    ],
    ids=lambda changes: " ".join(changes.values()),
)
def test_any_other_loop_is_not_known(changes):
    assert counting(**changes) is None


def nested(x, ws):
    def layer(h, w):
        return jnp.tanh(h @ w), None

    return jax.lax.scan(lambda h, inner: (jax.lax.scan(layer, h, inner)[0], None), x, ws)[0]


def test_the_loops_of_a_compiled_scan_are_known():
    x, ws = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(8, 16), (3, 5, 16, 16)])
    module = parse(jax.jit(nested).lower(x, ws).compile().as_text())
    found = [(rounds(module, run, i), run.times) for run, i in walk(module) if i.opcode == "while"]
    assert found == [(3, 1), (5, 3)]
