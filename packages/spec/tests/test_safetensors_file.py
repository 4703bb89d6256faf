"""Reading and writing safetensors, held against the reference implementation."""

import json

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from portlab_spec.errors import UserError
from portlab_spec.safetensors_file import Writer, open_tensors
from portlab_spec.safetensors_header import DTYPES, read_header

BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "matrix": rng.normal(size=(5, 7)).astype(BF16),
        "vector": rng.normal(size=11).astype(np.float32),
        "scalar": np.array(3, np.int64),
        "empty": np.zeros((0, 4), np.float16),
        "flags": np.array([True, False, True]),
    }


def write(path, tensors, metadata=None) -> None:
    layout = {name: (array.dtype, array.shape) for name, array in tensors.items()}
    with Writer(path, layout, metadata) as writer:
        for name, array in tensors.items():
            writer.write(name, array)


# --- Writing ---


def test_the_reference_implementation_reads_what_we_write(tensors, tmp_path):
    write(tmp_path / "x.safetensors", tensors)
    read = safetensors.numpy.load_file(tmp_path / "x.safetensors")
    assert read.keys() == tensors.keys()
    for name, array in tensors.items():
        assert read[name].dtype == array.dtype
        np.testing.assert_array_equal(read[name], array)


def test_the_format_is_named_for_transformers(tensors, tmp_path):
    write(tmp_path / "x.safetensors", tensors)
    with safetensors.safe_open(tmp_path / "x.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}


def test_data_starts_aligned(tensors, tmp_path):
    write(tmp_path / "x.safetensors", tensors)
    assert read_header(tmp_path / "x.safetensors").data_start % 8 == 0


def test_blocks_may_come_in_any_order_of_tensors(tmp_path):
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    layout = {"a": (rows.dtype, rows.shape), "b": (rows.dtype, rows.shape)}
    with Writer(tmp_path / "model.safetensors", layout) as writer:
        writer.write("b", rows[:1])
        writer.write("a", -rows)
        writer.write("b", rows[1:])
    read = open_tensors(tmp_path)
    np.testing.assert_array_equal(read["a"].numpy(), -rows)
    np.testing.assert_array_equal(read["b"].numpy(), rows)


def test_a_transposed_array_is_written_in_row_major_order(tmp_path):
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    write(tmp_path / "model.safetensors", {"t": array})
    np.testing.assert_array_equal(open_tensors(tmp_path)["t"].numpy(), array)


def test_an_incomplete_tensor_is_an_error(tmp_path):
    with (
        pytest.raises(ValueError, match="not written to the end: a"),
        Writer(tmp_path / "x", {"a": (BF16, (2, 2))}) as writer,
    ):
        writer.write("a", np.zeros((1, 2), BF16))


def test_too_much_data_is_an_error(tmp_path):
    with Writer(tmp_path / "x", {"a": (BF16, (2,)), "b": (BF16, (2,))}) as writer:
        with pytest.raises(ValueError, match="more data"):
            writer.write("a", np.zeros(3, BF16))
        writer.write("a", np.zeros(2, BF16))
        writer.write("b", np.zeros(2, BF16))


def test_another_dtype_is_an_error(tmp_path):
    writer = Writer(tmp_path / "x", {"a": (BF16, (2,))})
    with pytest.raises(ValueError, match="laid out as bfloat16"):
        writer.write("a", np.zeros(2, np.float16))
    writer.write("a", np.zeros(2, BF16))
    writer.close()


# --- Reading ---


def test_we_read_what_the_reference_implementation_writes(tensors, tmp_path):
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors", {"k": "v"})
    read = open_tensors(tmp_path)
    assert read_header(tmp_path / "model.safetensors").metadata == {"k": "v"}
    for name, array in tensors.items():
        assert (read[name].shape, read[name].dtype) == (array.shape, array.dtype)
        np.testing.assert_array_equal(read[name].numpy(), array)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_dtype_survives(dtype, tmp_path):
    array = np.arange(6).reshape(2, 3).astype(dtype)
    write(tmp_path / "model.safetensors", {"x": array})
    read = open_tensors(tmp_path)["x"].numpy()
    assert (read.dtype, read.shape, read.tobytes()) == (array.dtype, array.shape, array.tobytes())


def test_arrays_cannot_change_the_file(tensors, tmp_path):
    write(tmp_path / "model.safetensors", tensors)
    with pytest.raises(ValueError, match="read-only"):
        open_tensors(tmp_path)["matrix"].numpy()[0, 0] = 1


def test_shards_are_read_through_their_index(tmp_path):
    one, two = np.ones(2, np.float32), np.full(3, 2, np.float32)
    write(tmp_path / "s1.safetensors", {"one": one})
    write(tmp_path / "s2.safetensors", {"two": two})
    index = {"weight_map": {"one": "s1.safetensors", "two": "s2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    read = open_tensors(tmp_path)
    np.testing.assert_array_equal(read["one"].numpy(), one)
    assert read["two"].path == tmp_path / "s2.safetensors"


@pytest.mark.parametrize(
    ("weight_map", "fault"),
    [
        ({"one": "s2.safetensors"}, r"shard s2\.safetensors is missing"),
        ({"one": "../s1.safetensors"}, "is not a safetensors file beside it"),
        ({"one": 1}, "is not a safetensors file beside it"),
        ({"one": "s1.safetensors", "two": "s1.safetensors"}, r"two is not in s1\.safetensors"),
        ({}, "has no weight_map"),
        (["one"], "has no weight_map"),
    ],
)
def test_an_index_that_does_not_hold_is_a_user_error(tmp_path, weight_map, fault):
    write(tmp_path / "s1.safetensors", {"one": np.ones(2, np.float32)})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UserError, match=fault):
        open_tensors(tmp_path)


def test_a_folder_without_weights_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match=r"holds no model\.safetensors"):
        open_tensors(tmp_path)
