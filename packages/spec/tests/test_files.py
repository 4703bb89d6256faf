"""Writers leave a whole file or folder, or nothing; the command-line wrapper ends in one line."""

import errno
import os
import subprocess
import sys

import pytest

from portlab_spec import cli, files
from portlab_spec.errors import CheckFailed, UserError


def test_json_is_written_whole(tmp_path):
    files.write_json(tmp_path / "a" / "x.json", {"b": 1, "a": "ü"})
    assert (tmp_path / "a" / "x.json").read_text() == '{\n  "b": 1,\n  "a": "ü"\n}\n'
    assert files.read_json(tmp_path / "a" / "x.json") == {"b": 1, "a": "ü"}


def test_nan_is_refused_and_the_old_file_stays(tmp_path):
    files.write_json(tmp_path / "x.json", 1)
    with pytest.raises(ValueError, match="JSON"):
        files.write_json(tmp_path / "x.json", float("nan"))
    assert files.read_json(tmp_path / "x.json") == 1


@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_failing_write_keeps_the_old_file_and_leaves_nothing_else(tmp_path, monkeypatch, fault):
    files.write_text(tmp_path / "x", "old")

    def fail(*_):
        raise fault

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(type(fault)):
        files.write_text(tmp_path / "x", "new")
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_text() == "old"


def test_a_folder_appears_only_when_complete(tmp_path):
    with files.new_folder(tmp_path / "out") as staging:
        (staging / "a").write_text("1")
        assert not (tmp_path / "out").exists()
    assert (tmp_path / "out" / "a").read_text() == "1"
    with pytest.raises(UserError, match="already exists"), files.new_folder(tmp_path / "out"):
        pass


def test_a_failing_folder_leaves_nothing(tmp_path):
    def fail():
        with files.new_folder(tmp_path / "out") as staging:
            (staging / "a").write_text("1")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert not list(tmp_path.iterdir())


def test_the_staging_of_a_killed_run_is_removed_and_that_of_a_living_one_kept(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for pid in (dead.pid, os.getppid()):
        (tmp_path / f".out.partial-{pid}").mkdir()
    with files.new_folder(tmp_path / "out"):
        pass
    assert sorted(p.name for p in tmp_path.iterdir()) == [f".out.partial-{os.getppid()}", "out"]


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("name", ["out", "out[1]*?"])
def test_the_staging_of_a_killed_run_with_our_own_number_is_taken_over(tmp_path, name, resume):
    """In a container every run may be process 1."""
    left = tmp_path / f".{name}.partial-{os.getpid()}"
    left.mkdir()
    (left / "old").touch()
    with files.new_folder(tmp_path / name, resume=resume) as staging:
        assert [p.name for p in staging.iterdir()] == ["old"] * resume
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_of_several_stagings_the_newest_is_resumed(tmp_path):
    for age, pid in enumerate((2**22 + 1, os.getpid(), 2**22 + 2)):
        left = tmp_path / f".out.partial-{pid}"
        left.mkdir()
        (left / f"age {age}").touch()
        os.utime(left, (age, age))
    with files.new_folder(tmp_path / "out", resume=True):
        pass
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["age 2"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"\xff", b"[" * 100_000, b"1" * 5000, b'"\\ud800"', b'{"\\udc00": 1}'],
    ids=["empty", "cut", "no utf-8", "deep", "long", "half a pair", "half a pair as key"],
)
def test_what_is_no_json_is_one_line(tmp_path, data):
    (tmp_path / "x.json").write_bytes(data)
    with pytest.raises(UserError, match="the thing is not valid JSON") as caught:
        files.read_json(tmp_path / "x.json", "the thing")
    assert "\n" not in str(caught.value)


def test_a_whole_pair_is_text(tmp_path):
    (tmp_path / "x.json").write_bytes(b'"\\ud83d\\ude00"')
    assert files.read_json(tmp_path / "x.json") == "😀"


def test_too_little_space_is_said_before_writing(tmp_path):
    with pytest.raises(UserError, match=r"needs 1000000000\.00 GB and the disk has"):
        files.require_free_space(tmp_path / "not" / "there", 10**18, "the run")


@pytest.mark.parametrize(
    ("fault", "code", "line"),
    [
        (UserError("is bad", where="x.json", fix="Mend it"), 2, "prog: error: x.json: is bad. Mend it\n"),
        (CheckFailed("the sums differ"), 1, "prog: error: the sums differ\n"),
        (KeyboardInterrupt(), 130, "prog: error: interrupted; what was saved is complete, run the same command"),
        (OSError(errno.ENOSPC, "No space left on device", "/x"), 2, "prog: error: /x: No space left on device. Free"),
    ],
)
def test_errors_become_one_line_and_a_code(capsys, fault, code, line):
    def main(args):
        raise fault

    with pytest.raises(SystemExit) as end:
        cli.run("prog", main, [])
    assert end.value.code == code
    error = capsys.readouterr().err
    assert error.startswith(line)
    assert error.count("\n") == 1


def test_debug_shows_the_traceback():
    def main(args):
        assert args == ["x"]
        raise UserError("bad")

    with pytest.raises(UserError):
        cli.run("prog", main, ["x", "--debug"])
