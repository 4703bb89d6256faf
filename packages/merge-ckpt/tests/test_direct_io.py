"""Files come out as they were written and are read as they are, with direct writes or without."""

import errno
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from portlab_merge import direct_io
from portlab_merge.direct_io import InputFile, OutputFile
from portlab_spec.errors import UserError


@given(sizes=st.lists(st.integers(0, 20_000), max_size=12))
def test_bytes_come_out_as_they_went_in(tmp_path_factory, sizes):
    path = tmp_path_factory.mktemp("direct") / "out"
    data = [np.random.default_rng(i).integers(0, 256, size, np.uint8) for i, size in enumerate(sizes)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct_io, "WRITE_BYTES", 8192)  # several full buffers and a rest
        with OutputFile(path) as file:
            for part in data:
                file.write(part)
    assert path.read_bytes() == b"".join(part.tobytes() for part in data)


def test_a_file_system_that_refuses_to_open_for_direct_writes_gets_others(tmp_path, monkeypatch):
    opened = os.open

    def refuse(path, flags, *mode):
        handle = opened(path, flags, *mode)  # as some do: the file is there all the same
        if flags & direct_io._DIRECT:
            os.close(handle)
            raise OSError(errno.EINVAL, "no direct writes")
        return handle

    monkeypatch.setattr(direct_io.os, "open", refuse)
    with OutputFile(tmp_path / "out") as file:
        file.write(b"abc")
    assert (tmp_path / "out").read_bytes() == b"abc"


def test_a_file_system_that_refuses_direct_writes_later_gets_others(tmp_path, monkeypatch):
    monkeypatch.setattr(direct_io, "WRITE_BYTES", 4096)
    write, refused = os.write, []

    def refuse_first(handle, data):
        if not refused:
            refused.append(handle)
            raise OSError(errno.EINVAL, "not so")
        return write(handle, data)

    with OutputFile(tmp_path / "out") as file:
        monkeypatch.setattr(direct_io.os, "write", refuse_first)
        file.write(bytes(10_000))
    assert refused
    assert (tmp_path / "out").read_bytes() == bytes(10_000)


def test_a_file_that_exists_is_not_touched(tmp_path):
    (tmp_path / "out").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        OutputFile(tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == b"mine"


@pytest.fixture
def out_of_cache(monkeypatch):
    """Nothing is ever in the cache."""
    read = os.preadv

    def cold(handle, buffers, offset, flags=0):
        if flags & os.RWF_NOWAIT:
            raise OSError(errno.EAGAIN, "not in the cache")
        return read(handle, buffers, offset, flags)

    monkeypatch.setattr(direct_io.os, "preadv", cold)


@pytest.mark.parametrize("size", [16_384, 16_387])
@pytest.mark.parametrize("cached", [True, False])
def test_any_range_is_read(tmp_path, request, size, cached):
    if not cached:
        request.getfixturevalue("out_of_cache")
    path = tmp_path / "in"
    path.write_bytes(np.random.default_rng(0).bytes(size))
    with InputFile(path) as file:
        for offset, count in ((3, 5000), (0, 4096), (4095, 2), (8192, size - 8192), (size - 1, 1), (0, size), (7, 0)):
            assert file.read(offset, count).tobytes() == path.read_bytes()[offset : offset + count]


def test_a_file_system_without_direct_reads_reads_as_ever(tmp_path, monkeypatch):
    (tmp_path / "in").write_bytes(b"0123456789")
    read = os.preadv

    with InputFile(tmp_path / "in") as file:
        direct = file._direct

        def refuse(handle, buffers, offset, flags=0):
            if flags or handle == direct:
                raise OSError(errno.EINVAL, "not so")
            return read(handle, buffers, offset)

        monkeypatch.setattr(direct_io.os, "preadv", refuse)
        assert file.read(2, 3).tobytes() == b"234"


def test_a_system_without_either_reads_as_ever(tmp_path, monkeypatch):
    (tmp_path / "in").write_bytes(b"0123456789")
    monkeypatch.setattr(direct_io, "_DIRECT", 0)
    with InputFile(tmp_path / "in") as file:
        assert file.read(2, 3).tobytes() == b"234"


@pytest.mark.usefixtures("out_of_cache")
def test_a_file_that_became_shorter_is_an_error_past_the_cache(tmp_path):
    (tmp_path / "in").write_bytes(bytes(5000))
    with InputFile(tmp_path / "in") as file, pytest.raises(UserError, match="became shorter"):
        file.read(4990, 11)


def test_a_file_that_became_shorter_is_an_error(tmp_path):
    (tmp_path / "in").write_bytes(b"0123456789")
    with InputFile(tmp_path / "in") as file, pytest.raises(UserError, match="became shorter"):
        file.read(8, 3)
