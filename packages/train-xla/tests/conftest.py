"""Tiny random Gemmas with adapters in them, in plain PyTorch: a process is either that or torch_xla's."""

import os

os.environ["USE_TORCH_XLA"] = "0"  # before transformers, accelerate and PEFT are imported

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from toy_gemmas import CASES, randomize
from toy_rows import branching_rows

from portlab_hf.model import add_adapter, load_base, trained_parameters
from portlab_spec.assets import ModelFolder
from portlab_spec.models import GemmaConfig
from portlab_spec.packing import Packing, pack_batch, plan
from portlab_spec.recipe import Mesh, Recipe
from portlab_xla.devices.plain import PlainDevice
from portlab_xla.inputs import MicroBatch, micro_batches

TOKEN_IDS = (3, 5)
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory):
    """Makes (once) the folder of a case's random model."""
    made: dict[str, Path] = {}

    def get(case):
        if case not in made:
            made[case] = tmp_path_factory.mktemp("toy")
            randomize(CASES[case]()).save_pretrained(made[case])
        return made[case]

    return get


@pytest.fixture(scope="session")
def adapted_toy(toy_folder):
    """Makes the model of a case with an adapter in it whose matrices are all far from zero."""

    def make(case, *, targets=TARGETS, token_ids=TOKEN_IDS, device=None, seed=0, **lora):
        folder = toy_folder(case)
        lora = {"rank": 4, "alpha": 8.0, "targets": targets, **lora}
        recipe = Recipe.model_validate({"lora": lora, "dtype": "float32", "seed": seed})
        config, base = GemmaConfig.load(folder), load_base(folder, torch.float32)
        adapted = add_adapter(recipe, config, base, ModelFolder(folder, case, None), token_ids)
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in trained_parameters(adapted).values():
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
        return SimpleNamespace(recipe=recipe, config=config, base=base, adapted=adapted.train(), folder=folder)

    return make


@pytest.fixture(scope="session")
def cpu():
    return PlainDevice("cpu", Mesh())


@pytest.fixture(scope="session")
def make_rows():
    """Makes rows of uneven lengths behind a common start, in which trained ids occur, supervised and not."""

    def make(n=4, prefix=20, trained=TOKEN_IDS, seed=0):
        return branching_rows(n, prefix, trained, seed)

    return make


@pytest.fixture(scope="session")
def packed():
    """Packs rows as the trainer does. Returns the step's micro-batches and the chunk of the loss."""

    def pack(rows, config, *, groups=1, accumulate=1, share_prefix=True, max_chunk=128, max_row_length=None):
        packing = Packing(
            groups=groups,
            accumulate=accumulate,
            window=config.window,
            share_prefix=share_prefix,
            max_row_length=max_row_length,
        )
        planned = plan([rows], packing, min_saving=0.0, max_chunk=max_chunk)
        batch = pack_batch(rows, planned.layouts[0])
        return [MicroBatch(**tensors) for tensors in micro_batches(batch)], planned.layouts[0].chunk

    return pack
