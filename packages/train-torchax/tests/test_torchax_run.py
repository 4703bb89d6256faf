"""Whole runs of train-torchax: other families and formats, instructions without tools, several devices."""

import json
import random
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from peft import PeftModel
from tiny_run import LLAMA, QWEN3, QWEN3_CONTROLS, report, save_model, save_tokenizer
from torchax_runs import Lab
from transformers import AutoModelForCausalLM

from portlab_spec.errors import CheckFailed
from portlab_torchax import cli
from portlab_torchax.session import TorchaxSession
from portlab_torchax.step import make_evaluation
from portlab_torchax.training import read


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture(scope="module", autouse=True)
def no_compilation_cache():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("portlab_torchax.main_job.use_compilation_cache", lambda: None)
        yield


# Families


FAMILIES = {
    "llama": (LLAMA, {"format": "gemma3-json", "max_length": 1024}),
    "qwen3": (QWEN3, {"format": "qwen3", "max_length": 1024}),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(lab, request):
    """A finished run on a model of another family."""
    config, changes = FAMILIES[request.param]
    model, out = save_model(lab.folder / request.param, config), lab.folder / f"{request.param}-run"
    if request.param == "qwen3":
        save_tokenizer(model, QWEN3_CONTROLS)
    lora = {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj", "down_proj"], "train_control_rows": False}
    changes = changes | {"model": str(model), "lora": lora, "steps": 10, "optimizer": {"learning_rate": 5e-2}}
    assert cli.main(lab.arguments(out, **changes)) == 0
    return SimpleNamespace(name=request.param, model=model, out=out, report=report(out))


def test_another_family_learns(family):
    assert family.report["after"]["loss"] < family.report["before"]["loss"] - 0.3
    assert family.report["loss"][-1] < family.report["loss"][0]


def test_its_merged_model_computes_what_base_and_adapter_do(family):
    base = AutoModelForCausalLM.from_pretrained(family.model, dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(family.out / "merged", dtype=torch.float32).eval()
    adapted = PeftModel.from_pretrained(base, family.out / "adapter").eval()
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, 600, (2, 40)))
    with torch.no_grad():
        expected, found = (model(input_ids=ids).logits for model in (adapted, merged))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


# Instructions without tools


ANIMALS = ["cat", "dog", "hen", "cow", "fox", "owl", "bee", "ant"]


def save_dolly(path):
    """Instructions in the shape of databricks-dolly-15k, some with a context, in three splits."""
    rng, rows = random.Random(0), []
    for split, count in (("train", 24), ("validation", 4), ("test", 4)):
        for _ in range(count):
            animal = rng.choice(ANIMALS)
            row = {"instruction": f"Say {animal} {len(rows)}.", "context": "", "response": f"A {animal}."}
            row |= {"category": "closed_qa", "split": split}
            if rng.random() < 0.5:
                row |= {"context": f"It is a {animal}."}
            rows.append(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def dolly(lab):
    """The shipped recipe for Dolly, as a command: all weights of the tiny model, by Adafactor."""
    out, data = lab.folder / "dolly", save_dolly(lab.folder / "dolly.jsonl")
    command = ["--recipe", "gemma3-1b-dolly", "--model", str(lab.model), "--data", str(data), "--out", str(out)]
    command += ["--method", "full", "--optimizer.name", "adafactor", "--optimizer.learning-rate", "0.003"]
    command += ["--optimizer.warmup-steps", "2", "--steps", "12", "--eval-every", "6", "--save-every", "6"]
    command += ["--batch-size", "8", "--max-length", "512", "--max-new-tokens", "4"]
    assert cli.main(command) == 0
    return out, report(out)


def test_the_held_out_loss_falls(dolly):
    _, found = dolly
    assert found["after"]["loss"] < found["before"]["loss"] - 1
    (_, early), (_, late) = found["evals"]
    assert late < early


def test_all_weights_are_trained_by_adafactor(dolly):
    out, found = dolly
    assert (found["recipe"]["method"], found["recipe"]["optimizer"]["name"]) == ("full", "adafactor")
    assert (out / "merged/model.safetensors").stat().st_size > 0
    assert not (out / "adapter").exists()
    assert json.loads((out / "probe.json").read_text())["positions"]


def test_only_the_response_is_learnt(dolly):
    _, found = dolly
    # "A cat." is seven bytes and the end of the turn; twelve batches of eight rows.
    assert found["tokens"]["supervised"] == 12 * 8 * 7


# Several devices


@pytest.fixture(scope="module")
def on_four(lab):
    """The same run on one device and on four."""
    changes = {"steps": 3, "save_every": 3, "batch_size": 4}
    one, four = (lab.folder / name for name in ("on-one", "on-four"))
    assert cli.main(lab.arguments(one, **changes)) == 0
    done = lab.run(lab.arguments(four, mesh={"fsdp": 2, "tp": 2}, **changes), devices=4)
    assert done.returncode == 0, done.stderr
    return one, four, done.stdout


def test_four_devices_compute_what_one_does(on_four):
    one, four = (report(out) for out in on_four[:2])
    assert four["device"]["count"] == 4
    assert four["device"]["compilations"] == 1
    np.testing.assert_allclose(four["loss"], one["loss"], rtol=1e-4)
    for when in ("before", "after"):
        np.testing.assert_allclose(four[when]["loss"], one[when]["loss"], rtol=1e-4)


def test_four_devices_say_what_one_does(on_four):
    one, four = (json.loads((out / "before.json").read_text()) for out in on_four[:2])
    assert one["outputs"] == four["outputs"]


def test_the_mesh_is_told(on_four):
    assert "mesh data 1 x fsdp 2 x tp 2" in on_four[2]


# The held-out loss


def test_the_same_rows_are_compiled_once(toy, make_rows):
    session, rows = TorchaxSession(toy("llama", batch_size=2)), make_rows()
    with mock.patch("portlab_torchax.training.make_evaluation", wraps=make_evaluation) as made:
        before = session.loss(rows)
        session.trained = {name: -2 * value for name, value in session.trained.items()}
        assert session.loss(rows) != before
        assert made.call_count == 1
        session.loss(rows[:2])
        assert made.call_count == 2


# What gets no gradient


def metrics(**norms):
    return SimpleNamespace(loss=1.0, grad_norm=2.0, accuracy=0.5, leaf_norms=norms)


def test_a_leaf_without_a_gradient_ends_the_first_step():
    found = metrics(**{"layers.0.q_proj.lora_B.default.weight": 0.0, "layers.1.q_proj.lora_B.default.weight": 0.1})
    with pytest.raises(CheckFailed, match=r"no gradient reaches layers\.0\.q_proj\.lora_B\.default\.weight\. These"):
        read(found, first=True)
    assert read(found, first=False) == (1.0, 2.0, 0.5)


def test_what_is_still_in_the_first_step_by_its_nature_is_none_of_them():
    idle = {"q_proj.lora_A.default.weight": 0.0, "token_adapter.trainable_tokens_delta.default": 0.0}
    assert read(metrics(**idle), first=True) == (1.0, 2.0, 0.5)
