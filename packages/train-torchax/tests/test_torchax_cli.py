"""train-torchax on the command line: what it leaves, what it refuses in one line, and what it answers without JAX."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from tiny_run import LLAMA, report, save_model, saved_steps
from torchax_runs import Lab

from portlab_spec import cli
from portlab_spec.recipe import load_recipe
from portlab_spec.report import Report
from portlab_torchax.cli import main, parse


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture(autouse=True)
def own_settings(monkeypatch):
    """train-torchax sets variables for the libraries, and where JAX keeps programs; neither outlives a test."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr("portlab_torchax.main_job.use_compilation_cache", lambda: None)


@pytest.fixture
def call(capsys):
    """Calls train-torchax in this process. Returns its exit code, stdout and stderr."""

    def run(*args):
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.run("train-torchax", main, list(args))
        return end.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def refused(call, lab, tmp_path):
    """Calls train-torchax on the tiny model. Returns its one line of complaint."""

    def run(*args, **changes):
        code, _, error = call(*lab.arguments(tmp_path / "out", *args, **changes))
        assert code == 2, error
        assert error.startswith("train-torchax: error: ")
        assert error.count("\n") == 1
        assert not (tmp_path / "out").exists()
        return error

    return run


@pytest.fixture(scope="module")
def whole(lab):
    """A finished run, in a process of its own."""
    out = lab.folder / "whole"
    done = lab.run(lab.arguments(out, eval_every=3))
    assert done.returncode == 0, done.stderr
    return out, done


# What it leaves


def test_a_run_leaves_every_result(whole):
    out, done = whole
    names = ["report.json", "loss.png", "before.json", "after.json", "merged/model.safetensors", "adapter/README.md"]
    names += ["merged/tokenizer.json", "adapter/adapter_model.safetensors", "adapter/adapter_config.json"]
    for name in names:
        assert (out / name).stat().st_size > 0
    assert not [path for path in out.rglob("*") if "partial" in path.name or path.name.endswith(".new")]
    assert done.stderr == ""


def test_a_run_folder_holds_no_pickles(whole):
    files = [path for path in whole[0].rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".jsonl", ".safetensors", ".md", ".png"}
    assert not [path for path in files if path.read_bytes()[:2] in (b"\x80\x02", b"\x80\x04", b"\x80\x05", b"PK")]


def test_the_folder_is_marked_as_this_trainers(whole):
    assert json.loads((whole[0] / "backend.json").read_text()) == {"backend": "torchax"}


def test_it_says_what_it_trains_and_what_the_step_takes(whole):
    assert (
        "training adapters of 2 self_attn.q_proj, 2 self_attn.v_proj, 2 mlp.down_proj, 7 token rows" in whole[1].stdout
    )
    assert whole[1].stdout.count("compiled the step for") == 1
    assert "activations" in whole[1].stdout


def test_the_table_holds_loss_and_perplexity_before_and_after(whole):
    found, lines = report(whole[0]), whole[1].stdout.splitlines()
    cells = {name: [c.strip() for c in line.split("│")[2:4]] for line in lines for name in ("loss", "perplexity")
             if line.startswith(f"│ {name} ")}  # fmt: skip
    assert [float(cell) for cell in cells["loss"]] == [round(found[when]["loss"], 4) for when in ("before", "after")]
    assert float(cells["perplexity"][0]) > float(cells["perplexity"][1])
    assert "Question:" in whole[1].stdout


def test_the_report_is_that_of_every_trainer(whole):
    found = Report.model_validate(report(whole[0]))
    assert found.backend == "torchax"
    assert found.device["platform"] == "cpu"
    assert (found.device["count"], found.device["compilations"]) == (1, 1)
    assert len(found.loss) == 6
    assert [step for step, _ in found.evals] == [3, 6]
    assert found.after.metrics["call_exact"].count == 5
    assert found.after.loss < found.before.loss
    assert {"jax", "optax", "torch", "torchax", "peft", "transformers"} <= set(found.versions)


def test_every_step_has_a_line_of_metrics(whole):
    lines = [json.loads(line) for line in (whole[0] / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert [line["loss"] for line in steps] == report(whole[0])["loss"]
    assert {"grad_norm", "token_accuracy", "learning_rate"} <= set(steps[0])


def test_the_same_command_reuses_every_stage(whole, call):
    before = report(whole[0])
    code, stdout, _ = call("--recipe", str(whole[0] / "recipe.json"), "--out", str(whole[0]))
    assert code == 0
    assert stdout.count("(cached)") == 3
    assert report(whole[0])["loss"] == before["loss"]


def test_json_is_the_report_and_nothing_else(whole, call):
    code, stdout, _ = call("--recipe", str(whole[0] / "recipe.json"), "--out", str(whole[0]), "--json")
    assert code == 0
    assert json.loads(stdout) == report(whole[0])


# What it refuses


def test_a_run_is_refused_with_other_settings(whole, call):
    code, _, error = call("--recipe", str(whole[0] / "recipe.json"), "--seed", "7", "--out", str(whole[0]))
    assert code == 2
    assert "holds a run with other settings (seed)" in error


@pytest.mark.parametrize("other", ["jax", "xla"])
def test_a_folder_of_another_trainer_is_refused(whole, call, tmp_path, other):
    folder = shutil.copytree(whole[0], tmp_path / "other")
    (folder / "backend.json").write_text(json.dumps({"backend": other}))
    code, _, error = call("--recipe", str(folder / "recipe.json"), "--out", str(folder))
    assert code == 2
    assert f"holds a run of train-{other}. Choose another --out" in error


def test_a_damaged_checkpoint_is_one_line(whole, call, tmp_path):
    folder = shutil.copytree(whole[0], tmp_path / "run")
    newest = folder / "checkpoints" / str(saved_steps(folder)[-1])
    (newest / "optimizer.safetensors").write_bytes(b"")
    code, _, error = call("--recipe", str(folder / "recipe.json"), "--out", str(folder))
    assert code == 2
    assert error.count("\n") == 1
    assert f"{newest}: optimizer.safetensors is not what was written" in error


UNSUPPORTED = {
    "int8": ({"lora": {"quantize": "int8"}}, "lora.quantize int8 (set none)"),
    "nf4": ({"lora": {"quantize": "nf4"}}, "lora.quantize nf4 (set none)"),
    "splash": ({"attention": "splash"}, "attention splash (set auto)"),
    "cudnn": ({"attention": "cudnn"}, "attention cudnn (set auto)"),
    "profile": ({"profile": {"steps": 2}}, "profile.steps (set 0)"),
    "all at once": (
        {"lora": {"quantize": "int8"}, "attention": "splash", "profile": {"steps": 1}},
        "lora.quantize int8 (set none), attention splash (set auto), profile.steps (set 0)",
    ),
}


@pytest.mark.parametrize(("changes", "says"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_what_it_does_not_do_is_refused_by_its_key(refused, changes, says):
    line = refused(**changes)
    assert f"train-torchax does not do what the recipe asks for: {says}. Change these, or run it with train-jax" in line


def test_token_rows_of_a_model_whose_head_is_apart(refused, tmp_path):
    line = refused(model=str(save_model(tmp_path / "untied", LLAMA)))
    assert "lora.train_control_rows of a model whose head is apart from its embedding (set false)" in line
    assert "train-jax" not in line


def test_an_unknown_option_is_bad_usage(call):
    code, _, error = call("--lora.rnak", "8")
    assert code == 2
    assert "lora.rank" in error


def test_an_unknown_key_of_a_recipe(refused):
    assert "stepz" in refused(stepz=3)


def test_a_mesh_that_does_not_fit(refused):
    line = refused(mesh={"fsdp": 3})
    assert "mesh: data 1 x fsdp 3 x tp 1 is not the 1 device(s) there are" in line


def test_a_target_that_matches_nothing(refused):
    assert "'w_proj' matches no linear layer" in refused(lora={"targets": ["q_proj", "w_proj"]})


def test_a_pattern_that_matches_nothing(refused):
    line = refused(lora={"targets": ["q_proj"], "rank_pattern": {"v_proj": 2}})
    assert "lora.rank_pattern: the pattern 'v_proj' matches no adapted layer" in line


def test_rows_longer_than_the_models_positions(refused):
    assert "max_length 2000 is more than the 1024 positions of the model" in refused(max_length=2000)


def test_a_row_whose_answer_would_be_cut_off(refused):
    assert "its answer would be cut off" in refused(max_length=64)


def test_a_tracker_that_is_not_installed(refused, monkeypatch):
    monkeypatch.setattr("portlab_spec.run.trackers.MODULES", {"trackio": "no_such_module"})
    assert 'pip install "portlab-train-torchax[trackio]"' in refused(trackers=["trackio"])


def test_missing_inputs(refused, tmp_path):
    assert "nowhere" in refused(model=str(tmp_path / "nowhere"))
    assert "missing.jsonl" in refused(data=str(tmp_path / "missing.jsonl"))


# Checks that fail


def test_a_loss_that_is_no_number_ends_the_run(call, lab, tmp_path):
    code, _, error = call(*lab.arguments(tmp_path / "run", optimizer={"learning_rate": 1e30, "warmup_steps": 0}))
    assert code == 1
    assert error.startswith("train-torchax: error: ")
    assert error.count("\n") == 1
    assert "not finite" in error or "nan" in error.lower()


def test_an_adapter_that_does_not_verify(whole, call, tmp_path, monkeypatch):
    monkeypatch.setattr("portlab_hf.export.TOLERANCE", {torch.float32: -1.0})
    folder = shutil.copytree(whole[0], tmp_path / "run")
    code, _, error = call("--recipe", str(folder / "recipe.json"), "--out", str(folder))
    assert code == 1
    assert "logits of what was exported differ by" in error
    assert error.count("\n") == 1


def test_a_disk_that_fills_up_while_saving_is_one_line(whole, call, tmp_path, monkeypatch):
    def fail(path, data):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("pathlib.Path.write_bytes", fail)
    folder = shutil.copytree(whole[0], tmp_path / "run")
    shutil.rmtree(folder / "checkpoints")
    code, _, error = call("--recipe", str(folder / "recipe.json"), "--out", str(folder))
    assert code == 2
    assert "No space left on device. Free some space" in error
    assert error.count("\n") == 1
    assert not list((folder / "checkpoints").iterdir())


# Going on from an adapter


TRAINED = {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj", "down_proj"]}
OTHER_ADAPTERS = {
    "rank": ({"rank": 2}, "was trained with r 4, and the recipe has 2"),
    "targets": ({"targets": ["q_proj", "v_proj"]}, "is another adapter than the recipe's"),
    "token rows": ({"train_control_rows": False}, "was trained with trainable_token_indices"),
}


@pytest.mark.parametrize(("changes", "says"), OTHER_ADAPTERS.values(), ids=OTHER_ADAPTERS)
def test_another_adapter_than_the_recipes(refused, whole, changes, says):
    line = refused(lora=TRAINED | changes | {"start_from": str(whole[0])})
    assert f"{whole[0]}/adapter: {says}" in line


def test_no_adapter_to_go_on_from(refused, tmp_path):
    line = refused(lora=TRAINED | {"start_from": str(tmp_path)})
    assert f"{tmp_path}: holds no adapter_config.json and adapter_model.safetensors" in line


def test_a_run_goes_on_from_an_adapter(lab, whole, tmp_path):
    start = {"lora": TRAINED | {"start_from": str(whole[0])}, "steps": 3}
    _, trained = lab.train(tmp_path / "run", **start)
    assert trained.log.losses[0] < report(whole[0])["loss"][0] - 0.3


# Options


@pytest.mark.parametrize(
    ("args", "key", "value"),
    [
        (["--mesh.tp", "4"], "mesh.tp", 4),
        (["--method", "full"], "method", "full"),
        (["--optimizer.name", "adafactor"], "optimizer.name", "adafactor"),
        (["--lora.start-from", "runs/a"], "lora.start_from", "runs/a"),
        (["--no-share-prefix"], "share_prefix", False),
        (["--remat", "block"], "remat", "block"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_an_option_sets_its_key_alone(args, key, value):
    section, _, leaf = key.rpartition(".")
    dumps = [recipe.model_dump() for recipe in (parse(args).settings, load_recipe("functiongemma-fitness"))]
    found, _ = [(dump[section] if section else dump).pop(leaf) for dump in dumps]
    assert found == value
    assert dumps[0] == dumps[1]


@pytest.mark.parametrize("args", [["--help"], ["--device", "cpu"], ["--recipe", "nope"]], ids=" ".join)
def test_help_and_bad_usage_answer_without_jax_and_pytorch(args):
    script = (
        "import sys\nfrom portlab_spec import cli\nfrom portlab_torchax.cli import main\n"
        "try:\n    cli.run('train-torchax', main, sys.argv[1:])\n"
        "finally:\n    heavy = {'jax', 'torch', 'torchax', 'transformers', 'peft', 'optax'} & set(sys.modules)\n"
        "    assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script, *args], capture_output=True, text=True, check=False)
    assert done.returncode == (0 if args == ["--help"] else 2), done.stderr
    assert "Traceback" not in done.stderr
