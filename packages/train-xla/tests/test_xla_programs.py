"""Programs and parameters on four XLA devices: what compiles, what is cut, what stays tied."""

import re

import numpy as np
import pytest
from parity_runs import Run, metrics, run_in_torch
from tiny_run import save_tokenizer

from portlab_hf.model import parameter_specs
from portlab_spec.models import GemmaConfig

STEPS = 50
MESH = {"data": 1, "fsdp": 2, "tp": 2}
RECIPE = {
    "steps": STEPS,
    "batch_size": 8,
    "max_length": 64,
    "save_every": STEPS,
    "dtype": "float32",
    "lora": {"rank": 4, "targets": ["q_proj", "v_proj", "down_proj"], "dropout": 0.1},
    "optimizer": {"learning_rate": 1e-3, "schedule": "cosine"},
    "mesh": MESH,
}
# Lengths differ from row to row; rates, dropout and its seeds from step to step.
RUNS = {
    "measured": {"recipe": {"steps": 12, "eval_every": 4, "save_every": 6, "log_every": 5}, "monitored": 5},
    "two shapes": {"recipe": {"steps": 20, "max_shapes": 2, "batch_size": 6, "mesh": {"tp": 4}, "remat": "block"}},
    "even": {"recipe": {"steps": 8}},
    "uneven": {"recipe": {"steps": 8}, "uneven": True},
    "long": {"recipe": {}},
}
PLANNED = [name for name in RUNS if name != "uneven"]


@pytest.fixture(scope="module")
def model(toy_folder):
    folder = toy_folder("gemma3, two kv heads")
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def runs(model, tmp_path_factory):
    """All runs, in one process: (what it says of each, where each is)."""
    folder = tmp_path_factory.mktemp("runs")
    made = {
        name: Run(str(model), str(folder / name), plain=True, rows=40, **(how | {"recipe": RECIPE | how["recipe"]}))
        for name, how in RUNS.items()
    }
    return run_in_torch(folder / "runs.json", made, "xla", devices=4), folder


@pytest.mark.parametrize("name", PLANNED)
def test_nothing_compiles_once_shapes_are_warm(name, runs):
    found, _ = runs
    assert found[name]["graphs_after_warm_up"] == 0
    assert found[name]["said"] == []


def test_fifty_steps_compile_no_more_than_eight(runs):
    found, _ = runs
    assert found["long"]["graphs"] == found["even"]["graphs"]


def test_two_shapes_are_two(runs):
    found, _ = runs
    assert found["two shapes"]["layouts"] == 2


def test_a_shape_that_was_not_planned_is_warned_of_by_its_step(runs):
    found, folder = runs
    warnings = [re.match(r"warning: step (\d+) compiled \d+ new graph", line) for line in found["uneven"]["said"]]
    assert int(warnings[0][1]) == 5
    assert found["uneven"]["graphs_after_warm_up"] > 0
    # The slots that came too many are ignored.
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(metrics(folder / "uneven", name), metrics(folder / "even", name), rtol=1e-5)


def test_every_parameter_is_cut_as_the_mesh_says(runs, model, adapted_toy):
    placed = runs[0]["even"]["placed"]
    toy = adapted_toy("gemma3, two kv heads", targets=tuple(RECIPE["lora"]["targets"]))
    specs = parameter_specs(toy.adapted, GemmaConfig.load(model), MESH)
    assert specs.keys() <= placed.keys()
    for name, spec in specs.items():
        assert tiles(placed[name], len(spec)) == tuple(MESH[axis] if axis else 1 for axis in spec), name


def tiles(sharding, ndim):
    """Into how many parts each dimension is cut."""
    if sharding == "{replicated}":
        return (1,) * ndim
    return tuple(map(int, re.match(r"\{devices=\[([\d,]+)\]", sharding)[1].split(",")))[:ndim]


def test_no_name_tells_of_a_wrapper(runs):
    assert not [name for name in runs[0]["even"]["placed"] if "_orig_module" in name]


@pytest.mark.parametrize("name", RUNS)
def test_embedding_and_head_stay_one(name, runs):
    modules, ends = ("model.embed_tokens", "lm_head"), ("base_layer.weight", "trainable_tokens_delta.default")
    both = [[f"base_model.model.{module}.token_adapter.{end}" for module in modules] for end in ends]
    assert sorted(runs[0][name]["ties"]) == sorted(both)
