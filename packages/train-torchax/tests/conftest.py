"""Tiny random models, set up as a run sets them up, and the same ones in plain PyTorch."""

import os

os.environ.setdefault("USE_TORCH_XLA", "0")  # before transformers and PEFT are imported
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # compiles in half the time

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from toy_gemmas import CASES, OTHERS, randomize
from toy_rows import branching_rows

from portlab_hf.model import add_adapter, load_base, train_weights_of
from portlab_spec.assets import ModelFolder
from portlab_spec.packing import pack_batch
from portlab_spec.recipe import Recipe
from portlab_torchax.setup import initial_state, jit_step, set_up

TOYS = CASES | OTHERS
TOKEN_IDS = (3, 5)
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SETTINGS = {"steps": 20, "batch_size": 4, "max_length": 64, "dtype": "float32"}


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory):
    """Makes (once) the folder of a random model of toy_gemmas."""
    made: dict[str, Path] = {}

    def get(case):
        if case not in made:
            made[case] = tmp_path_factory.mktemp("toy")
            randomize(TOYS[case]()).save_pretrained(made[case])
        return made[case]

    return get


@pytest.fixture(scope="session")
def toy(toy_folder):
    """Sets a toy up with a recipe; adapters start far from zero, so that every part of them gets a gradient."""

    def make(case, *, token_ids=None, lora=None, **changes):
        folder = toy_folder(case)
        settings = SETTINGS | {"lora": {"rank": 4, "alpha": 8.0, "targets": TARGETS} | (lora or {})} | changes
        recipe = Recipe.model_validate(settings)
        if token_ids is None:
            tied = case in CASES or TOYS[case]().config.tie_word_embeddings
            token_ids = TOKEN_IDS if tied and recipe.method == "lora" else ()
        setup = set_up(recipe, ModelFolder(folder, case, None), token_ids)
        return setup if recipe.method == "full" else dataclasses.replace(setup, start=disturbed(setup.start))

    return make


def disturbed(start):
    """Trained leaves with noise on them."""
    rng = np.random.default_rng(1)
    return {
        name: jax.device_put(np.asarray(value) + rng.normal(0, 0.2, value.shape).astype(np.float32), value.sharding)
        for name, value in start.items()
    }


@pytest.fixture(scope="session")
def in_plain_pytorch(toy_folder):
    """The model of a setup as transformers and PEFT have it, with eager attention and the same values in it."""

    def make(setup):
        folder = setup.model.path
        base = load_base(folder, torch.float32, attention="eager")
        if setup.full:
            train_weights_of(base)
            model = base
        else:
            model = add_adapter(setup.recipe, setup.config, base, setup.model, setup.token_ids)
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, value in setup.start.items():
                parameters[name].copy_(torch.tensor(np.asarray(value)))
        return model.train()

    return make


@pytest.fixture(scope="session")
def make_rows():
    """Makes rows of uneven lengths behind a common start, in which trained ids occur, supervised and not."""

    def make(n=4, prefix=20, trained=TOKEN_IDS, seed=0):
        return branching_rows(n, prefix, trained, seed)

    return make


@pytest.fixture(scope="session")
def curve():
    """Trains on batches, given with their layouts. Returns [loss, gradient norm] of every step."""

    def train(setup, batches):
        state, steps, found = initial_state(setup), {}, []
        for layout, batch in batches:
            placed = setup.placement.put_rows(batch, axis=1)
            if layout not in steps:
                steps[layout] = jit_step(setup, state, layout)
            state, metrics = steps[layout](state, setup.frozen, placed)
            found.append((float(metrics.loss), float(metrics.grad_norm)))
        return np.array(found).T

    return train


@pytest.fixture(scope="session")
def gradients():
    """Loss sums, number of supervised tokens and gradients of a setup's model on rows, in one program as of a step."""

    def compute(setup, rows, *, trained=None, key=0):
        plan = setup.plan([rows], accumulate=setup.recipe.accumulate)
        batch = setup.placement.put_rows(pack_batch(rows, plan.layouts[0]), axis=1)

        @jax.jit
        def program(trained, frozen, batch, key):
            return setup.program.gradients(trained, frozen, batch, plan.layouts[0].chunk, key)

        return program(setup.start if trained is None else trained, setup.frozen, batch, jax.random.key(key))

    return compute
