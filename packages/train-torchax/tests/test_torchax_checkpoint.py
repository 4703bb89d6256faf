"""Checkpoints of train-torchax: what is in them, which are kept, and that a run goes on as if nothing had been."""

import json
import shutil

import jax
import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tiny_run import Interrupted, saved_steps
from torchax_runs import Lab

from portlab_hf.model import load_base
from portlab_spec.errors import UserError

FILES = ["adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors", "state.json"]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture(scope="module", autouse=True)
def compiled_once(lab):
    """Runs of the same settings share their programs."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(lab.folder / "compiled"))
    yield
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture(scope="module")
def whole(lab):
    """An uninterrupted run, with all of its checkpoints."""
    out = lab.folder / "whole"
    return out, *lab.train(out, keep=9)


@pytest.fixture
def copied(whole, tmp_path):
    """A copy of the uninterrupted run, to damage."""
    return shutil.copytree(whole[0], tmp_path / "run")


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


# What is in a checkpoint


def test_a_checkpoint_has_these_files_and_nothing_else(whole):
    assert saved_steps(whole[0]) == [2, 4, 6]
    for folder in (whole[0] / "checkpoints").iterdir():
        assert sorted(path.name for path in folder.iterdir()) == FILES


def test_plain_peft_loads_a_checkpoint_with_what_was_trained(whole, lab):
    out, session, _ = whole
    loaded = PeftModel.from_pretrained(load_base(lab.model, torch.float32), out / "checkpoints/6")
    parameters = dict(loaded.named_parameters())
    assert len(session.trained) == len(load_file(out / "checkpoints/6/adapter_model.safetensors"))
    for name, value in session.trained.items():
        np.testing.assert_array_equal(parameters[name].detach().numpy(), np.asarray(value), name)


def test_the_optimisers_state_is_named_by_parameter(whole):
    out, session, _ = whole
    state = load_file(out / "checkpoints/6/optimizer.safetensors")
    for name, value in session.trained.items():
        moments = [tensor for path, tensor in state.items() if path.endswith(f"/{name}")]
        assert [tuple(tensor.shape) for tensor in moments] == [value.shape] * 2, name
    assert json.loads((out / "checkpoints/6/state.json").read_text())["step"] == 6


# Which are kept


def test_the_newest_are_kept(lab, tmp_path):
    lab.train(tmp_path, keep=2)
    assert saved_steps(tmp_path) == [4, 6]


MONITORED = {
    "eval_every": 1,
    "keep_best": True,
    "keep": 1,
    "steps": 8,
    # So high a rate that the loss soon rises.
    "optimizer": {"learning_rate": 3.0, "schedule": "constant"},
}


def test_the_best_is_kept_and_left_in_the_model(lab, tmp_path):
    session, trained = lab.train(tmp_path, **MONITORED)
    best = min(trained.log.evals, key=lambda pair: pair[1])[0]
    assert best < 8
    assert trained.step == best
    assert saved_steps(tmp_path) == [best, 8]
    saved = load_file(tmp_path / f"checkpoints/{best}/adapter_model.safetensors")
    for name, value in session.trained.items():
        np.testing.assert_array_equal(saved[name.replace(".default", "")].numpy(), np.asarray(value), name)


def test_patience_ends_a_run_and_the_same_command_leaves_it_ended(lab, tmp_path):
    settings = MONITORED | {"patience": 2, "steps": 30}
    _, trained = lab.train(tmp_path, **settings)
    assert len(trained.log.evals) < 30
    _, again = lab.train(tmp_path, **settings)
    assert again.fresh_steps == 0
    assert (again.log.losses, again.log.evals, again.step) == (trained.log.losses, trained.log.evals, trained.step)


def test_what_a_killed_process_left_of_its_writes_does_no_harm(lab, whole, copied):
    checkpoints = copied / "checkpoints"
    (checkpoints / ".8.partial-1").mkdir()
    shutil.copytree(checkpoints / "2", checkpoints / "2.removed")
    (checkpoints / "2.removed" / "state.json").unlink()
    shutil.rmtree(checkpoints / "6")
    _, trained = lab.train(copied, keep=9)
    assert trained.fresh_steps == 2
    assert trained.log.losses == whole[2].log.losses
    assert saved_steps(copied) == [2, 4, 6]
    assert not list(checkpoints.glob("*.removed"))


# Going on


SETTINGS = {
    "adamw": {},
    "dropout, accumulated": {"accumulate": 2, "lora": {"rank": 4, "targets": ["q_proj", "down_proj"], "dropout": 0.3}},
    "adafactor": {"optimizer": {"name": "adafactor", "learning_rate": 1e-2, "schedule": "cosine"}},
    "all weights": {"method": "full", "optimizer": {"learning_rate": 1e-3, "weight_decay": 0.1}},
    "recomputed, rows of several shapes": {"remat": "block", "max_shapes": 3},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_an_interrupted_run_goes_on_to_the_same_bits(lab, tmp_path, settings):
    session, expected = lab.train(tmp_path / "whole", **settings)
    with pytest.raises(Interrupted):
        lab.train(tmp_path / "run", stop_after=2, **settings)
    again, trained = lab.train(tmp_path / "run", **settings)
    assert trained.fresh_steps == 4
    assert trained.log.losses == expected.log.losses
    assert trained.log.losses[0] > trained.log.losses[-1]
    for name, value in session.trained.items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(again.trained[name]), name)


def test_every_step_has_one_line_of_metrics_after_all(lab, tmp_path):
    with pytest.raises(Interrupted):
        lab.train(tmp_path, stop_after=4, save_every=3, eval_every=4, keep_best=True)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": 1.0}\n{"step": 6, "lo')
    _, trained = lab.train(tmp_path, save_every=3, eval_every=4, keep_best=True)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [line for line in lines if "loss" in line]
    assert [line["step"] for line in losses] == [1, 2, 3, 4, 5, 6]
    assert [line["loss"] for line in losses] == trained.log.losses
    assert [(line["step"], line["monitored_loss"]) for line in lines if "monitored_loss" in line] == trained.log.evals


def test_a_finished_run_takes_no_step(lab, whole, copied):
    _, trained = lab.train(copied, keep=9)
    assert trained.fresh_steps == 0
    assert trained.log.losses == whole[2].log.losses


# What is refused


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_names_the_file(lab, copied, name):
    path = copied / "checkpoints/6" / name
    flip(path, path.stat().st_size // 2)
    with pytest.raises(UserError, match=rf"checkpoints/6: {name} is not what was written. Remove this folder"):
        lab.train(copied, keep=9)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "optimizer.safetensors"])
def test_a_missing_file_is_named(lab, copied, name):
    (copied / "checkpoints/6" / name).unlink()
    with pytest.raises(UserError, match=f"{name} is not what was written"):
        lab.train(copied, keep=9)


OTHERS = {
    "rank": ({"lora": {"rank": 2, "alpha": 8, "targets": ["q_proj", "v_proj", "down_proj"]}}, "lora.rank 4, now 2"),
    "targets": ({"lora": {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]}}, "it has down_proj"),
    "optimiser": ({"optimizer": {"name": "adafactor"}}, "its optimiser is adamw, now adafactor"),
}


@pytest.mark.parametrize(("changes", "says"), OTHERS.values(), ids=OTHERS)
def test_a_checkpoint_of_another_recipe_is_refused(lab, whole, changes, says):
    with pytest.raises(UserError, match=f"belongs to another run: .*{says}"):
        lab.train(whole[0], keep=9, **changes)


def test_a_checkpoint_of_another_method_is_refused(lab, whole):
    with pytest.raises(UserError, match="belongs to another run: "):
        lab.train(whole[0], keep=9, method="full")


def test_a_checkpoint_of_another_base_is_refused(lab, whole, tmp_path):
    other = shutil.copytree(lab.model, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"its base differs \(model.safetensors\)"):
        lab.train(whole[0], keep=9, model=str(other))


def test_a_checkpoint_of_other_data_is_refused(lab, whole, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text(lab.data.read_text().replace("My steps on train day 0?", "My steps on train day 7?"))
    with pytest.raises(UserError, match="its training rows or their order differ"):
        lab.train(whole[0], keep=9, data=str(data))
