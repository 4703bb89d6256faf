"""kill -9 at any moment: the output is whole or absent, nothing wrong can be loaded, and the next run works."""

import hashlib
import itertools
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from portlab_merge.base_model import open_base
from portlab_merge.checkpoint import read_checkpoint
from portlab_merge.overlay import MergeOptions, merge
from portlab_merge.plan import make_plan
from portlab_merge.verify import verify_merged

TARGET = Path(__file__).with_name("merge_kill_target.py")


@pytest.fixture(scope="module")
def plan(inputs):
    base, run = inputs
    return make_plan(open_base(base), read_checkpoint(run))


@pytest.fixture
def ask(inputs):
    """Merge in a child of a warm process: ask(out, after=0.01, resume=True)."""
    base, run = inputs
    command = [sys.executable, "-W", "ignore", str(TARGET), str(run), str(base)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:

        def request(out, options=None, **when):
            server.stdin.write(json.dumps({"out": str(out), "options": options or {}, **when}) + "\n")
            server.stdin.flush()
            return json.loads(server.stdout.readline())

        yield request
        server.stdin.close()


OPTIONS = [{}, {"dtype": "float32"}, {"max_shard_size": 25_000}]


@pytest.fixture(scope="module")
def undisturbed(plan, tmp_path_factory):
    """Content of every file of an undisturbed merge with options number i."""
    folder = tmp_path_factory.mktemp("undisturbed")
    for i, options in enumerate(OPTIONS):
        merge(plan, folder / str(i), MergeOptions(**options))
        assert verify_merged(plan, folder / str(i)) == []
    return [content(folder / str(i)) for i in range(len(OPTIONS))]


def content(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def check_what_is_left(parent, name, expected):
    """Nothing but the output, whole, and stagings of it that are no model, or the right one. Is the output there?"""
    for path in parent.iterdir():
        if path.name == name:
            assert content(path) == expected
            continue
        assert path.name.startswith(f".{name}.partial-")
        if (path / "config.json").exists():
            found = content(path)
            assert found.items() <= expected.items()
            assert {file for file in expected if file.endswith(".safetensors")} <= set(found)
    return (parent / name).exists()


@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("number", [0, 1])
def test_killed_before_any_step_on_the_file_system(ask, undisturbed, tmp_path, number, stride):
    """With stride 1 every step, in turn. The next run goes on or starts anew."""
    options, expected = {**OPTIONS[number], "threads": 1}, undisturbed[number]
    parent, out = tmp_path / "new", tmp_path / "new" / "out"
    for event in itertools.count(1, stride):
        killed = ask(out, options, event=event)
        assert killed["error"] == ""
        if not killed["killed"]:
            break
        if not (parent.exists() and check_what_is_left(parent, "out", expected)):
            again = ask(out, {**options, "resume": event % 2 == 0})
            assert (again["killed"], again["error"]) == (False, "")
        assert content(out) == expected
        assert [path.name for path in parent.iterdir()] == ["out"]
        shutil.rmtree(parent)
    assert event > 50
    assert content(out) == expected


@pytest.mark.parametrize("rounds", [25, pytest.param(500, marks=pytest.mark.slow)])
def test_killed_at_random_moments(ask, plan, undisturbed, tmp_path, rounds):
    """What a killed round leaves is there for the next; an output that is there is checked, and all begins anew."""
    rng = random.Random(rounds)
    seconds = max(ask(tmp_path / "timing" / str(i))["seconds"] for i in range(3))
    parent, out = tmp_path / "new", tmp_path / "new" / "out"
    kills = number = 0
    for turn in range(rounds):
        options = {**OPTIONS[number], "resume": turn % 2 == 0}
        result = ask(out, options, after=rng.uniform(0, 1.2 * seconds))
        assert result["error"] == ""
        kills += result["killed"]
        if parent.exists() and check_what_is_left(parent, "out", undisturbed[number]):
            assert verify_merged(plan, out) == []
            shutil.rmtree(parent)
            number = rng.randrange(len(OPTIONS))
        else:
            assert result["killed"]
    assert kills > rounds // 2
    if not out.exists():
        assert ask(out, {**OPTIONS[number], "resume": bool(rounds % 2)})["error"] == ""
    assert verify_merged(plan, out) == []
    assert content(out) == undisturbed[number]
    assert [path.name for path in parent.iterdir()] == ["out"]
