"""Greedy decoding with slots: the ids of transformers' own generation, from a number of programs that is bounded."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import xla_decoding
from xla_runs import environment

from portlab_hf.model import load_base
from portlab_xla.decode import WIDTHS, Decoder

VOCAB, NEW = 96, 8
NOTHING = 9999  # a stop token that never comes
MODELS = [
    "gemma3, two kv heads",  # a window of 6, shorter than every prompt
    "gemma3, scaled global rope",
    "gemma4, keys are values",
    "gemma4, shared keys and values",
]


def make_prompts(prefix, lengths, seed=0):
    """Prompts of the given lengths behind a common start of so many ids."""
    rng = np.random.default_rng(seed)
    shared = [2, *rng.integers(12, VOCAB, prefix)][:prefix]
    tails = [[12 + i, *rng.integers(12, VOCAB, length - 1)] for i, length in enumerate(lengths)]
    return [[*map(int, shared), *map(int, tail)] for tail in tails]


def generated(model, prompts, new=NEW):
    """What transformers generates, without batching, padding or a cache."""
    config = {"do_sample": False, "use_cache": False, "max_new_tokens": new, "eos_token_id": None, "pad_token_id": 0}
    return [model.generate(input_ids=torch.tensor([ids]), **config)[0, len(ids) :].tolist() for ids in prompts]


@pytest.fixture(scope="module")
def toy(adapted_toy, cpu):
    """Makes (once) the model of a case with a trained adapter, as the decoder takes it."""
    made = {}

    def get(case):
        if case not in made:
            made[case] = adapted_toy(case)
            made[case].device = cpu
        return made[case]

    return get


PROMPTS = {
    "a common start": make_prompts(20, [5, 9, 3, 7, 1]),
    "nothing in common": make_prompts(0, [9, 30, 14]),
    "one prompt": make_prompts(10, [4]),
    "one that is the start of the others": [ids[:12] for ids in make_prompts(12, [1])] + make_prompts(12, [2, 5]),
    "the same twice": make_prompts(10, [4]) * 2,
    "as wide as the slots": make_prompts(8, [WIDTHS, WIDTHS + 1]),
}


# Every kind of prompt on the first and the last model, the first two kinds on the others.
PAIRS = [(case, kind) for case in MODELS for kind in list(PROMPTS)[: None if case in (MODELS[0], MODELS[-1]) else 2]]


@pytest.fixture(scope="module")
def expected(toy):
    """Generates (once) what transformers says to a kind of prompts."""
    made = {}

    def get(case, kind):
        if (case, kind) not in made:
            made[case, kind] = generated(toy(case).adapted.eval(), PROMPTS[kind])
        return made[case, kind]

    return get


@pytest.mark.parametrize(("case", "kind"), PAIRS)
def test_ids_are_those_of_transformers(toy, expected, case, kind):
    assert Decoder(toy(case), [NOTHING], NEW)(PROMPTS[kind]) == expected(case, kind)


@pytest.mark.parametrize("case", MODELS)
def test_the_models_say_enough_to_tell_them_apart(expected, case):
    assert len(np.unique(expected(case, "a common start"))) > 3


@pytest.mark.parametrize("size", [1, 2, 3])
def test_batches_of_any_size_say_the_same(toy, expected, size):
    done = []
    decoder = Decoder(toy(MODELS[0]), [NOTHING], NEW)
    found = decoder(PROMPTS["a common start"], batch_size=size, advance=done.append)
    assert found == expected(MODELS[0], "a common start")
    assert done == [min(n, 5) for n in range(size, 5 + size, size)]


def test_a_row_ends_with_its_first_stop_token(toy, expected):
    whole = expected(MODELS[0], "a common start")
    stop = {whole[0][3], whole[1][0]}
    cut = [ids[: next((i + 1 for i, token in enumerate(ids) if token in stop), NEW)] for ids in whole]
    assert len(cut[1]) == 1
    assert Decoder(toy(MODELS[0]), sorted(stop), NEW)(PROMPTS["a common start"]) == cut


def test_once_every_row_has_stopped_no_more_is_computed(toy, monkeypatch):
    setup, prompts = toy(MODELS[0]), make_prompts(20, [5, 9])
    steps = []
    choose = Decoder._choose
    monkeypatch.setattr(Decoder, "_choose", lambda *args: steps.append(1) or choose(*args))
    first = [ids[0] for ids in generated(setup.adapted.eval(), prompts, 1)]
    assert Decoder(setup, first, 100)(prompts) == [[token] for token in first]
    assert len(steps) == 8


def test_one_new_token(toy):
    setup, prompts = toy(MODELS[0]), make_prompts(20, [5, 9])
    assert Decoder(setup, [NOTHING], 1)(prompts) == generated(setup.adapted.eval(), prompts, 1)


def test_decoding_leaves_the_model_training_and_without_gradients(toy):
    setup = toy(MODELS[0])
    setup.adapted.train()
    Decoder(setup, [NOTHING], 2)(make_prompts(4, [3]))
    assert setup.adapted.training
    assert all(parameter.grad is None for parameter in setup.adapted.parameters())


# On two devices of XLA


@pytest.fixture(scope="module")
def on_xla(toy_folder, tmp_path_factory):
    """Three sets of one, two and three batches: what should be said, and what was said after how many compilations."""
    if importlib.util.find_spec("torch_xla") is None:
        pytest.skip("needs torch_xla")
    folder, file = toy_folder(MODELS[0]), tmp_path_factory.mktemp("xla") / "prompts.json"
    sets = [make_prompts(20, lengths, seed) for seed, lengths in enumerate([[5, 9, 3], [7] * 8, range(1, 10)])]
    file.write_text(json.dumps({"sets": sets, "stop": [NOTHING], "new": 4, "batch": 4}))
    command = [sys.executable, xla_decoding.__file__, str(folder), str(file)]
    done = subprocess.run(command, env=environment(2), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    base = load_base(Path(folder), torch.float32).eval()
    return [generated(base, prompts, 4) for prompts in sets], json.loads(done.stdout.splitlines()[-1])


def test_ids_of_xla_are_those_of_transformers(on_xla):
    expected, found = on_xla
    assert found["ids"] == expected


def test_more_batches_compile_nothing_more(on_xla):
    first, *more = on_xla[1]["compiled"]
    assert more == [first, first]
