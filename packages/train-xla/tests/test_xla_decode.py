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

from portlab_xla.decode import WIDTHS, Decoder
from portlab_xla.model import load_base

VOCAB, NEW = 96, 12
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


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("prompts", PROMPTS.values(), ids=PROMPTS)
def test_ids_are_those_of_transformers(toy, case, prompts):
    setup = toy(case)
    found = Decoder(setup, [NOTHING], NEW)(prompts)
    assert found == generated(setup.adapted.eval(), prompts)
    assert len(np.unique(found)) > 2, "a model that says the same always shows nothing"


@pytest.mark.parametrize("size", [1, 2, 3, 32])
def test_batches_of_any_size_say_the_same(toy, size):
    setup, prompts = toy(MODELS[0]), make_prompts(20, [5, 9, 3, 7, 1])
    done = []
    assert Decoder(setup, [NOTHING], NEW)(prompts, batch_size=size, advance=done.append) == generated(
        setup.adapted.eval(), prompts
    )
    assert done == [min(n, 5) for n in range(size, 5 + size, size)]


def test_a_row_ends_with_its_first_stop_token(toy):
    setup, prompts = toy(MODELS[0]), make_prompts(20, [5, 9, 3, 7])
    whole = generated(setup.adapted.eval(), prompts)
    stop = [whole[0][3], whole[1][0]]
    expected = [ids[: min(ids.index(s) for s in stop if s in ids) + 1] if {*stop} & {*ids} else ids for ids in whole]
    assert len(expected[1]) == 1
    assert Decoder(setup, stop, NEW)(prompts) == expected


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


@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="needs torch_xla")
def test_on_xla_more_batches_compile_nothing_more(toy_folder, tmp_path):
    folder = toy_folder(MODELS[0])
    sets = [make_prompts(20, lengths, seed) for seed, lengths in enumerate([[5, 9, 3], [7] * 8, range(1, 14)])]
    asked = {"sets": sets, "stop": [NOTHING], "new": 4, "batch": 4}
    (tmp_path / "prompts.json").write_text(json.dumps(asked))
    done = subprocess.run(
        [sys.executable, xla_decoding.__file__, str(folder), str(tmp_path / "prompts.json")],
        env=environment(2), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    base = load_base(Path(folder), torch.float32).eval()
    assert found["ids"] == [generated(base, prompts, 4) for prompts in sets]
    assert found["compiled"] == [found["compiled"][0]] * 3
