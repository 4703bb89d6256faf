"""One recipe, one curve: train-xla on the CPU and on 1 and 4 XLA devices, train-torchax, train-jax, and plain PyTorch.

Loss and gradient norm of 20 steps, from the same adapter on the same batches, agree to 1e-4 in float32. torch_xla's
wheel holds another torchax, so that each session has one of the two, and train-jax is beside both.
"""

import importlib.util
import json
import math
import os
from importlib.metadata import PackageNotFoundError, version

os.environ.setdefault("USE_TORCH_XLA", "0")  # this process is plain PyTorch; XLA has processes of its own

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import training_runs
from parity_runs import TOKEN_IDS, Run, metrics, run_in_torch
from tiny_run import save_tokenizer
from toy_gemmas import CASES, gemma3, randomize

from portlab_hf.adapter_files import adapter_tensors, write_adapter
from portlab_hf.model import add_adapter, load_base, trained_parameters
from portlab_jax.optim import make_optimizer as make_jax_optimizer
from portlab_spec.assets import ModelFolder
from portlab_spec.models import GemmaConfig
from portlab_spec.recipe import Optimizer, Recipe


def has_torchax():
    try:
        return version("torchax") == "0.0.13"
    except PackageNotFoundError:
        return False


HAS_XLA = importlib.util.find_spec("torch_xla") is not None
HAS_TORCHAX = has_torchax() and not HAS_XLA
pytestmark = pytest.mark.skipif(not (HAS_XLA or HAS_TORCHAX), reason="its sessions are tests_xla and tests_torchax")
on_xla = pytest.mark.skipif(not HAS_XLA, reason="its session is tests_xla")
on_torchax = pytest.mark.skipif(not HAS_TORCHAX, reason="its session is tests_torchax")

STEPS = 20
TOLERANCE = 1e-4

TOYS = {
    "gemma3": CASES["gemma3, two kv heads"],
    "shared": CASES["gemma4, shared keys and values"],
    "key is value": CASES["gemma4, keys are values"],
    "experts": CASES["gemma4, experts"],
    # As wide as it takes for Adafactor to factor a moment.
    "wide": lambda: gemma3(layers=2, hidden_size=128, intermediate_size=128, head_dim=32, sliding_window=30),
}
LORA = {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "k_proj", "v_proj", "down_proj"]}
EXPERTS = {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "experts.gate_up_proj", "experts.down_proj"]}
WIDE = {"rank": 128, "alpha": 128.0, "targets": ["q_proj", "down_proj"]}
COSINE = {"learning_rate": 1e-2, "schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.1, "b2": 0.95}
ADAFACTOR = {"name": "adafactor", "learning_rate": 1e-2, "schedule": "constant", "warmup_steps": 0}

# What is trained in each run, and how. Together they hold every kind of layer, both optimisers, every way to cut.
RUNS = {
    "gemma3": {"model": "gemma3"},
    "gemma3, recomputed": {"model": "gemma3", "remat": "block", "accumulate": 2},
    "shared": {"model": "shared"},
    "shared, recomputed": {"model": "shared", "remat": "block"},
    "key is value": {"model": "key is value", "optimizer": ADAFACTOR},
    "experts": {"model": "experts", "lora": EXPERTS},
    "wide": {"model": "wide", "lora": WIDE, "optimizer": ADAFACTOR},
}
MESHES = {"fsdp": {"fsdp": 4}, "tp": {"fsdp": 2, "tp": 2}, "data": {"data": 4}}


def recipe(name, start_from, **changes):
    fields = {key: value for key, value in RUNS[name].items() if key != "model"}
    lora = fields.pop("lora", LORA) | {"start_from": str(start_from)}
    return {
        "steps": STEPS, "batch_size": 8, "max_length": 64, "save_every": STEPS, "dtype": "float32",
        "optimizer": COSINE, "lora": lora, **fields, **changes,
    }  # fmt: skip


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    """For each run's model and targets: the base, and an adapter drawn once."""
    made = {}

    def get(name):
        model, lora = RUNS[name]["model"], RUNS[name].get("lora", LORA)
        key = json.dumps([model, lora])
        if key not in made:
            folder = tmp_path_factory.mktemp("toy")
            base, start = folder / "base", folder / "start"
            randomize(TOYS[model]()).save_pretrained(base)
            save_tokenizer(base)
            start.mkdir()
            draw_adapter(base, lora, start)
            made[key] = base, start
        return made[key]

    return get


def draw_adapter(base, lora, folder):
    wanted = Recipe.model_validate({"lora": lora, "dtype": "float32"})
    adapted = add_adapter(
        wanted, GemmaConfig.load(base), load_base(base, torch.float32), ModelFolder(base, "toy", None), TOKEN_IDS
    )
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in trained_parameters(adapted).values():
            parameter.add_(torch.randn_like(parameter), alpha=0.1 / math.sqrt(wanted.lora.rank))
    write_adapter(adapted, adapter_tensors(adapted), folder)


@pytest.fixture(scope="module")
def curves(toys, tmp_path_factory):
    """Does runs together, one process for a way to compute, and gives [loss, gradient norm] by name."""
    known = {}

    def of(how, devices, names, **changes):
        folder = tmp_path_factory.mktemp("runs")
        key = json.dumps([how, devices, names, changes])
        if key in known:
            return known[key]
        made = {
            name: (str(toys(name)[0]), str(folder / name), recipe(name, toys(name)[1], **changes)) for name in names
        }
        if how == "jax":
            runs = {name: training_runs.Run(*parts) for name, parts in made.items()}
            training_runs.run_elsewhere(folder / "runs.json", runs, devices=devices)
        else:
            runs = {name: Run(*parts) for name, parts in made.items()}
            run_in_torch(folder / "runs.json", runs, how, devices=devices)
        known[key] = {
            name: np.array([metrics(run.folder, key) for key in ("loss", "grad_norm")]) for name, run in runs.items()
        }
        return known[key]

    return of


@pytest.fixture(scope="module")
def on_cpu(curves):
    """train-xla's."""
    return curves("cpu", 1, list(RUNS))


@pytest.fixture(scope="module")
def in_jax(curves):
    """train-jax's."""
    return curves("jax", 1, list(RUNS))


def assert_one_curve(found, reference):
    for name, curve in found.items():
        assert curve.shape == (2, STEPS)
        np.testing.assert_allclose(curve, reference[name], rtol=TOLERANCE, err_msg=name)


def test_the_curves_fall(in_jax):
    for name, (loss, _) in in_jax.items():
        assert loss[-3:].mean() < 0.95 * loss[:3].mean(), name


@on_xla
def test_train_xla(on_cpu, in_jax):
    assert_one_curve(on_cpu, in_jax)


@on_torchax
def test_train_torchax(curves, in_jax):
    assert_one_curve(curves("torchax", 1, list(RUNS)), in_jax)


def test_plain_pytorch(curves, in_jax):
    names = ["gemma3", "shared", "experts"]
    assert_one_curve(curves("plain", 1, names), in_jax)


@on_xla
def test_recomputing_changes_nothing(on_cpu):
    np.testing.assert_allclose(on_cpu["gemma3, recomputed"], on_cpu["gemma3"], rtol=1e-5)
    np.testing.assert_allclose(on_cpu["shared, recomputed"], on_cpu["shared"], rtol=1e-5)


@on_xla
def test_one_xla_device(on_cpu, curves):
    assert_one_curve(curves("xla", 1, ["gemma3", "shared, recomputed", "wide"]), on_cpu)


@on_xla
def test_four_xla_devices(on_cpu, curves):
    assert_one_curve(curves("xla", 4, ["gemma3, recomputed", "key is value", "experts"], mesh=MESHES["fsdp"]), on_cpu)


@on_xla
def test_four_xla_devices_that_cut_heads(on_cpu, curves):
    assert_one_curve(curves("xla", 4, ["gemma3", "shared, recomputed"], mesh=MESHES["tp"]), on_cpu)


MOMENTS = {"adamw": COSINE, "adafactor": ADAFACTOR | {"weight_decay": 0.1}}


def steps_of_train_xla(settings, start):
    """A function that takes a step with the gradients of some matrices and gives the matrices."""
    from portlab_xla.optim import make_optimizer, make_scheduler

    matrices = [torch.nn.Parameter(torch.tensor(matrix)) for matrix in start]
    optimizer = make_optimizer(settings, matrices)
    scheduler = make_scheduler(settings, STEPS, 0, optimizer)

    def step(grads):
        for matrix, grad in zip(matrices, grads, strict=True):
            matrix.grad = torch.from_numpy(grad)
        torch.nn.utils.clip_grad_norm_(matrices, settings.clip_norm)
        optimizer.step()
        scheduler.step()
        return [matrix.detach().numpy() for matrix in matrices]

    return step


def steps_of_train_torchax(settings, start):
    from portlab_torchax.optim import make_optimizer

    transform = make_optimizer(settings, STEPS)
    matrices = {str(i): jnp.array(matrix) for i, matrix in enumerate(start)}
    state, advance = transform.init(matrices), jax.jit(transform.update)

    def step(grads):
        nonlocal matrices, state
        updates, state = advance({str(i): jnp.array(grad) for i, grad in enumerate(grads)}, state, matrices)
        matrices = optax.apply_updates(matrices, updates)
        return list(matrices.values())

    return step


@pytest.mark.parametrize(
    "steps_of",
    [pytest.param(steps_of_train_xla, marks=on_xla), pytest.param(steps_of_train_torchax, marks=on_torchax)],
)
@pytest.mark.parametrize("name", MOMENTS)
def test_optimisers_take_the_same_steps(name, steps_of):
    """Random gradients, small and large, of two stacked layers for train-jax and of two matrices for the others."""
    settings, rng = Optimizer(**MOMENTS[name]), np.random.default_rng(0)
    start = {shape: rng.normal(0, 1, (2, *shape)).astype(np.float32) for shape in ((6, 8), (130, 140))}
    transform = make_jax_optimizer(settings, STEPS)
    stacked = {"lora": {str(shape): {"a": jnp.array(value)} for shape, value in start.items()}}
    state, advance = transform.init(stacked), jax.jit(transform.update)
    matrices = [layer for value in start.values() for layer in value]
    take_step = steps_of(settings, matrices)
    for step in range(STEPS):
        grads = [rng.normal(0, 10.0 ** -(i + step % 3), m.shape).astype(np.float32) for i, m in enumerate(matrices)]
        pairs = {str(shape): {"a": jnp.stack(grads[2 * i : 2 * i + 2])} for i, shape in enumerate(start)}
        updates, state = advance({"lora": pairs}, state, stacked)
        stacked = optax.apply_updates(stacked, updates)
        layers = [layer for shape in start for layer in np.asarray(stacked["lora"][str(shape)]["a"])]
        for matrix, layer in zip(take_step(grads), layers, strict=True):
            np.testing.assert_allclose(matrix, layer, rtol=TOLERANCE, atol=1e-6)
