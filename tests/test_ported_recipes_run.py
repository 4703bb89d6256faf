"""The public GPU configurations, ported, run: scored, trained, exported and verified on a tiny model and few rows.

What a tiny model cannot have is changed on the command line: the model itself, its rows, the lengths of a row and of a
run, and layers that a regular expression names by the modules of a multimodal model.
"""

import json

import pytest
from port_cases import CASES, config
from tiny_run import save_data, save_model

from portlab_jax import cli as train_cli
from portlab_port.port import port
from portlab_port.read import read
from portlab_port.recipe_file import recipe_text

pytestmark = pytest.mark.usefixtures("quick_compilation")

STEPS = 3
# All weights, a base in four bits, one in eight, a plain adapter. The others differ in numbers alone.
QUICK = ("handbook_gemma_full.yaml", "gemma_qlora_guide.py", "transformers_fp16.py", "unsloth_gemma3_270m.py")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return save_model(folder / "model"), save_data(folder / "data.jsonl")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_a_ported_recipe_runs_whole(name, tiny, tmp_path):
    devices, answers = CASES[name]
    gpu = read(config(name), name)
    ported = port(gpu, devices, answers)
    file, out = tmp_path / "recipe.yaml", tmp_path / "run"
    file.write_text(recipe_text(ported, gpu))
    model, data = tiny
    changes = {
        "model": model, "data": data, "format": "functiongemma", "out": out, "steps": STEPS, "batch-size": 4,
        "accumulate": 1, "optimizer.warmup-steps": min(1, ported.recipe.optimizer.warmup_steps), "max-new-tokens": 2,
        "save-every": STEPS, "max-length": 1024,
    }  # fmt: skip
    arguments = [word for key, value in changes.items() for word in (f"--{key}", str(value))]
    if ported.recipe.revision:
        arguments += ["--revision", "None"]
    if ported.recipe.trackers:
        arguments += ["--trackers", "tensorboard"]  # the one that this environment has
    if ported.recipe.eval_every:
        arguments += ["--eval-every", "2"]
    if any("language_model" in target for target in ported.recipe.lora.targets):
        arguments += ["--lora.targets", r"model\.layers\.\d+\.(mlp|self_attn)\.(up|down|gate|q|k|v|o)_proj"]
    assert train_cli.main(["--recipe", str(file), *arguments]) == 0
    report = json.loads((out / "report.json").read_text())
    assert len(report["loss"]) == STEPS
    assert report["recipe"]["optimizer"]["learning_rate"] == ported.recipe.optimizer.learning_rate
    exported = "merged/model.safetensors" if ported.recipe.method == "full" else "adapter/adapter_model.safetensors"
    assert (out / exported).exists()
