"""The card of an output: true to base, recipe and figures, and readable by a model hub."""

import json

import pytest
import yaml

from portlab_merge.model_card import model_card
from portlab_merge.overlay import MergeOptions, merge
from portlab_merge.peft_adapter import export_adapter

METRIC = {"value": 0.5, "low": 0.3, "high": 0.7, "hits": 2, "count": 4}


def scores(value):
    return {
        "split": "test",
        "examples": 4,
        "metrics": {"call_exact": METRIC | {"value": value, "hits": int(4 * value)}},
    }


def front_matter(text):
    assert text.startswith("---\n")
    return yaml.safe_load(text.split("---\n")[1])


@pytest.fixture
def trained(make_run, base):
    def recipe(tree, metadata):
        metadata["recipe"] = {"name": "fitness", "steps": 30, "optimizer": {"name": "adamw", "learning_rate": 4e-4}}

    return make_run(base, recipe)


def test_front_matter_names_base_and_library(trained, tmp_path):
    merge(trained.plan(), tmp_path / "m", MergeOptions())
    export_adapter(trained.plan(), tmp_path / "a")
    merged, adapter = (front_matter((tmp_path / name / "README.md").read_text()) for name in "ma")
    assert merged == {
        "base_model": "tiny/gemma-3",
        "base_model_relation": "finetune",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["gemma3_text", "lora", "merge-ckpt"],
    }
    assert (adapter["base_model_relation"], adapter["library_name"]) == ("adapter", "peft")


def test_the_license_is_that_of_the_base(trained):
    (trained.base / "README.md").write_text("---\nlicense: gemma\ntags: [x]\n---\n# Gemma\nlicense: other\n")
    try:
        assert front_matter(model_card(trained.plan(), "merged"))["license"] == "gemma"
    finally:
        (trained.base / "README.md").unlink()


def test_recipe_and_adapter_are_told(trained):
    text = model_card(trained.plan(), "merged")
    assert "step 7 of a `portlab-lora/1` checkpoint, rank 4, alpha 8, 21 modules, 3 token rows" in text
    assert "| steps | 30 |" in text
    assert "| optimizer | name adamw, learning_rate 0.0004 |" in text
    assert "## Metrics" not in text


def test_figures_are_those_of_the_merged_step(trained):
    report = {"before": scores(0.0), "after": scores(0.75), "exported_step": 7}
    (trained.folder / "report.json").write_text(json.dumps(report))
    assert "| call_exact | 0.000 (0/4) | 0.750 (3/4) |" in model_card(trained.plan(), "merged")
    (trained.folder / "report.json").write_text(json.dumps(report | {"exported_step": 6}))
    assert "## Metrics" not in model_card(trained.plan(), "merged")


def test_a_run_that_has_not_reported_yet_has_its_scores(trained):
    for name, value in (("before", 0.0), ("after", 0.5)):
        (trained.folder / f"{name}.json").write_text(json.dumps({"evaluation": scores(value), "outputs": {}}))
    assert "| call_exact | 0.000 (0/4) | 0.500 (2/4) |" in model_card(trained.plan(), "merged")
    (trained.folder / "after.json").write_text("{broken")
    assert "## Metrics" not in model_card(trained.plan(), "merged")


def test_what_rounding_left_is_told(trained, tmp_path):
    manifest = merge(trained.plan(), tmp_path / "m", MergeOptions())
    survival = [change["survival"] for change in manifest["tensors"].values()]
    text = (tmp_path / "m" / "README.md").read_text()
    assert f"holds {min(survival):.1%} to {max(survival):.1%} by tensor" in text
