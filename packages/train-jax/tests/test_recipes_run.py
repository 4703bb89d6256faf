"""Every shipped recipe, whole: scored, trained, exported and verified on a tiny stand-in of its model.

The stand-ins have the structure of the models that the recipes name, written by transformers, and the real vocabulary;
the data have the published shape. What plain transformers and PEFT load from the exports is what was trained.
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Gemma4VisionConfig,
)

from portlab_jax import cli as train_cli
from portlab_spec.data import load_dataset
from portlab_spec.recipe import load_recipe, shipped_recipes
from portlab_spec.tokenizer import GEMMA4_TOKENS, Tokenizer

SLIDING, FULL = "sliding_attention", "full_attention"
STEPS = 4
TEXT = {
    "vocab_size": 262_144,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 64,
    "max_position_embeddings": 4096,
    "final_logit_softcapping": 30.0,
}
# As E2B: per-layer inputs; the last layers share keys and values and have a double-wide MLP.
E_SERIES = TEXT | {
    "num_hidden_layers": 4,
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": 262_144,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}
# As 31B: in full layers keys are values.
KEYS_ARE_VALUES = TEXT | {
    "num_hidden_layers": 3,
    "layer_types": [SLIDING, SLIDING, FULL],
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
# As 26B-A4B: the same with experts.
EXPERTS = KEYS_ARE_VALUES | {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 8,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "position_embedding_size": 16,
}


@pytest.fixture(scope="module", autouse=True)
def offline():
    """PEFT would look the base up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
        yield


def text_model(**settings):
    return Gemma4ForCausalLM(Gemma4TextConfig(**settings))


def multimodal_model(**settings):
    config = Gemma4Config(text_config=Gemma4TextConfig(**settings), vision_config=Gemma4VisionConfig(**VISION))
    return Gemma4ForConditionalGeneration(config)


@pytest.fixture(scope="module")
def gemma4_folder(tmp_path_factory, default_folder):
    """Makes the folder of a random model with a Gemma 4 tokenizer."""

    def make(model, **saving) -> Path:
        torch.manual_seed(0)
        folder = tmp_path_factory.mktemp("gemma4")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.3)
        model.to(torch.bfloat16).save_pretrained(folder, **saving)
        Tokenizer.load(default_folder).renamed(GEMMA4_TOKENS).backend.save(str(folder / "tokenizer.json"))
        return folder

    return make


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def few_fitness_rows(tmp_path_factory):
    """Sixteen rows of fitness-plus to train on and two each to monitor and to score."""
    rows = load_dataset("fitness-plus")
    taken = [row for split, n in (("train", 16), ("validation", 2), ("test", 2)) for row in _shortest(rows, split)[:n]]
    folder = tmp_path_factory.mktemp("data")
    return write_jsonl(folder / "few.jsonl", [row.model_dump(mode="json", exclude_none=True) for row in taken])


def _shortest(rows, split):
    return sorted((row for row in rows if row.split == split), key=lambda row: len(row.model_dump_json()))


@pytest.fixture(scope="module")
def mobile_actions(tmp_path_factory):
    """Rows in the shape of google/mobile-actions."""
    city = {"type": "STRING", "description": "Name of the city."}
    parameters = {"type": "OBJECT", "properties": {"city": city}, "required": ["city"]}
    tool = {"function": {"name": "show_map", "description": "Shows a map.", "parameters": parameters}}

    def row(i, split):
        call = {"function": {"name": "show_map", "arguments": {"city": f"City {i}"}}}
        return {
            "metadata": split,
            "tools": [tool],
            "messages": [
                {"role": "developer", "content": "Today is Monday.\n"},
                {"role": "user", "content": f"Where is city {i}?"},
                {"role": "assistant", "tool_calls": [call]},
            ],
        }

    rows = [row(i, "eval" if i % 9 == 0 else "train") for i in range(18)]
    return write_jsonl(tmp_path_factory.mktemp("data") / "dataset.jsonl", rows)


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """Rows with `messages` alone, with the splits that `toolspec split` gives them."""

    def row(i, split):
        user = {"role": "user", "content": f"What goes with dish {i}?"}
        return {"split": split, "messages": [user, {"role": "assistant", "content": f"Bread, and {i} eggs."}]}

    rows = [row(i, {7: "validation", 8: "test"}.get(i % 9, "train")) for i in range(18)]
    return write_jsonl(tmp_path_factory.mktemp("data") / "split.jsonl", rows)


@pytest.fixture(scope="module")
def dolly(tmp_path_factory):
    """Rows in the shape of databricks-dolly-15k, with the splits that `toolspec split` gives them."""

    def row(i, split):
        context = f"The number in question is {i}." if i % 2 else ""
        return {
            "instruction": f"What comes after {i}?",
            "context": context,
            "response": f"After {i} comes {i + 1}.",
            "category": "closed_qa",
            "split": split,
        }

    rows = [row(i, {7: "validation", 8: "test"}.get(i % 9, "train")) for i in range(18)]
    return write_jsonl(tmp_path_factory.mktemp("data") / "split.jsonl", rows)


@dataclass(frozen=True)
class Finished:
    """A run that ended well."""

    folder: Path
    report: dict[str, Any]
    base: Path

    @property
    def step(self) -> int:
        return self.report["exported_step"]

    def metadata(self) -> dict[str, Any]:
        path = self.folder / "checkpoints" / str(self.step) / "_CHECKPOINT_METADATA"
        return json.loads(path.read_text())["custom_metadata"]


@pytest.fixture(scope="module")
def finish(tmp_path_factory):
    """Runs a recipe for a few steps in this process."""

    def run(recipe, model, *extra) -> Finished:
        out = tmp_path_factory.mktemp(recipe) / "run"
        arguments = ["--recipe", recipe, "--model", str(model), "--out", str(out), "--steps", str(STEPS)]
        arguments += ["--batch-size", "4", "--optimizer.warmup-steps", "1", "--max-new-tokens", "2", *extra]
        if load_recipe(recipe).eval_every:
            arguments += ["--eval-every", "2"]
        assert train_cli.main(arguments) == 0
        return Finished(out, json.loads((out / "report.json").read_text()), Path(model))

    return run


RECIPES = {
    "functiongemma-fitness": ("tiny_chat_folder", None),
    "functiongemma-fitness-plus": ("tiny_chat_folder", "few_fitness_rows"),
    "functiongemma-mobile-actions": ("tiny_chat_folder", "mobile_actions"),
    "gemma3-270m-colab": ("tiny_chat_folder", "chat"),
    "gemma3-1b-dolly": ("tiny_chat_folder", "dolly"),
    "gemma4-e2b-lora": ("e_series", "few_fitness_rows"),
    "gemma4-31b-lora": ("keys_are_values", "few_fitness_rows"),
}


@pytest.fixture(scope="module")
def e_series(gemma4_folder):
    return gemma4_folder(text_model(**E_SERIES))


@pytest.fixture(scope="module")
def keys_are_values(gemma4_folder):
    """As published: a multimodal model in several files."""
    return gemma4_folder(multimodal_model(**KEYS_ARE_VALUES), max_shard_size="5MB")


@pytest.fixture(scope="module")
def finished(finish, request):
    """The run of a recipe, once."""
    runs = {}

    def get(recipe) -> Finished:
        if recipe not in runs:
            model, data = (request.getfixturevalue(name) if name else None for name in RECIPES[recipe])
            runs[recipe] = finish(recipe, model, *(("--data", str(data)) if data else ()))
        return runs[recipe]

    return get


def test_every_shipped_recipe_is_here():
    assert sorted(RECIPES) == shipped_recipes()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs_whole(finished, recipe):
    run = finished(recipe)
    assert len(run.report["loss"]) == STEPS
    assert all(math.isfinite(loss) for loss in run.report["loss"])
    assert run.report["before"]["metrics"].keys() == run.report["after"]["metrics"].keys()
    assert {"merged", "adapter", "report", "loss_curve"} <= run.report["paths"].keys()
    assert all(Path(path).exists() for path in run.report["paths"].values())
    monitored = load_recipe(recipe).eval_every > 0
    assert [step for step, _ in run.report["evals"]] == ([2, 4] if monitored else [])


def check_logits(run):
    """The logits of the probe, from the merged folder (rounded to bfloat16) and from base plus adapter (exact)."""
    probe = run.metadata()["probe"]
    expected = np.array(probe["topk_logits"])
    assert expected.shape[0] == len(probe["positions"]) > 0
    base = load(run.base)
    before = logits_at(base, probe)
    adapted = logits_at(PeftModel.from_pretrained(base, run.folder / "adapter").eval(), probe)
    np.testing.assert_allclose(adapted, expected, atol=1e-4)
    assert np.abs(before - expected).max() > 1e-3
    merged = logits_at(load(run.folder / "merged"), probe)
    assert np.abs(merged - expected).mean() < np.abs(before - expected).mean()


@pytest.mark.parametrize("recipe", RECIPES)
def test_plain_transformers_and_peft_give_what_was_trained(finished, recipe):
    check_logits(finished(recipe))


def load(folder):
    kind = json.loads((folder / "config.json").read_text())["architectures"][0]
    model = Gemma4ForConditionalGeneration if kind == "Gemma4ForConditionalGeneration" else AutoModelForCausalLM
    return model.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def logits_at(model, probe):
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([probe["token_ids"]])).logits[0]
    return logits[probe["positions"]].gather(1, torch.tensor(probe["topk_ids"])).numpy()


def test_the_vision_tower_is_copied_and_not_adapted(finished):
    run = finished("gemma4-31b-lora")
    index = json.loads((run.folder / "merged/model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    towers = [name for name in index["weight_map"] if "vision_tower" in name]
    assert towers
    manifest = json.loads((run.folder / "merged/merge_manifest.json").read_text())
    assert not set(towers) & set(manifest["tensors"])


def test_experts_are_trained_and_exported(finish, gemma4_folder, few_fitness_rows):
    """As 26B-A4B; experts are adapted where they are named."""
    targets = ["q_proj", "gate_proj", "experts.gate_up_proj", "experts.down_proj"]
    ranks = [r"layers\.0\.self_attn\.q_proj", "4", "experts.down_proj", "8"]
    model = gemma4_folder(text_model(**EXPERTS))
    run = finish(
        "gemma4-e2b-lora",
        model,
        "--data",
        str(few_fitness_rows),
        "--lora.targets",
        *targets,
        "--lora.rank-pattern",
        *ranks,
    )
    check_logits(run)
