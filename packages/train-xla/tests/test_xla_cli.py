"""train-xla on the command line: what it leaves, what it refuses in one line, and what it answers without PyTorch."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from tiny_run import report, saved_steps
from xla_runs import Lab

from portlab_spec import cli
from portlab_spec.recipe import load_recipe
from portlab_xla.cli import main, parse


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    """train-xla sets variables for the libraries; they are put back afterwards."""
    monkeypatch.setattr(os, "environ", os.environ.copy())


@pytest.fixture
def call(capsys):
    """Calls train-xla in this process. Returns its exit code, stdout and stderr."""

    def run(*args):
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.run("train-xla", main, list(args))
        return end.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def refused(call, lab, tmp_path):
    """Calls train-xla on the tiny model. Returns its one line of complaint."""

    def run(*args, device="cpu", **changes):
        code, _, error = call(*lab.arguments(tmp_path / "out", *args, device=device, **changes))
        assert code == 2, error
        assert error.startswith("train-xla: error: ")
        assert error.count("\n") == 1
        assert not (tmp_path / "out").exists()
        return error

    return run


@pytest.fixture(scope="module")
def whole(lab):
    """A finished run, in a process of its own."""
    out = lab.folder / "whole"
    done = lab.run(lab.arguments(out, eval_every=3, log_every=2))
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
    assert "Question:" in done.stdout
    assert done.stderr == ""


def test_it_says_what_it_trains_and_how_the_batch_is_shared_out(whole):
    assert (
        "training adapters of 2 self_attn.q_proj, 2 self_attn.v_proj, 2 mlp.down_proj, 7 token rows" in whole[1].stdout
    )
    line = "4 examples a step, over all devices: 1 micro-batch(es) x 1 group(s) of devices x 4"
    assert line in whole[1].stdout


def test_the_report_is_that_of_every_trainer(whole):
    found = report(whole[0])
    assert found["backend"] == "xla"
    assert found["device"] == {
        "platform": "cpu", "kind": "cpu", "count": 1, "graphs": 0, "graphs_after_warm_up": 0,
    }  # fmt: skip
    assert len(found["loss"]) == 6
    assert [step for step, _ in found["evals"]] == [3, 6]
    assert set(found["seconds"]) == {"prepare", "before", "train", "after", "export"}
    assert found["after"]["metrics"]["call_exact"]["count"] == 5
    assert {"torch", "trl", "peft", "transformers"} <= set(found["versions"])


def test_the_same_command_reuses_every_stage(whole, call):
    before = report(whole[0])
    code, stdout, _ = call("--recipe", str(whole[0] / "recipe.json"), "--out", str(whole[0]), "--device", "cpu")
    assert code == 0
    assert stdout.count("(cached)") == 3
    assert report(whole[0])["loss"] == before["loss"]


def test_json_is_the_report_and_nothing_else(call, lab, tmp_path):
    code, stdout, _ = call(*lab.arguments(tmp_path / "run", "--json", steps=3))
    assert code == 0
    assert json.loads(stdout) == report(tmp_path / "run")


def test_a_run_is_refused_with_other_settings(whole, call):
    recipe = ("--recipe", str(whole[0] / "recipe.json"), "--seed", "7")
    code, _, error = call(*recipe, "--out", str(whole[0]), "--device", "cpu")
    assert code == 2
    assert "holds a run with other settings (seed)" in error


def test_a_folder_of_train_jax_is_refused(whole, call, tmp_path):
    folder = shutil.copytree(whole[0], tmp_path / "jax")
    (folder / "backend.json").unlink()
    code, _, error = call("--recipe", str(folder / "recipe.json"), "--out", str(folder), "--device", "cpu")
    assert code == 2
    assert "holds a run of train-jax. Choose another --out" in error


def test_a_damaged_checkpoint_is_one_line(whole, call, tmp_path):
    folder = shutil.copytree(whole[0], tmp_path / "run")
    newest = folder / "checkpoints" / str(saved_steps(folder)[-1])
    (newest / "optimizer.safetensors").write_bytes(b"")
    code, _, error = call("--recipe", str(folder / "recipe.json"), "--out", str(folder), "--device", "cpu")
    assert code == 2
    assert error.count("\n") == 1
    assert f"{newest}: optimizer.safetensors is not what was written" in error


def test_an_adapter_that_does_not_verify_is_a_failed_check(call, lab, tmp_path, monkeypatch):
    monkeypatch.setattr("portlab_hf.export.TOLERANCE", {torch.float32: -1.0})
    code, _, error = call(*lab.arguments(tmp_path / "run", steps=3))
    assert code == 1
    assert "logits of what was exported differ by" in error
    assert error.count("\n") == 1


def test_a_disk_that_fills_up_while_saving_is_one_line(call, lab, tmp_path, monkeypatch):
    def fail(path, data):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("pathlib.Path.write_bytes", fail)
    code, _, error = call(*lab.arguments(tmp_path / "run", steps=3))
    assert code == 2
    assert "No space left on device. Free some space" in error
    assert error.count("\n") == 1
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


# What it refuses


UNSUPPORTED = {
    "method": ({"method": "full"}, "method full (set lora)"),
    "lora.quantize": ({"lora": {"quantize": "nf4"}}, "lora.quantize nf4 (set none)"),
    "remat dots": ({"remat": "dots"}, "remat dots (set none or block)"),
    "remat offload": ({"remat": "offload"}, "remat offload (set none or block)"),
    "attention splash": ({"attention": "splash"}, "attention splash (set auto)"),
    "attention cudnn": ({"attention": "cudnn"}, "attention cudnn (set auto)"),
    "profile.steps": ({"profile": {"steps": 2}}, "profile.steps (set 0)"),
}


@pytest.mark.parametrize(("changes", "says"), UNSUPPORTED.values(), ids=UNSUPPORTED)
@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_what_it_does_not_do_is_refused_by_its_key(refused, changes, says, device):
    line = refused(device=device, **changes)
    assert f"train-xla does not do what the recipe asks for: {says}. Change these, or run it with train-jax" in line


def test_all_of_it_at_once_is_one_line(refused):
    line = refused(remat="dots", attention="splash", profile={"steps": 1})
    assert "remat dots (set none or block), attention splash (set auto), profile.steps (set 0)" in line


def test_no_cuda(refused):
    assert "--device cuda: this PyTorch sees no CUDA device. Use --device cpu or xla" in refused(device="cuda")


def test_torch_tpu_is_refused_with_its_reason(refused):
    line = refused(device="tpu")
    assert "--device tpu: TorchTPU cannot train yet: torch-tpu is not installed; accelerate 1.15" in line
    assert "Use --device xla" in line


def test_an_unknown_device_is_bad_usage(call, lab, tmp_path):
    code, _, error = call(*lab.arguments(tmp_path / "out", device="gpu"))
    assert code == 2
    assert "cuda" in error
    assert not (tmp_path / "out").exists()


def test_an_unknown_option_is_bad_usage(call):
    code, _, error = call("--lora.rnak", "8")
    assert code == 2
    assert "lora.rank" in error


def test_several_processes(refused, monkeypatch):
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
    line = refused()
    assert "WORLD_SIZE: was launched as 2 processes, and --device cpu is one device. Start it without torchrun" in line


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
    assert 'pip install "portlab-train-xla[trackio]"' in refused(trackers=["trackio"])


def test_missing_inputs(refused, tmp_path):
    assert "nowhere" in refused(model=str(tmp_path / "nowhere"))
    assert "missing.jsonl" in refused(data=str(tmp_path / "missing.jsonl"))


# Going on from an adapter


TRAINED = {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj", "down_proj"]}
OTHER_ADAPTERS = {
    "rank": ({"rank": 2}, "was trained with r 4, and the recipe has 2"),
    "alpha": ({"alpha": 4}, "was trained with lora_alpha 8, and the recipe has 4.0"),
    "scaling": ({"use_rslora": True}, "was trained with use_rslora False, and the recipe has True"),
    "pattern": ({"rank_pattern": {"q_proj": 2}}, "was trained with rank_pattern {}, and the recipe has {'q_proj': 2}"),
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


def test_a_damaged_adapter_to_go_on_from(refused, whole, tmp_path):
    folder = shutil.copytree(whole[0] / "adapter", tmp_path / "adapter")
    (folder / "adapter_model.safetensors").write_bytes(b"no tensors")
    line = refused(lora=TRAINED | {"start_from": str(folder)})
    assert f"{folder}: adapter_model.safetensors cannot be read" in line


@pytest.mark.parametrize("where", ["", "adapter", "checkpoints/6"])
def test_a_run_goes_on_from_an_adapter(lab, whole, tmp_path, where):
    start = {"lora": TRAINED | {"start_from": str(whole[0] / where)}, "steps": 3}
    _, trained = lab.train(tmp_path / "run", **start)
    assert trained.log.losses[0] < report(whole[0])["loss"][0] - 0.3


# Options


@pytest.mark.parametrize(
    ("args", "key", "value"),
    [
        (["--mesh.tp", "4"], "mesh.tp", 4),
        (["--mesh.data", "None"], "mesh.data", None),
        (["--lora.start-from", "runs/a"], "lora.start_from", "runs/a"),
        (["--lora.rank-pattern", "q_proj", "4", "v_proj", "8"], "lora.rank_pattern", {"q_proj": 4, "v_proj": 8}),
        (["--no-share-prefix"], "share_prefix", False),
        (["--log-every", "50"], "log_every", 50),
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


@pytest.mark.parametrize("args", [["--help"], ["--devise", "cpu"], ["--recipe", "nope"]], ids=" ".join)
def test_help_and_bad_usage_answer_without_pytorch(args):
    script = (
        "import sys\nfrom portlab_spec import cli\nfrom portlab_xla.cli import main\n"
        "try:\n    cli.run('train-xla', main, sys.argv[1:])\n"
        "finally:\n    heavy = {'torch', 'torch_xla', 'transformers', 'trl', 'peft'} & set(sys.modules)\n"
        "    assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script, *args], capture_output=True, text=True, check=False)
    assert done.returncode == (0 if args == ["--help"] else 2), done.stderr
    assert "Traceback" not in done.stderr
