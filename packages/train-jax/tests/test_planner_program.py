"""What is read off a compiled program, and off the compiler's refusal of one that is too large."""

import json

import jax
import jax.numpy as jnp
import pytest
from canned_plans import TOO_LARGE, canned_program

from portlab_jax.planner.program import Program, compile_lowered, lower, read_shortage


@pytest.mark.parametrize("program", [canned_program(), canned_program(**TOO_LARGE)], ids=["fits", "too large"])
def test_a_program_goes_through_json(program):
    assert Program.from_json(json.loads(json.dumps(program.to_json()))) == program


def test_figures_of_a_compiled_program():
    def step(x_bd, w_ndd):
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x_bd, w_ndd)[0]

    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(8, 16), (5, 16, 16)])
    program = compile_lowered(*lower(jax.jit(step), x, w))
    assert program.fits
    assert program.memory.arguments == (8 * 16 + 5 * 16 * 16) * 4
    assert program.memory.output == 8 * 16 * 4
    assert program.needed == program.memory.peak >= program.memory.arguments + program.memory.output
    assert program.flops == 5 * 2 * 8 * 16 * 16
    assert program.unknown_loops == 0
    assert program.largest
    assert program.lower_seconds > 0
    assert program.compile_seconds > 0


def test_a_donated_argument_is_not_counted_as_output_again():
    x = jax.ShapeDtypeStruct((1024,), jnp.float32)
    program = compile_lowered(*lower(jax.jit(jnp.sin, donate_argnums=0), x))
    assert (program.memory.arguments, program.memory.output) == (4096, 0)


# As libtpu says it, shortened.
SHORTAGE = """RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. \
Used 21.60G of 15.75G hbm. Exceeded hbm capacity by 5.85G.

Total hbm usage >= 22.10G:
    reserved        512.00M
    program          21.60G

Largest program allocations in hbm:

  1. Size: 4.00G
     Operator: op_name="jit(step)/transpose(jvp(head))/dot_general" source_file="/src/loss.py" source_line=88
     Shape: bf16[8192,262144]{1,0:T(8,128)(2,1)}
     Unpadded size: 4.00G
     XLA label: fusion.12 = fusion(copy.3, %p), kind=kOutput, calls=fused_computation.9
     Allocation type: HLO temp
     ==========================

  2. Size: 512.50M
     Shape: f32[1,2,64]{2,1,0:T(2,128)}
     Unpadded size: 1.0K
     XLA label: copy.9 = copy(param.1)
     Allocation type: HLO temp
     ==========================
"""


def test_a_shortage_says_how_much_is_needed_and_what_is_largest():
    needed, limit, largest = read_shortage(SHORTAGE)
    assert (needed, limit) == (int(21.6 * 2**30), int(15.75 * 2**30))
    first, second = largest
    assert (first.bytes, first.shape) == (4 * 2**30, "bf16[8192,262144]")
    assert (first.op, first.source) == ("jit(step)/transpose(jvp(head))/dot_general", "/src/loss.py:88")
    assert (second.bytes, second.shape, second.op, second.source) == (int(512.5 * 2**20), "f32[1,2,64]", "?", "")


def test_the_compilers_other_way_of_saying_so():
    message = (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (18.74G) exceeds available HBM (15.75G). HLO module: jit_step."
    )
    assert read_shortage(message) == (int(18.74 * 2**30), int(15.75 * 2**30), ())


class Refusing:
    """A lowered function that the compiler refuses."""

    def __init__(self, message):
        self.message = message

    def compile(self):
        raise jax.errors.JaxRuntimeError(self.message)


def test_a_program_that_is_too_large_is_a_program_that_does_not_fit():
    program = compile_lowered(Refusing(SHORTAGE), 2.0)
    assert not program.fits
    assert (program.needed, program.limit, program.lower_seconds) == (int(21.6 * 2**30), int(15.75 * 2**30), 2.0)
    assert len(program.largest) == 2


def test_another_refusal_is_not_mistaken_for_a_shortage():
    with pytest.raises(jax.errors.JaxRuntimeError, match="Mosaic failed"):
        compile_lowered(Refusing("INTERNAL: Mosaic failed to compile TPU kernel"), 2.0)
