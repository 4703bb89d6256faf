"""FLOPs of convolutions, into which a TPU turns products: against XLA's own count, and of dots in disguise."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from portlab_jax.planner.costs import count
from portlab_jax.planner.hlo import parse

LABELS = ("NCHW", "OIHW", "NCHW"), ("NHWC", "HWIO", "NHWC"), ("HWNC", "OHWI", "NHWC")


@st.composite
def convolutions(draw):
    """A two-dimensional convolution whose result is not empty."""
    sizes = st.integers(1, 7)
    pair = st.tuples(st.integers(1, 3), st.integers(1, 3))
    groups, batch_groups = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (1, 2)]))
    case = SimpleNamespace(
        batch=draw(st.integers(1, 2)) * batch_groups,
        inputs=draw(st.integers(1, 2)) * groups,
        outputs=draw(st.integers(1, 2)) * groups * batch_groups,
        size=(draw(sizes), draw(sizes)),
        kernel=draw(pair),
        stride=draw(pair),
        padding=tuple(draw(st.tuples(st.integers(-1, 4), st.integers(-1, 4))) for _ in range(2)),
        base=draw(pair),
        dilation=draw(pair),
        groups=groups,
        batch_groups=batch_groups,
        labels=draw(st.sampled_from(LABELS)),
    )
    for axis in range(2):
        reach = (case.size[axis] - 1) * case.base[axis] + 1 + sum(case.padding[axis])
        if reach < (case.kernel[axis] - 1) * case.dilation[axis] + 1:
            case.padding = tuple((3, 4) for _ in range(2))
    return case


def arranged(labels, spatial, **others):
    """A shape in the order of its labels."""
    sizes = dict(zip("HW", spatial, strict=True)) | others
    return jax.ShapeDtypeStruct(tuple(sizes[label] for label in labels), jnp.float32)


@settings(max_examples=100, deadline=None)
@given(convolutions())
def test_flops_are_those_of_the_compilers_own_count(case):
    left, right, _ = case.labels
    x = arranged(left, case.size, N=case.batch, C=case.inputs)
    w = arranged(right, case.kernel, O=case.outputs, I=case.inputs // case.groups)

    def convolve(x, w):
        return jax.lax.conv_general_dilated(
            x,
            w,
            case.stride,
            case.padding,
            case.base,
            case.dilation,
            case.labels,
            feature_group_count=case.groups,
            batch_group_count=case.batch_groups,
        )

    lowered = jax.jit(convolve).lower(x, w)
    # The text before optimisation, which holds the convolution as it stands here and costs nothing to make.
    assert count(parse(marked(lowered.as_text(dialect="hlo")))).flops == lowered.cost_analysis().get("flops", 0)


def marked(text):
    """Text of an unoptimised module in the form of an optimised one, whose names have a mark and whose entry a type."""
    lines = []
    for line in text.splitlines():
        if line.startswith("ENTRY"):
            line = "ENTRY %main () -> f32[] {"
        head, equals, rest = line.partition(" = ")
        if equals:
            before, opening, behind = rest.partition("(")
            operands, closing, attributes = behind.partition(")")
            if "parameter" not in before:
                operands = ", ".join(f"%{name}" for name in operands.split(", "))
            line = f"{head} = {before}{opening}{operands}{closing}{attributes}"
        lines.append(line)
    return "\n".join(lines)


def product(left, right, out, attributes):
    """FLOPs of one convolution."""
    lines = [f"%x = {left} parameter(0)", f"%w = {right} parameter(1)", f"ROOT %c = {out} convolution(%x, %w), "]
    body = "\n".join(f"  {line}" for line in lines) + attributes
    return count(parse(f"HloModule m\n\nENTRY %main () -> f32[] {{\n{body}\n}}\n")).flops


@pytest.mark.parametrize(
    ("left", "right", "out", "attributes", "flops"),
    [
        ("bf16[32,64]", "bf16[64,16]", "bf16[32,16]", "dim_labels=bf_io->bf", 2 * 32 * 64 * 16),
        ("bf16[32,64]", "bf16[16,64]", "bf16[16,32]", "dim_labels=bf_oi->fb", 2 * 32 * 64 * 16),
        # A dot over two dimensions: one becomes the window, and slides nowhere.
        (
            "bf16[32,5,64]",
            "bf16[5,64,16]",
            "bf16[1,32,16]",
            "window={size=5}, dim_labels=b0f_0io->0bf",
            2 * 32 * 5 * 64 * 16,
        ),
        # A free dimension of the right operand: the window slides over it in reverse, padded on both sides.
        (
            "bf16[32,1,64]",
            "bf16[7,64,16]",
            "bf16[7,32,16]",
            "window={size=7 pad=6_6 rhs_reversal=1}, dim_labels=b0f_0io->0bf",
            2 * 32 * 64 * 16 * 7,
        ),
        # A batched dot: the batch is a spatial dimension in which window and input meet once for each position.
        (
            "bf16[4,32,64]",
            "bf16[4,64,16]",
            "bf16[4,32,16]",
            "window={size=4 stride=3 pad=0_0 lhs_dilate=4}, dim_labels=0bf_0io->0bf",
            2 * 4 * 32 * 64 * 16,
        ),
        # Two batch dimensions, as attention over rows and heads.
        (
            "bf16[2,3,32,64]",
            "bf16[2,3,64,16]",
            "bf16[2,3,32,16]",
            "window={size=2x3 stride=1x2 pad=0_0x0_0 lhs_dilate=2x3}, dim_labels=01bf_01io->01bf",
            2 * 2 * 3 * 32 * 64 * 16,
        ),
    ],
    ids=["plain", "transposed", "two contracted", "free dimension", "batched", "batched twice"],
)
def test_a_dot_in_disguise_has_the_flops_of_the_dot(left, right, out, attributes, flops):
    assert product(left, right, out, attributes) == flops
