"""The whole command with settings that change its course: accumulation, all weights, the best step."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from portlab_jax import cli as train_cli
from portlab_spec.data import load_dataset
from portlab_spec.formats import find_format
from portlab_spec.run.evaluate import prompt_ids
from portlab_spec.tokenizer import Tokenizer

STEPS = 8


@pytest.fixture(scope="module")
def finish(tmp_path_factory):
    """Runs the command to its end; returns the run's folder and report."""

    def run(model, *extra):
        out = tmp_path_factory.mktemp("settings") / "run"
        arguments = ["--model", str(model), "--out", str(out), "--steps", str(STEPS), "--batch-size", "8"]
        assert train_cli.main([*arguments, "--max-new-tokens", "4", *extra]) == 0
        return out, json.loads((out / "report.json").read_text())

    return run


@pytest.fixture(scope="module")
def tiny_float32_folder(tiny_chat_folder, tmp_path_factory):
    """A base in which an export rounds nothing."""
    folder = tmp_path_factory.mktemp("tiny-float32")
    for file in tiny_chat_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def best(finish, tiny_chat_folder):
    """A decay of six times the weights: each step makes them five times as large, and the monitored loss with them."""
    return finish(
        tiny_chat_folder, "--steps", "10", "--train-splits", "train", "--optimizer.learning-rate", "3e-3",
        "--optimizer.weight-decay", "2000", "--optimizer.schedule", "constant", "--eval-every", "2", "--patience", "2",
        "--keep-best", "--save-every", "100", "--trackers", "tensorboard", "--profile.start", "2",
        "--profile.steps", "1",
    )  # fmt: skip


def test_accumulation_gives_the_same_curve(finish, tiny_chat_folder):
    _, at_once = finish(tiny_chat_folder)
    _, in_parts = finish(tiny_chat_folder, "--accumulate", "2")
    np.testing.assert_allclose(in_parts["loss"], at_once["loss"], rtol=1e-5)


def test_full_fine_tuning_exports_a_model_that_says_what_was_scored(finish, tiny_float32_folder, capsys):
    out, report = finish(tiny_float32_folder, "--method", "full")
    assert "adapter" not in report["paths"]
    assert f"merged model: {out / 'merged'}" in capsys.readouterr().out
    assert report["loss"][-1] < report["loss"][0]
    outputs = json.loads((out / "after.json").read_text())["outputs"]
    tokenizer, fmt = Tokenizer.load(out / "merged"), find_format("functiongemma")
    model = AutoModelForCausalLM.from_pretrained(out / "merged", dtype=torch.float32)
    for conversation in [c for c in load_dataset("fitness-213") if c.split == "test"][:8]:
        prompt = prompt_ids(conversation, fmt, tokenizer)
        stops = [tokenizer.token_id(token) for token in fmt.stop_tokens]
        ids = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=4, eos_token_id=stops, pad_token_id=0
        )
        assert tokenizer.decode(ids[0, len(prompt) :].tolist()) == outputs[conversation.id]


def test_the_best_step_is_exported(best):
    out, report = best
    step, _ = min(report["evals"], key=lambda pair: pair[1])
    assert report["exported_step"] == step
    assert step < len(report["loss"])
    manifest = json.loads((out / "merged/merge_manifest.json").read_text())
    assert manifest["checkpoint"]["step"] == step


def test_patience_ends_a_run(best):
    _, report = best
    step, _ = min(report["evals"], key=lambda pair: pair[1])
    assert len(report["loss"]) == step + 2 * 2 < report["recipe"]["steps"]


def test_tensorboard_gets_its_files(best):
    assert [path for path in best[0].rglob("*tfevents*") if path.stat().st_size]


def test_a_trace_is_written(best):
    assert [path for path in (best[0] / "profile").rglob("*.xplane.pb") if path.stat().st_size]
