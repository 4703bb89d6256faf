"""`--resume`: what a killed merge finished is kept if it is right, and the result is that of an undisturbed one."""

import dataclasses
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from portlab_merge import journal, overlay
from portlab_merge.base_model import open_base
from portlab_merge.checkpoint import read_checkpoint
from portlab_merge.overlay import MergeOptions, merge
from portlab_merge.plan import make_plan
from portlab_merge.verify import verify_merged
from portlab_spec.errors import UserError

TARGET = Path(__file__).with_name("merge_kill_target.py")
FINISHED = 2  # files, when the merge is killed


@dataclasses.dataclass(frozen=True)
class Killed:
    """A merge that was killed after two of its files; `plan` and `whole` are of an undisturbed one."""

    parent: Path
    plan: object
    whole: dict[str, str]

    @property
    def out(self):
        return self.parent / "out"

    @property
    def staging(self):
        (folder,) = self.parent.glob(".out.partial-*")
        return folder

    def shards(self):
        """Files of the output that are there, in their order."""
        return sorted((self.out if self.out.exists() else self.staging).glob("*.safetensors"))

    def record(self, shard):
        return self.staging / journal.FOLDER / f"{shard.name}.json"


def content(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def identity(paths):
    """A file that is written again has another inode, or at least another time."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in paths}


def plan_of(base, run):
    return make_plan(open_base(base), read_checkpoint(run))


@pytest.fixture(scope="module")
def killed_once(inputs, tmp_path_factory):
    base, run = inputs
    parent = tmp_path_factory.mktemp("killed")
    command = [sys.executable, "-W", "ignore", str(TARGET), str(run), str(base)]
    request = json.dumps({"out": str(parent / "out"), "options": {}, "files": FINISHED})
    answer = subprocess.run(command, input=request, capture_output=True, text=True, check=True).stdout
    assert json.loads(answer)["killed"]
    return parent


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "out"
    merge(plan_of(*inputs), folder, MergeOptions())
    return content(folder)


@pytest.fixture
def killed(inputs, killed_once, whole, tmp_path):
    parent = tmp_path / "new"
    shutil.copytree(killed_once, parent)
    killed = Killed(parent, plan_of(*inputs), whole)
    assert len(killed.shards()) >= FINISHED
    assert len(list((killed.staging / journal.FOLDER).iterdir())) == FINISHED
    return killed


def test_finished_files_are_not_written_again(killed):
    before = identity(killed.shards()[:FINISHED])
    merge(killed.plan, killed.out, MergeOptions(resume=True))
    assert identity(killed.shards()[:FINISHED]) == before


def test_the_result_is_that_of_an_undisturbed_merge(killed):
    manifest = merge(killed.plan, killed.out, MergeOptions(resume=True))
    assert content(killed.out) == killed.whole
    assert manifest == json.loads((killed.out / "merge_manifest.json").read_text())
    assert verify_merged(killed.plan, killed.out) == []
    assert [path.name for path in killed.parent.iterdir()] == ["out"]


def flip(path):
    data = bytearray(path.read_bytes())
    data[-7] ^= 4
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:-2])


def swap(killed, shard):
    shutil.copy(killed.record(killed.shards()[1]), killed.record(shard))


SPOILT = {
    "a flipped bit": lambda killed, shard: flip(shard),
    "bytes short": lambda killed, shard: cut(shard),
    "empty": lambda killed, shard: shard.write_bytes(b""),
    "gone": lambda killed, shard: shard.unlink(),
    "no record": lambda killed, shard: killed.record(shard).unlink(),
    "a record cut short": lambda killed, shard: cut(killed.record(shard)),
    "a record that is empty": lambda killed, shard: killed.record(shard).write_bytes(b""),
    "a record of something else": lambda killed, shard: killed.record(shard).write_text("[1]"),
    "the record of another file": swap,
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_a_file_that_is_not_sure_to_be_right_is_written_again(killed, spoil):
    first, second = killed.shards()[:FINISHED]
    before = identity([first, second])
    spoil(killed, first)
    merge(killed.plan, killed.out, MergeOptions(resume=True))
    after = identity(killed.shards())
    assert after[first.name] != before[first.name]
    assert after[second.name] == before[second.name]
    assert content(killed.out) == killed.whole


@pytest.mark.parametrize(
    "options", [{"scale": 0.5}, {"dtype": "float32"}, {"max_shard_size": 10**9}, {"max_shard_size": 30_000}], ids=str
)
def test_another_merge_keeps_nothing(killed, options):
    before = set(identity(killed.shards()).values())
    merge(killed.plan, killed.parent / "fresh", MergeOptions(**options))
    merge(killed.plan, killed.out, MergeOptions(**options, resume=True))
    assert not before & set(identity(killed.shards()).values())
    assert content(killed.out) == content(killed.parent / "fresh")


def other_adapter(plan):
    adapter = plan.checkpoint.adapter
    first = next(iter(adapter.leaf_sha256))
    adapter = dataclasses.replace(adapter, leaf_sha256={**adapter.leaf_sha256, first: "0" * 64})
    return dataclasses.replace(plan, checkpoint=dataclasses.replace(plan.checkpoint, adapter=adapter))


def test_another_adapter_keeps_nothing(killed):
    before = identity(killed.shards()[:FINISHED])
    merge(other_adapter(killed.plan), killed.out, MergeOptions(resume=True))
    after = identity(killed.shards())
    assert all(after[name] != before[name] for name in before)


@pytest.fixture
def silent(make_tree, save, inputs, tmp_path):
    """A run that does not say what its base was, as Tunix's; and the base, free to be changed."""
    base = tmp_path / "base"
    shutil.copytree(inputs[0], base)
    random = np.random.default_rng(3)
    out, inner = open_base(base).tensors["model.layers.2.mlp.up_proj.weight"][1].shape
    kernel = {
        "kernel_lora_a": random.normal(0, 0.3, (inner, 4)).astype(np.float32),
        "kernel_lora_b": random.normal(0, 0.3, (4, out)).astype(np.float32),
    }
    save(tmp_path / "tunix", {"layers": {"2": {"mlp": {"up_proj": kernel}}}}, None)
    (tmp_path / "tunix" / "7" / "adapter").rename(tmp_path / "tunix" / "7" / "model_params")
    return base, tmp_path / "tunix"


@pytest.fixture
def silent_plan():
    from portlab_merge.sources import Given

    def make(base, run):
        return make_plan(open_base(base), read_checkpoint(run, given=Given(alpha=8.0)))

    return make


@pytest.fixture
def stopped(monkeypatch):
    """A merge that an interrupt ends once it has finished so many files."""

    def run(plan, out, files, **options):
        added, add = [], journal.Journal.add

        def stop(self, path, file):
            add(self, path, file)
            added.append(path.name)
            if len(added) == files:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(journal.Journal, "add", stop)
            with pytest.raises(KeyboardInterrupt):
                merge(plan, out, MergeOptions(**options))
        return added

    return run


@pytest.mark.parametrize("options", [{}, {"max_shard_size": 25_000}], ids=["its files", "other files"])
@pytest.mark.parametrize("place", ["in what is finished", "in what is not"])
def test_a_base_that_changed_meanwhile_keeps_nothing_that_was_made_of_it(
    silent, silent_plan, stopped, tmp_path, options, place
):
    """Nothing but the weights' own bytes tells the two bases apart."""
    base, run = silent
    first = stopped(silent_plan(base, run), tmp_path / "new" / "out", FINISHED, resume=True, **options)
    shards = sorted(base.glob("*.safetensors"))
    flip(shards[0] if place == "in what is finished" else shards[-1])
    before = identity([tmp_path / "new" / f".out.partial-{os.getpid()}" / name for name in first])
    merge(silent_plan(base, run), tmp_path / "new" / "out", MergeOptions(resume=True, **options))
    after = identity(sorted((tmp_path / "new" / "out").glob("*.safetensors")))
    kept = place == "in what is not"
    assert all((after[name] == before[name]) == kept for name in first)
    merge(silent_plan(base, run), tmp_path / "fresh", MergeOptions(**options))
    assert content(tmp_path / "new" / "out") == content(tmp_path / "fresh")


def test_nothing_of_a_base_with_other_files_stays(silent, silent_plan, stopped, base, tmp_path):
    """The same model in one file instead of several, and a file beside the weights gone."""
    sharded, run = silent
    stopped(silent_plan(sharded, run), tmp_path / "new" / "out", FINISHED, resume=True)
    staging = tmp_path / "new" / f".out.partial-{os.getpid()}"
    shutil.copytree(sharded / "extra", staging / "extra")
    merge(silent_plan(base, run), tmp_path / "new" / "out", MergeOptions(resume=True))
    merge(silent_plan(base, run), tmp_path / "fresh", MergeOptions())
    assert content(tmp_path / "new" / "out") == content(tmp_path / "fresh")


def test_without_resume_all_is_written_anew(killed):
    before = set(identity(killed.shards()).values())
    merge(killed.plan, killed.out, MergeOptions())
    assert not before & set(identity(killed.shards()).values())
    assert content(killed.out) == killed.whole
    assert [path.name for path in killed.parent.iterdir()] == ["out"]


def test_a_wrong_base_that_shows_at_the_end_leaves_nothing(killed, inputs, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(inputs[0], base)
    flip(sorted(base.glob("*.safetensors"))[-1])
    with pytest.raises(UserError, match="wrong base"):
        merge(plan_of(base, inputs[1]), killed.out, MergeOptions(resume=True))
    assert list(killed.parent.iterdir()) == []


def test_an_interrupt_with_resume_leaves_what_is_finished(inputs, stopped, whole, tmp_path):
    out = tmp_path / "new" / "out"
    finished = stopped(plan_of(*inputs), out, FINISHED, resume=True)
    assert not out.exists()
    (staging,) = out.parent.iterdir()
    before = identity(staging / name for name in finished)
    merge(plan_of(*inputs), out, MergeOptions(resume=True))
    assert {name: identity(out.glob("*.safetensors"))[name] for name in finished} == before
    assert content(out) == whole


def test_an_interrupt_without_resume_leaves_nothing(inputs, stopped, tmp_path):
    stopped(plan_of(*inputs), tmp_path / "new" / "out", FINISHED)
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize("resume", [True, False])
def test_the_disk_has_to_hold_only_what_is_not_there(killed, monkeypatch, resume):
    """The space of a killed merge is used again, or freed, before anything is written."""
    left = sum(path.stat().st_size for path in killed.staging.rglob("*") if path.is_file())
    needs = []
    monkeypatch.setattr(overlay, "require_free_space", lambda folder, needed, what: needs.append(needed))
    merge(killed.plan, killed.out, MergeOptions(resume=resume))
    merge(killed.plan, killed.parent / "fresh", MergeOptions())
    assert needs[1] - needs[0] == left > 0


def test_the_command_line_goes_on(killed, inputs, command):
    base, run = inputs
    before = identity(killed.shards()[:FINISHED])
    result = command("merge", "--ckpt", run, "--base", base, "--out", killed.out, "--resume")
    assert result.returncode == 0, result.stderr
    assert re.search(r"Merged", result.stdout)
    assert identity(killed.shards()[:FINISHED]) == before
    assert content(killed.out) == killed.whole
