"""Programs and parameters on four XLA devices: what compiles, what is cut, what stays tied."""

import json

import pytest
from parity_runs import Run, run_in_torch
from xla_runs import save_tokenizer

STEPS = 50
RECIPE = {
    "steps": STEPS,
    "batch_size": 8,
    "max_length": 64,
    "save_every": STEPS,
    "dtype": "float32",
    "lora": {"rank": 4, "targets": ["q_proj", "v_proj", "down_proj"], "dropout": 0.1},
    "optimizer": {"learning_rate": 1e-3, "schedule": "cosine"},
    "mesh": {"fsdp": 2, "tp": 2},
}

RUNS = {
    # Lengths differ from row to row; rates, dropout and its seeds from step to step.
    "one shape": {},
    "measured": {"changes": {"steps": 12, "eval_every": 4, "save_every": 4, "log_every": 5}, "monitored": 5},
    "two shapes": {"changes": {"steps": 20, "max_shapes": 2, "remat": "block"}},
    "even": {"changes": {"steps": 8}},
    "uneven": {"changes": {"steps": 8}, "uneven": True},
}


@pytest.fixture(scope="module")
def runs(toy_folder, tmp_path_factory):
    """All runs, in one process: (what it says of each, where each is)."""
    folder, model = tmp_path_factory.mktemp("runs"), toy_folder("gemma3, two kv heads")
    save_tokenizer(model)
    made = {}
    for name, how in RUNS.items():
        recipe = RECIPE | how.get("changes", {})
        rest = {key: value for key, value in how.items() if key != "changes"}
        made[name] = Run(str(model), str(folder / name), recipe, plain=True, rows=40, **rest)
    return run_in_torch(folder / "runs.json", made, "xla", devices=4), folder


def test_nothing_compiles_once_shapes_are_warm(runs):
    found, _ = runs
    for name in ("one shape", "measured", "two shapes", "even"):
        assert found[name]["graphs_after_warm_up"] == 0, name
        assert not [line for line in found[name]["said"] if "warning" in line], name
    print(json.dumps({k: {a: b for a, b in v.items() if a not in ("placed",)} for k, v in found.items()}, indent=1))
    print(json.dumps(found["even"]["placed"], indent=1))
    assert 0
