"""The loss curve of a recipe is the same however it is computed: cut, packed, recomputed, spread out, interrupted.

All in float32, every step of 20 within 1e-5 of the reference: one device, whole batches, trees, nothing recomputed.
"""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from training_runs import STEPS, Run, run_elsewhere, save_random_model

from portlab_jax import setup
from portlab_jax.attention import splash
from portlab_jax.attention.choice import Choice
from portlab_jax.leaf_digests import leaf_digests
from portlab_spec.models import FULL, SLIDING

pytestmark = pytest.mark.usefixtures("quick_compilation")

TOLERANCE = 1e-5

GEMMA3 = {
    "model_type": "gemma3_text",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 6,  # shorter than what the rows of tools share
    "layer_types": [SLIDING, FULL] * 2,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
MODELS = {
    "gemma3": GEMMA3,
    # As E2B: per-layer inputs, and layers that share keys and values.
    "gemma4": GEMMA3
    | {
        "model_type": "gemma4_text",
        "global_head_dim": 32,
        "final_logit_softcapping": 30.0,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 96,
        "num_kv_shared_layers": 2,
    },
    # As wide as it takes for Adafactor to factor a moment, and for splash to take a head.
    "wide": GEMMA3 | {"hidden_size": 128, "intermediate_size": 128, "head_dim": 128, "num_hidden_layers": 2}
    | {"layer_types": [SLIDING, FULL], "num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 30},
}  # fmt: skip

PADDED = {"share_prefix": False, "pack": False}
FULL_TUNING = {"method": "full", "optimizer": {"learning_rate": 1e-3, "name": "adafactor"}}


def mesh(data, fsdp, tp):
    return {"mesh": {"data": data, "fsdp": fsdp, "tp": tp}}


class Curve(NamedTuple):
    """What is compared."""

    losses: np.ndarray
    compilations: int
    shapes: int


def assert_same(losses, reference, tolerance=TOLERANCE):
    assert len(losses) == len(reference.losses) == STEPS
    np.testing.assert_allclose(losses, reference.losses, rtol=tolerance, atol=0)


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """Makes a run of a model in a new folder."""
    folders = {}

    def make(model, changes=None, **more):
        if model not in folders:
            folders[model] = save_random_model(tmp_path_factory.mktemp("model"), MODELS[model])
        return Run(str(folders[model]), str(tmp_path_factory.mktemp("run")), changes or {}, **more)

    return make


@pytest.fixture(scope="module")
def curve(run_of):
    """The curve of a run; equal runs are done once."""
    known = {}

    def get(model, changes=None, **more):
        key = json.dumps([model, changes or {}, more], sort_keys=True)
        if key not in known:
            trained = run_of(model, changes, **more)()
            known[key] = Curve(np.array(trained.log.losses), trained.compilations, len(trained.plan.layouts))
        return known[key]

    return get


@pytest.mark.parametrize(
    ("model", "changes", "end"), [("gemma3", {}, 0.6), ("gemma4", {}, 0.95), ("wide", FULL_TUNING, 0.9)]
)
def test_the_reference_learns(curve, model, changes, end):
    losses = curve(model, changes).losses
    assert losses[-3:].mean() < end * losses[:3].mean()


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        pytest.param("gemma3", {"accumulate": 2}, marks=pytest.mark.slow),
        ("gemma3", {"accumulate": 4}),
        ("gemma3", {"share_prefix": False}),
        ("gemma3", PADDED),
        ("gemma3", {"remat": "block"}),
        ("gemma3", {"remat": "offload"}),
        pytest.param("gemma3", {"remat": "dots"}, marks=pytest.mark.slow),
        ("gemma4", {"accumulate": 2, "remat": "dots"} | PADDED),
        pytest.param("gemma4", {"accumulate": 4, "remat": "block"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_how_a_step_is_computed_does_not_show(curve, model, changes):
    assert_same(curve(model, changes).losses, curve(model))


def test_rows_that_share_nothing_may_be_packed_or_padded(curve):
    assert_same(curve("gemma3", PADDED, plain=True).losses, curve("gemma3", plain=True))


def test_several_shapes_compile_once_each(curve):
    several = curve("gemma3", {"max_shapes": 3})
    assert several.compilations == several.shapes > 1
    assert_same(several.losses, curve("gemma3"))


def test_full_fine_tuning_may_accumulate(curve):
    assert_same(curve("wide", FULL_TUNING | {"accumulate": 4}).losses, curve("wide", FULL_TUNING))


@pytest.fixture
def wide_reference(curve):
    return curve("wide")


@pytest.fixture
def splash_on_cpu(wide_reference, monkeypatch):
    """Splash as on a TPU, in its interpreter: blocks of 128 tokens, chosen by the kind of rows."""
    monkeypatch.setattr(splash.kernels, "make_splash_mha", partial(splash.kernels.make_splash_mha, interpret=True))
    monkeypatch.setattr(setup, "plan", partial(setup.plan, min_block=128))
    chosen = []

    def choose(*_, plain, **__):
        chosen.append("splash" if plain else "splash_tree")
        return Choice(chosen[-1], "wanted")

    monkeypatch.setattr(setup, "choose", choose)
    return chosen


@pytest.mark.parametrize(("implementation", "changes"), [("splash", {"share_prefix": False}), ("splash_tree", {})])
def test_splash_attention(run_of, wide_reference, splash_on_cpu, implementation, changes):
    trained = run_of("wide", changes)()
    assert implementation in splash_on_cpu  # the probe is one row and always plain
    assert_same(trained.log.losses, wide_reference)


def test_a_run_that_goes_on_is_bit_for_bit_the_whole_run(run_of, tmp_path):
    """Saving as it goes, and what a kill after step 7 would leave."""
    whole = run_of("gemma3", {"save_every": 7, "keep": 3})
    expected = whole()
    shutil.copytree(whole.folder, tmp_path / "run")
    for later in ("14", "20"):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / later)
    rest = Run(whole.model, str(tmp_path / "run"), whole.changes)()
    assert rest.fresh_steps == STEPS - 7
    assert rest.log.losses == expected.log.losses
    assert leaf_digests(rest.adapter) == leaf_digests(expected.adapter)


# --- other devices

MESHES = {
    "8x1x1": ("gemma3", mesh(8, 1, 1)),
    "1x8x1": ("gemma3", mesh(1, 8, 1)),
    "2x2x2": ("gemma3", mesh(2, 2, 2)),
    "1x2x4": ("gemma3", mesh(1, 2, 4)),
    "2x2x2, gemma4, accumulated": ("gemma4", mesh(2, 2, 2) | {"accumulate": 2}),
    "1x4x2, all weights, adafactor": ("wide", mesh(1, 4, 2) | FULL_TUNING),
}


@pytest.fixture(scope="module")
def on_meshes(run_of, tmp_path_factory):
    runs = {name: run_of(*arguments) for name, arguments in MESHES.items()}
    return run_elsewhere(tmp_path_factory.mktemp("meshes") / "runs.json", runs, devices=8)


@pytest.mark.parametrize("name", MESHES)
def test_eight_devices(on_meshes, curve, name):
    model, _ = MESHES[name]
    found = on_meshes[name]
    assert (found["devices"], found["compilations"]) == (8, 1)
    assert_same(found["losses"], curve(model, FULL_TUNING if model == "wide" else {}))


# Weights and states are cut across the processes, then the heads of a layer.
ACROSS = {"fsdp 4": mesh(1, 4, 1), "tp 4": mesh(1, 1, 4)}
MONITORED = {"eval_every": 10, "save_every": 7, "keep": 4}


@pytest.fixture(scope="module")
def two_processes(run_of, tmp_path_factory):
    """Runs of two processes with two devices each, and what they gave."""
    runs = {name: run_of("gemma3", changes | MONITORED, monitored=6) for name, changes in ACROSS.items()}
    return runs, run_elsewhere(tmp_path_factory.mktemp("two") / "runs.json", runs, devices=2, processes=2)


@pytest.mark.parametrize("name", ACROSS)
def test_two_processes(two_processes, curve, name):
    found = two_processes[1][name]
    assert (found["processes"], found["devices"], found["compilations"]) == (2, 4, 1)
    assert_same(found["losses"], curve("gemma3"))
    assert [step for step, _ in found["evals"]] == [10, 20]


def test_two_processes_write_once(two_processes):
    folder = Path(two_processes[0]["fsdp 4"].folder)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["14", "20", "7"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, STEPS + 1))


def test_one_process_goes_on_with_what_two_saved(two_processes, tmp_path):
    """On one device; sums over four devices are rounded otherwise, the past is taken over as it was."""
    runs, results = two_processes
    run, whole = runs["fsdp 4"], results["fsdp 4"]["losses"]
    shutil.copytree(run.folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "20")
    rest = Run(run.model, str(tmp_path / "run"), MONITORED, monitored=run.monitored)()
    assert rest.fresh_steps == STEPS - 14
    assert rest.log.losses[:14] == whole[:14]
    np.testing.assert_allclose(rest.log.losses, whole, rtol=TOLERANCE)
