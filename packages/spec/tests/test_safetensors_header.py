"""Headers are read strictly: a file is a whole, valid safetensors file or a one-line error."""

import json
from contextlib import suppress

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from portlab_spec.errors import UserError
from portlab_spec.safetensors_header import DTYPES, encode_header, lay_out, parse_header, read_header

GOOD = {"x": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}


def parse(entries, extra=0):
    raw = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return parse_header(len(raw), raw, 8 + len(raw) + 24 + extra, "file")


def test_a_file_of_the_library_is_read(tmp_path):
    save_file({"b": np.ones((2, 3), ml_dtypes.bfloat16), "a": np.ones(5, np.int64)}, tmp_path / "f", {"k": "v"})
    header = read_header(tmp_path / "f")
    assert {(t.name, t.dtype, t.shape) for t in header.tensors} == {("a", "I64", (5,)), ("b", "BF16", (2, 3))}
    assert header.metadata == {"k": "v"}
    assert header.data_bytes == 52


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda n: n != "__metadata__")
layouts = st.dictionaries(names, st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 5), max_size=3)))


@given(layouts)
def test_what_is_written_is_read_back(entries):
    tensors = lay_out((name, dtype, tuple(shape)) for name, (dtype, shape) in entries.items())
    raw = encode_header(tensors, {"format": "pt"})
    assert len(raw) % 8 == 0
    size = len(raw) + (tensors[-1].end if tensors else 0)
    header = parse_header(int.from_bytes(raw[:8], "little"), raw[8:], size, "file")
    assert sorted(header.tensors, key=str) == sorted(tensors, key=str)
    assert header.data_start == len(raw)


def test_the_library_reads_what_is_written(tmp_path):
    tensors = lay_out([("z", "BF16", (2, 2)), ("a", "F32", (3,))])
    (tmp_path / "f").write_bytes(
        encode_header(tensors, {"format": "pt"}) + bytes(8) + np.arange(3, dtype="<f4").tobytes()
    )
    with safe_open(tmp_path / "f", "numpy") as file:
        np.testing.assert_array_equal(file.get_tensor("a"), [0, 1, 2])


@given(st.binary(max_size=200))
def test_any_bytes_are_a_header_or_an_error(raw):
    with suppress(UserError):
        parse_header(len(raw), raw, 8 + len(raw), "file")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(st.fixed_dictionaries({"dtype": json_values | st.just("F32"), "shape": json_values | st.just([6]),
                              "data_offsets": json_values | st.just([0, 24])}))  # fmt: skip
def test_any_entry_is_valid_or_an_error(entry):
    try:
        header = parse({"x": entry})
    except UserError:
        return
    assert header.data_bytes == 24


@given(st.data())
def test_a_changed_byte_never_crashes(data):
    raw = bytearray(json.dumps(GOOD).encode())
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with suppress(UserError):
        parse(bytes(raw))


@pytest.mark.parametrize(
    ("entries", "extra", "reason"),
    [
        (GOOD, 1, "describes"),
        (GOOD, -1, "describes"),
        ({"x": {**GOOD["x"], "data_offsets": [1, 25]}}, 1, "starts at byte 1"),
        ({"x": GOOD["x"], "y": GOOD["x"]}, 0, "starts at byte 0, expected 24"),
        ({"x": {"dtype": "F32", "shape": [2, 3]}}, 0, "holds dtype, shape and data_offsets"),
        ({"x": 1}, 0, "holds dtype, shape and data_offsets"),
        ({"x": {**GOOD["x"], "shape": [2, 4]}}, 0, "does not fill"),
        ({"x": {**GOOD["x"], "shape": [-2, -3]}}, 0, "not a list of sizes"),
        ({"x": {**GOOD["x"], "shape": [True, 6]}}, 0, "not a list of sizes"),
        ({"x": {**GOOD["x"], "dtype": "F4"}}, 0, "not supported"),
        ({**GOOD, "__metadata__": {"a": 1}}, 0, "map of strings"),
        (b'{"x": 1, "x": 2}', 0, "occurs twice"),
        (b"[" * 100_000, 0, "not JSON"),
        (rb'{"\ud800": {}}', 0, "not JSON"),
        ([], 0, "not a JSON object"),
    ],
)
def test_what_the_format_forbids_is_named(entries, extra, reason):
    with pytest.raises(UserError, match=reason):
        parse(entries, extra)


@pytest.mark.parametrize("content", [b"", b"1234567", b"\xff" * 8, b"\x02" + bytes(7) + b"{", bytes(8)])
def test_short_files_are_errors(tmp_path, content):
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(UserError, match="does not fit"):
        read_header(tmp_path / "f")


@pytest.mark.parametrize("size", [0, 7, 8, 40, -1])
def test_a_truncated_file_is_an_error(tmp_path, size):
    save_file({"x": np.ones((2, 3), np.float32)}, tmp_path / "whole")
    (tmp_path / "cut").write_bytes((tmp_path / "whole").read_bytes()[:size])
    with pytest.raises(UserError, match="cut: not a valid safetensors file"):
        read_header(tmp_path / "cut")


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(UserError, match="not found"):
        read_header(tmp_path / "none")
