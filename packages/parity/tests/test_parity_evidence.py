"""Evidence on disk, and the command that compares it."""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import parity_faults
import pytest
from parity_work import toy_work

from portlab_hf import plain_script
from portlab_hf.evidence import collect
from portlab_parity.cli import main
from portlab_parity.compare import ROUNDING, compare, roundings
from portlab_parity.run import Backend, find_backend, run_backend
from portlab_spec.errors import CheckFailed, UserError
from portlab_spec.evidence import Evidence, find_places, read_work
from portlab_spec.evidence.places import token_tensors
from portlab_spec.packing import Packing, pack_batch, plan


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evidence")
    work = toy_work(folder, "gemma3, two kv heads", steps=1)
    collect(work, plain_script, "plain").save(folder / "plain")
    collect(work, parity_faults.on_model(parity_faults.one_rope), "mine").save(folder / "mine")
    return folder


def changed(folder, name, change):
    found = Evidence.load(folder / "plain")
    value = np.array(found.tensors[name])
    change(value)
    return dataclasses.replace(found, tensors={**found.tensors, name: value})


def test_it_comes_back_as_it_was(folder, tmp_path):
    found = Evidence.load(folder / "plain")
    found.save(tmp_path / "again")
    again = Evidence.load(tmp_path / "again")
    assert again.about == found.about
    assert all(np.array_equal(again.tensors[name], x) for name, x in found.tensors.items())


def test_a_missing_tensor_is_said(folder, tmp_path):
    found = Evidence.load(folder / "plain")
    less = dataclasses.replace(found, tensors={k: v for k, v in found.tensors.items() if k != "logits"})
    with pytest.raises(UserError, match="lacks logits"):
        less.save(tmp_path / "less")
    assert not (tmp_path / "less").exists()


def test_another_schema_is_refused(folder, tmp_path):
    Evidence.load(folder / "plain").save(tmp_path / "new")
    path = tmp_path / "new" / "evidence.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"more": 1}))
    with pytest.raises(UserError, match="is not the evidence"):
        Evidence.load(tmp_path / "new")


def test_the_first_difference_is_the_one_that_is_told(folder):
    def change(x):
        x[3, 7] += 0.5

    right = Evidence.load(folder / "plain")
    wrong = changed(folder, "hidden.layer.01", change)
    found = compare(right, wrong).difference
    assert (found.stage, found.tensor, found.layer) == ("layers", "hidden.layer.01", 1)
    assert found.where == "row 0, token 3, dimension 7"
    assert found.values[1] - found.values[0] == pytest.approx(0.5, rel=1e-5)


def test_no_number_is_a_difference(folder):
    def change(x):
        x[0] = np.nan

    found = compare(Evidence.load(folder / "plain"), changed(folder, "loss", change)).difference
    assert (found.stage, found.where) == ("loss", "a value that is no number")


def test_roundings_are_those_of_the_dtype():
    one = np.ones(4)
    assert roundings(one, one + 2 * ROUNDING["float32"], "float32").max() == pytest.approx(1, rel=1e-3)
    assert roundings(one, one + 2 * ROUNDING["bfloat16"], "bfloat16").max() == pytest.approx(1, rel=1e-2)


def test_other_work_is_not_compared(folder):
    right = Evidence.load(folder / "plain")
    about = right.about.model_copy(update={"rows": dict.fromkeys(right.about.rows, "0" * 16)})
    with pytest.raises(UserError, match="different work: their rows"):
        compare(right, dataclasses.replace(right, about=about))


def test_the_command_agrees(folder, capsys):
    assert main(["compare", str(folder / "plain"), str(folder / "plain")]) == 0
    assert "plain and plain agree" in capsys.readouterr().out


def test_the_command_names_the_cause(folder, capsys):
    with pytest.raises(CheckFailed, match="differ in layers: RoPE base in mine"):
        main(["compare", str(folder / "plain"), str(folder / "mine")])
    out = capsys.readouterr().out
    assert "inner.01.attended" in out
    assert "cause  RoPE base, in mine" in out


def test_the_command_tells_machines(folder, capsys):
    with pytest.raises(CheckFailed):
        main(["compare", str(folder / "plain"), str(folder / "mine"), "--json"])
    (found,) = json.loads(capsys.readouterr().out)
    assert found["cause"] == "RoPE base"
    assert found["difference"]["tensor"] == "inner.01.attended"


@pytest.mark.parametrize("share", [True, False])
def test_rows_are_found_in_a_packed_batch(folder, share):
    rows = read_work(folder / "work").steps[0]
    layout = plan([rows], Packing(groups=2, share_prefix=share, window=6), min_block=8).layout(0)
    places = find_places(pack_batch(rows, layout), rows)
    found = token_tensors(places)
    for i, row in enumerate(rows):
        assert found["ids"][i][found["real"][i]].tolist() == list(row.ids)
        assert found["target"][i][found["real"][i]].tolist() == list(row.loss)
    with pytest.raises(UserError, match="does not hold the row"):
        find_places(pack_batch(rows[:2], layout), rows)


def test_a_script_is_run_in_a_process_of_its_own(folder, tmp_path):
    import sys
    from pathlib import Path

    script = tmp_path / "mine.py"
    script.write_text(Path(plain_script.__file__).read_text())
    backend = find_backend(str(script), {"mine": Path(sys.executable)}, tmp_path)
    evidence, _ = run_backend(backend, folder / "work", tmp_path / "mine")
    found = compare(Evidence.load(folder / "plain"), evidence)
    assert (found.backends, found.difference) == (("plain", "mine"), None)


def test_a_backend_that_fails_says_its_last_words(folder, tmp_path):
    backend = Backend("broken", (sys.executable, "-c", "raise SystemExit('x: error: out of luck')"))
    with pytest.raises(CheckFailed, match="out of luck"):
        run_backend(backend, folder / "work", tmp_path / "broken")


def test_a_backend_that_hangs_is_ended_with_what_it_started(folder, tmp_path):
    program = "import subprocess, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
    with pytest.raises(CheckFailed, match="took longer than 2 s"):
        run_backend(Backend("slow", (sys.executable, "-c", program)), folder / "work", tmp_path / "slow", timeout=2)
    child = int((tmp_path / "slow.log").read_text())
    state = Path(f"/proc/{child}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_what_is_no_program_is_one_line(folder, tmp_path):
    with pytest.raises(UserError, match="cannot be run"):
        run_backend(Backend("none", (str(tmp_path),)), folder / "work", tmp_path / "none")


def test_unknown_backends_are_refused(tmp_path):
    with pytest.raises(UserError, match="no backend 'tpu'"):
        find_backend("tpu", {}, tmp_path)
    with pytest.raises(UserError, match="no such script"):
        find_backend("none.py", {}, tmp_path)
    with pytest.raises(UserError, match="no environment has the backend torchax"):
        find_backend("torchax", {}, tmp_path)
