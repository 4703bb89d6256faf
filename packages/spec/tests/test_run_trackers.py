"""Metrics of a run: one line a step, nothing twice after a restart, other trackers only if they are installed."""

import importlib.util
import json
import struct
import sys
from types import SimpleNamespace

import pytest

from portlab_spec.errors import UserError
from portlab_spec.run.trackers import JsonLines, Trackers, open_trackers, require_trackers


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_a_step_readable_at_once(tmp_path):
    tracker = JsonLines(tmp_path / "m.jsonl", step=0)
    tracker.log(1, {"loss": 0.5, "learning_rate": 1e-4})
    assert lines(tmp_path / "m.jsonl") == [{"step": 1, "loss": 0.5, "learning_rate": 1e-4}]
    tracker.log(2, {"loss": float("nan")})
    assert lines(tmp_path / "m.jsonl")[1] == {"step": 2, "loss": None}
    tracker.close()


def test_a_resumed_run_forgets_the_steps_that_were_lost(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "loss": 1}\n{"step": 2, "loss": 2}\n{"step": 2, "eval": 9}\n{"step": 3, "loss": 3}\n')
    tracker = JsonLines(path, step=2)
    tracker.log(3, {"loss": 3.5})
    tracker.close()
    assert [line["step"] for line in lines(path)] == [1, 2, 2, 3]
    assert lines(path)[-1]["loss"] == 3.5


def test_a_line_cut_off_by_a_kill_is_dropped(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "loss": 1}\n{"step": 2, "lo')
    JsonLines(path, step=5).close()
    assert lines(path) == [{"step": 1, "loss": 1}]


def test_a_new_run_forgets_all_of_an_old_one(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "loss": 1}\n')
    JsonLines(path, step=0).close()
    assert lines(path) == []


def open_in(folder, names=(), step=0, **options):
    return open_trackers(names, folder, step=step, name="recipe", config={"steps": 3}, trainer="train-jax", **options)


def test_without_names_there_is_the_file(tmp_path):
    with open_in(tmp_path) as trackers:
        trackers.log(1, {"loss": 0.5})
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 0.5}]


def test_a_process_that_does_not_lead_writes_nothing(tmp_path):
    with open_in(tmp_path, leads=False) as trackers:
        trackers.log(1, {"loss": 0.5})
    assert list(tmp_path.iterdir()) == []


def records(path):
    """Payloads of an event file: u64 length, u32 checksum, payload, u32 checksum (TFRecord)."""
    data, at = path.read_bytes(), 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        yield data[at + 12 : at + 12 + length]
        at += length + 16


def test_tensorboard_gets_scalars_by_step(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    with open_in(tmp_path, ["tensorboard"]) as trackers:
        trackers.log(1, {"loss": 0.5})
        trackers.log(2, {"loss": 0.25})
    (file,) = (tmp_path / "tensorboard").iterdir()
    events = [Event.FromString(record) for record in records(file)]
    scalars = [(event.step, value.tag, value.simple_value) for event in events for value in event.summary.value]
    assert scalars == [(1, "loss", 0.5), (2, "loss", 0.25)]


def test_tensorboard_is_told_which_steps_are_void(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    open_in(tmp_path, ["tensorboard"], step=7).close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    events = [Event.FromString(record) for record in records(file)]
    assert [event.step for event in events if event.session_log.status == SessionLog.START] == [8]


@pytest.fixture
def trackio(monkeypatch):
    """A stand-in for the library: its `init`, and the run that it returns."""
    calls = []
    run = SimpleNamespace(
        log=lambda values, step: calls.append(("log", step, values)), finish=lambda: calls.append("finish")
    )

    def init(**options):
        print("* Trackio project initialized")
        calls.append(("init", options))
        return run

    module = SimpleNamespace(init=init, __spec__=importlib.util.find_spec("json"))
    monkeypatch.setitem(sys.modules, "trackio", module)
    return calls


def test_trackio_goes_on_under_the_name_of_the_run_and_leaves_stdout_alone(trackio, tmp_path, capsys):
    with open_in(tmp_path / ".", ["trackio"]) as trackers:
        trackers.log(1, {"loss": 0.5})
    options = {"project": "recipe", "name": tmp_path.name, "config": {"steps": 3}, "resume": "allow", "embed": False}
    assert trackio == [("init", options), ("log", 1, {"loss": 0.5}), "finish"]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["tensorboard", "trackio"])
def test_a_tracker_that_is_not_installed_is_refused_with_the_command(monkeypatch, tmp_path, name):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    with pytest.raises(UserError) as refused:
        open_in(tmp_path, [name])
    assert f'Run: pip install "portlab-train-jax[{name}]"' in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_no_tracker_needs_nothing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    require_trackers([], "train-jax")


def test_all_are_closed_though_one_fails():
    closed = []

    def fail():
        raise OSError("disk")

    with (
        pytest.raises(OSError, match="disk"),
        Trackers(
            [
                SimpleNamespace(close=lambda: closed.append(1)),
                SimpleNamespace(close=fail),
                SimpleNamespace(close=lambda: closed.append(3)),
            ]
        ),
    ):
        pass
    assert sorted(closed) == [1, 3]
