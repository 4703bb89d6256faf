"""Which attention implementation is chosen, and which request is refused."""

import pytest

from portlab_jax.attention import choose
from portlab_spec.errors import UserError

TPU = {"platform": "tpu", "dtype": "bfloat16", "row_length": 2048}
HOPPER = {"platform": "gpu", "dtype": "bfloat16", "row_length": 2048, "compute_capability": 9.0}
AMPERE = {**HOPPER, "compute_capability": 8.0}
CPU = {"platform": "cpu", "dtype": "float32", "row_length": 1248}
SEGMENT = {"plain": True, "one_segment": True}
PLAIN = {"plain": True, "one_segment": False}
TREE = {"plain": False, "one_segment": False}


@pytest.mark.parametrize(
    ("where", "rows", "head_dim", "expected"),
    [
        (TPU, SEGMENT, 256, "splash"),
        (TPU, PLAIN, 256, "splash"),
        (TPU, PLAIN, 512, "splash"),
        (TPU, TREE, 512, "splash_tree"),
        (TPU, PLAIN, 80, "xla"),
        (TPU | {"row_length": 1248}, PLAIN, 256, "xla"),
        (TPU | {"row_length": 32768}, PLAIN, 256, "splash"),
        (TPU | {"row_length": 8192}, TREE, 256, "xla"),
        (HOPPER, SEGMENT, 256, "cudnn"),
        (HOPPER, PLAIN, 256, "cudnn_mask"),
        (HOPPER, TREE, 256, "cudnn_mask"),
        (HOPPER, SEGMENT, 512, "xla"),
        (HOPPER | {"row_length": 8192}, SEGMENT, 256, "cudnn"),
        (HOPPER | {"row_length": 8192}, TREE, 256, "xla"),
        (HOPPER | {"dtype": "float32"}, SEGMENT, 256, "xla"),
        (AMPERE, SEGMENT, 256, "xla"),
        (AMPERE, SEGMENT, 128, "cudnn"),
        (CPU, TREE, 256, "xla"),
    ],
)
def test_auto_takes_the_kernel_where_it_is_right(where, rows, head_dim, expected):
    assert choose("auto", head_dim=head_dim, **where, **rows).implementation == expected


def test_auto_says_why_there_is_no_kernel():
    assert "heads of size 512" in choose("auto", head_dim=512, **HOPPER, **SEGMENT).reason
    assert choose("auto", head_dim=256, **CPU, **TREE).reason == "no kernel for cpu"


@pytest.mark.parametrize(
    ("requested", "where", "rows", "head_dim", "reason"),
    [
        ("splash", CPU, PLAIN, 256, "runs on TPU, this is CPU"),
        ("splash", TPU | {"dtype": "float16"}, PLAIN, 256, "float16"),
        ("splash", TPU | {"row_length": 1000}, PLAIN, 256, "rows of 1000 tokens"),
        ("splash", TPU | {"row_length": 16384}, TREE, 256, "mask for rows of 16384 tokens"),
        ("cudnn", HOPPER, SEGMENT, 512, "heads of size 512"),
        ("cudnn", AMPERE, SEGMENT, 256, "compute capability 9"),
        ("cudnn", HOPPER | {"dtype": "float32"}, SEGMENT, 256, "not float32"),
        ("cudnn", TPU, SEGMENT, 256, "runs on GPU, this is TPU"),
    ],
)
def test_a_request_that_cannot_be_right_is_refused_with_the_reason(requested, where, rows, head_dim, reason):
    with pytest.raises(
        UserError, match=f"attention: {requested} cannot be used here: .*{reason}.*Set attention to auto"
    ):
        choose(requested, head_dim=head_dim, **where, **rows)


def test_xla_is_always_right():
    assert choose("xla", head_dim=512, **HOPPER, **TREE).implementation == "xla"
