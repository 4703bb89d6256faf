"""The command: exit codes, files, one clear line."""

import json
import shutil

import pytest
from port_cases import CONFIGS

from portlab_port import cli
from portlab_spec.cli import run as run_command
from portlab_spec.recipe import load_recipe


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    shutil.copy(CONFIGS / "trl_sft.yaml", "sft.yaml")

    def call(*argv):
        with pytest.raises(SystemExit) as ended:
            run_command("portlab-port", cli.main, argv)
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return call


def test_it_writes_a_recipe_that_loads_and_prints_the_report(run, tmp_path):
    code, out, err = run("sft.yaml", "--rows", "15011", "--devices", "4", "--out", "mine.yaml")
    assert (code, err) == (0, "")
    assert out.startswith("# sft.yaml (trl) as a Portlab recipe")
    recipe = load_recipe("mine.yaml")
    assert (recipe.name, recipe.batch_size, recipe.steps) == ("mine", 64, 470)  # 939 batches of 16 are 235 updates
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine.yaml", "sft.yaml"]


def test_without_a_file_to_write_the_recipe_is_printed(run, tmp_path):
    code, out, _ = run("sft.yaml", "--rows", "99")
    assert code == 0
    (tmp_path / "copy.yaml").write_text(out.partition("```yaml\n")[2].removesuffix("```\n"))
    assert load_recipe("copy.yaml").model == "google/gemma-3-270m-it"


def test_a_report_for_machines(run, tmp_path):
    code, out, _ = run("sft.yaml", "--rows", "15011", "--out", "r.yaml", "--report", "report.json")
    assert code == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert out == "sft.yaml: 20 carry over, 10 change, 0 cannot be said, 2 have no place here, 0 not understood\n"
    assert sum(report["counts"].values()) == len(report["notes"]) == 32
    rate = next(note for note in report["notes"] if note["key"] == "learning_rate")
    assert (rate["value"], rate["fate"], rate["becomes"]) == ("2e-4", "carries", "optimizer.learning_rate: 0.0002")
    assert report["recipe"] == load_recipe("r.yaml").model_dump(mode="json")
    printed = json.loads(run("sft.yaml", "--rows", "15011", "--json")[1])
    assert {**printed["recipe"], "name": ""} == {**report["recipe"], "name": ""}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("sft.yaml",), ("num_train_epochs", "--rows N")),
        (("none.yaml",), ("none.yaml", "No such file")),
        ((".",), ("is a folder",)),
        (("sft.yaml", "--rows", "0"), ("--rows must be 1 or more",)),
        (("sft.yaml", "--rows", "9", "--out", "sft.yaml"), ("sft.yaml", "already exists")),
        (("sft.yaml", "--rows", "9", "--report", "sft.yaml"), ("already exists",)),
        (("sft.yaml", "--rows", "9", "--set", "learning_rate"), ("KEY=VALUE",)),
        (("sft.yaml", "--rows", "9", "--set", "frob=1"), ("frob is no setting",)),
        (("sft.yaml", "--rows", "9", "--set", "learning_rate=fast"), ("learning_rate must be a number",)),
        (("sft.yaml", "--rows", "9", "--style", "script"), ("is not Python",)),
        (("sft.yaml", "--rows", "9", "--format", "frob"), ("no format 'frob'",)),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(run, argv, words, tmp_path):
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert err.startswith("portlab-port: error: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err
    assert [p.name for p in tmp_path.iterdir()] == ["sft.yaml"]


def test_unknown_keys_are_named_and_strict_refuses_them(run, tmp_path):
    with (tmp_path / "sft.yaml").open("a") as file:
        file.write("learning_rte: 1\n")
    code, out, _ = run("sft.yaml", "--rows", "9")
    assert code == 0
    assert "1 not understood" in out
    assert "| `learning_rte` | 1 | sft.yaml:28 |" in out
    code, _, err = run("sft.yaml", "--rows", "9", "--strict")
    assert (code, "not understood: learning_rte" in err) == (2, True)


def test_what_is_accepted_and_what_is_set(run, tmp_path):
    with (tmp_path / "sft.yaml").open("a") as file:
        file.write("use_dora: true\nlabel_smoothing_factor: 0.1\n")
    code, _, err = run("sft.yaml", "--rows", "9", "--accept", "use_dora")
    assert (code, "use_dora" in err, "label_smoothing_factor: 0.1" in err) == (2, False, True)
    code, out, _ = run("sft.yaml", "--rows", "9", "--accept", "use_dora", "--set", "label_smoothing_factor=0")
    assert code == 0
    assert "1 cannot be said" in out


def test_options_that_may_be_repeated(run, tmp_path):
    with (tmp_path / "sft.yaml").open("a") as file:
        file.write("use_dora: true\nlabel_smoothing_factor: 0.1\n")
    both = ("--accept", "use_dora", "--accept", "label_smoothing_factor", "--set", "seed=7", "--set", "lora_r=4")
    code, out, err = run(*both, "--rows", "9", "sft.yaml", "--out", "r.yaml")
    assert (code, err) == (0, "")
    assert "2 cannot be said" in out
    assert (load_recipe("r.yaml").seed, load_recipe("r.yaml").lora.rank) == (7, 4)


def test_bytes_that_are_no_text(run, tmp_path):
    (tmp_path / "sft.yaml").write_bytes(b"\xff\xfe\x00")
    assert "is not text" in run("sft.yaml")[2]
