"""Reading optimised HLO: types, instructions, the computations that they call."""

import jax
import jax.numpy as jnp
import pytest

from portlab_jax.planner.hlo import parse


def entry(*lines, before=""):
    """A module whose entry computation has these lines."""
    body = "\n".join(f"  {line}" for line in lines)
    return parse(
        f"HloModule jit_step, is_scheduled=true, num_partitions=4\n\n{before}\nENTRY %main () -> f32[] {{\n{body}\n}}\n"
    )


def one(line):
    """The only instruction of a module."""
    (instruction,) = entry(line).computations["main"].instructions.values()
    return instruction


@pytest.mark.parametrize(
    ("written", "dims", "space", "size", "padded"),
    [
        ("f32[]", (), 0, 4, 4),
        ("pred[7]{0}", (7,), 0, 7, 7),
        ("s4[64]{0}", (64,), 0, 32, 32),
        ("f8e4m3fn[8,128]{1,0:T(8,128)(4,1)}", (8, 128), 0, 1024, 1024),
        ("bf16[<=8,2]{1,0}", (8, 2), 0, 32, 32),
        ("bf16[16,256]{1,0:T(8,128)(2,1)}", (16, 256), 0, 8192, 8192),
        # The minor dimension is filled up to 128, the next to 8; a third is not touched.
        ("bf16[3,10,200]{2,1,0:T(8,128)(2,1)S(1)}", (3, 10, 200), 1, 12_000, 3 * 16 * 256 * 2),
        # Which dimensions are minor is said by the layout, not by their order.
        ("f32[3,5]{0,1:T(8,128)}", (3, 5), 0, 60, 128 * 8 * 4),
        ("f32[1000]{0:T(1024)}", (1000,), 0, 4000, 4096),
        ("u32[]{:S(2)}", (), 2, 4, 4),
        ("token[]", (), 0, 0, 0),
    ],
)
def test_an_array_has_a_size_a_place_and_padding(written, dims, space, size, padded):
    array = one(f"ROOT %a = {written} parameter(0)").array
    assert (array.dims, array.space, array.bytes, array.padded_bytes) == (dims, space, size, padded)


def test_a_tuple_is_flattened_and_its_comments_are_skipped():
    kind = "((f32[2]{0:T(128)}, s32[]), f32[3]{0}, pred[], u8[1], f32[4]{0}, /*index=5*/bf16[8,128]{1,0:T(8,128)S(1)})"
    arrays = one(f"%t = {kind} parameter(0)").arrays
    assert [a.dims for a in arrays] == [(2,), (), (3,), (), (1,), (4,), (8, 128)]


def test_an_instruction_is_taken_apart():
    instruction = one(
        "ROOT %fusion.7 = bf16[8]{0:T(256)(128)(2,1)} fusion(bf16[8]{0} %a.1, %b, /*index=2*/%c), kind=kLoop, "
        'calls=%fused.2, metadata={op_name="jit(step)/mul (a) \\"b" stack_frame_id=3}, backend_config={"n":{"m":"(3"}}'
    )
    assert (instruction.name, instruction.opcode, instruction.root) == ("fusion.7", "fusion", True)
    assert instruction.operands == ("a.1", "b", "c")
    assert instruction.called == ("fused.2",)
    assert instruction.op_name.startswith("jit(step)/mul (a)")
    assert instruction.backend_config == {"n": {"m": "(3"}}


def test_a_parenthesis_in_a_quoted_operand_closes_nothing():
    instruction = one('%c = s8[4]{0} constant("a)\\")b"), metadata={op_name="x"}')
    assert (instruction.opcode, instruction.op_name) == ("constant", "x")


def test_a_backend_config_that_is_no_object_is_empty():
    assert one('%c = f32[] custom-call(), backend_config="not json"').backend_config == {}
    assert one('%c = f32[] custom-call(), backend_config="{\\"a\\":1}"').backend_config == {"a": 1}


def test_numbers_of_an_attribute():
    dot = one("%d = f32[2] dot(%a, %b), lhs_batch_dims={}, lhs_contracting_dims={1,2}, rhs_contracting_dims={0, 1}")
    assert dot.integers("lhs_contracting_dims") == (1, 2)
    assert dot.integers("rhs_contracting_dims") == (0, 1)
    assert dot.integers("lhs_batch_dims") == dot.integers("nothing") == ()


@pytest.mark.parametrize(
    ("written", "made"),
    [
        ("(f32[8]{0:S(1)}, f32[8]{0}, u32[]{:S(2)}) copy-start(%a)", [1]),
        ("((f32[4,8]{1,0}), f32[1,8]{1,0:S(1)}, u32[]{:S(2)}) slice-start(%a)", [1]),
        ("(f32[8]{0}, f32[32]{0}) all-gather-start(%a)", [0]),
        ("((f32[8]{0}, f32[4]{0}), (f32[32]{0}, f32[16]{0})) all-gather-start(%a, %b)", [0, 0]),
        # An all-reduce has the shape of its result from the start.
        ("(f32[8]{0}, f32[4]{0}) all-reduce-start(%a, %b)", [0, 0]),
        ("(f32[8]{0}, f32[8]{0:S(1)}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%a)", [1]),
        ("(f32[8]{0}, f32[8]{0:S(1)}) fusion(%a)", [0, 1]),
    ],
    ids=lambda value: value.split(") ")[-1] if isinstance(value, str) else "",
)
def test_a_start_makes_what_is_not_an_alias_or_a_context(written, made):
    assert [array.space for array in one(f"%s = {written}").made] == made


def test_the_number_of_partitions_is_read():
    assert entry("%a = f32[] parameter(0)").partitions == 4


def test_a_text_without_an_entry_is_refused():
    with pytest.raises(ValueError, match="no entry computation"):
        parse("HloModule empty\n")


def test_source_lines_are_found_in_both_forms():
    tables = (
        'FileNames\n1 "a.py"\n2 "b.py"\n\nFunctionNames\n1 "f"\n\nFileLocations\n'
        "1 {file_name_id=2 function_name_id=1 line=12 end_line=12 column=4 end_column=9}\n\n"
        "StackFrames\n1 {file_location_id=1 parent_frame_id=1}\n\n"
    )
    module = entry(
        '%inline = f32[] parameter(0), metadata={op_name="x" source_file="/lib/site-packages/jax/c.py" source_line=7}',
        '%table = f32[] parameter(1), metadata={op_name="x" stack_frame_id=1}',
        "%none = f32[] parameter(2)",
        before=tables,
    )
    lines = [module.source(i) for i in module.computations["main"].instructions.values()]
    assert lines == ["jax/c.py:7", "b.py:12", ""]


def scanned(ws_nij, x_bi):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x_bi, ws_nij)[0]


@pytest.fixture(scope="module")
def compiled_text():
    shapes = jax.ShapeDtypeStruct((4, 16, 16), jnp.float32), jax.ShapeDtypeStruct((8, 16), jnp.float32)
    return jax.jit(scanned).lower(*shapes).compile().as_text()


def test_every_line_of_a_compiled_program_is_read(compiled_text):
    module = parse(compiled_text)
    lines = [line for line in compiled_text.splitlines() if " = " in line and line.startswith("  ")]
    assert sum(len(c.instructions) for c in module.computations.values()) == len(lines)
    assert sum(compiled_text.count(f"{kind}=%") for kind in ("calls", "body", "condition", "to_apply")) == sum(
        len(i.called) for c in module.computations.values() for i in c.instructions.values()
    )


def test_the_source_of_a_compiled_product_is_this_file(compiled_text):
    module = parse(compiled_text)
    dots = [i for c in module.computations.values() for i in c.instructions.values() if i.opcode == "dot"]
    (source,) = {module.source(dot) for dot in dots}
    file, _, line = source.rpartition(":")
    assert file == __file__
    assert int(line) == scanned.__code__.co_firstlineno + 1
