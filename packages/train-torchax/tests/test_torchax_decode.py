"""Greedy decoding in one program: the ids of transformers' own generation, from few compiled programs."""

import dataclasses

import jax
import numpy as np
import pytest
import torch

from portlab_torchax.decode import WIDTHS, Decoder

VOCAB, NEW = 96, 6
NOTHING = 9999  # a stop token that never comes
GEMMA = "gemma3, two kv heads"  # a window of 6, shorter than every prompt
SHARED = "gemma4, shared keys and values"
MODELS = [GEMMA, "gemma4, keys are values", SHARED, "gemma4, experts", "llama", "mistral", "qwen3"]


def make_prompts(prefix, lengths, seed=0):
    """Prompts of the given lengths behind a common start of so many ids, in which trained ones occur."""
    rng = np.random.default_rng(seed)
    shared = [2, 3, 5, *rng.integers(12, VOCAB, prefix)][:prefix]
    tails = [[12 + i, *rng.integers(12, VOCAB, length - 1)] for i, length in enumerate(lengths)]
    return [[*map(int, shared), *map(int, tail)] for tail in tails]


def generated(model, prompts, new=NEW):
    """What transformers generates, without batching, padding or a cache."""
    config = {"do_sample": False, "use_cache": False, "max_new_tokens": new, "eos_token_id": None, "pad_token_id": 0}
    return [model.generate(input_ids=torch.tensor([ids]), **config)[0, len(ids) :].tolist() for ids in prompts]


def decoder_of(setup, new=NEW, groups=1):
    """A decoder of a setup, and the values that it takes."""
    values = setup.program.values(setup.start, setup.frozen)
    return Decoder(setup.program, groups, setup.placement.put_rows, new), values


@pytest.fixture(scope="module")
def made(toy):
    """Sets a case up (once), with an adapter far from zero."""
    found = {}

    def get(case):
        if case not in found:
            experts = {"targets": ("q_proj", "v_proj")} if "experts" in case else None
            setup = toy(case, lora=experts)
            found[case] = setup, *decoder_of(setup)
        return found[case]

    return get


PROMPTS = {
    "a common start": make_prompts(20, [5, 9, 3, 7, 1]),
    "nothing in common": make_prompts(0, [9, 30, 14]),
    "one prompt": make_prompts(10, [4]),
    "one that is the start of the others": [ids[:12] for ids in make_prompts(12, [1])] + make_prompts(12, [2, 5]),
    "the same twice": make_prompts(10, [4]) * 2,
    "as wide as the slots": make_prompts(8, [WIDTHS, WIDTHS + 1]),
}
# Every kind of prompt on one model, those with a shared start on each, and those without where keys are shared.
PAIRS = [(case, "a common start") for case in MODELS] + [(GEMMA, kind) for kind in list(PROMPTS)[1:]]
PAIRS += [(SHARED, "nothing in common")]


@pytest.fixture(scope="module")
def expected(made, in_plain_pytorch):
    """Generates (once) what transformers says to a kind of prompts."""
    found = {}

    def get(case, kind="a common start"):
        if (case, kind) not in found:
            found[case, kind] = generated(in_plain_pytorch(made(case)[0]).eval(), PROMPTS[kind])
        return found[case, kind]

    return get


@pytest.mark.parametrize(("case", "kind"), PAIRS)
def test_ids_are_those_of_transformers(made, expected, case, kind):
    _, decoder, values = made(case)
    assert decoder(values, PROMPTS[kind], [NOTHING]) == expected(case, kind)


@pytest.mark.parametrize("case", MODELS)
def test_the_models_say_enough_to_tell_them_apart(expected, case):
    assert len(np.unique(expected(case))) > 3


def test_batches_say_the_same_also_when_the_last_is_not_full(made, expected):
    _, decoder, values = made(GEMMA)
    done = []
    found = decoder(values, PROMPTS["a common start"], [NOTHING], batch_size=3, advance=done.append)
    assert found == expected(GEMMA)
    assert done == [3, 5]


def test_a_row_ends_with_its_first_stop_token(made, expected):
    _, decoder, values = made(GEMMA)
    whole = expected(GEMMA)
    stop = {whole[0][3], whole[1][0]}
    cut = [ids[: next((i + 1 for i, token in enumerate(ids) if token in stop), NEW)] for ids in whole]
    assert len(cut[1]) == 1
    assert max(map(len, cut)) > 1
    assert decoder(values, PROMPTS["a common start"], sorted(stop)) == cut


def test_once_every_row_has_stopped_no_more_is_computed(made, expected, monkeypatch):
    steps = []
    choose = Decoder._choose

    def counted(*args):
        jax.debug.callback(lambda: steps.append(1))
        return choose(*args)

    monkeypatch.setattr(Decoder, "_choose", counted)
    decoder, values = decoder_of(made(GEMMA)[0], 50)
    prompt, said = max(zip(PROMPTS["a common start"], expected(GEMMA), strict=True), key=lambda pair: len(set(pair[1])))
    end = next(i for i, token in enumerate(said) if token != said[0])
    assert decoder(values, [prompt], [said[end]]) == [said[: end + 1]]
    jax.effects_barrier()
    assert len(steps) == end + 1


def test_one_new_token(made, expected):
    decoder, values = decoder_of(made(GEMMA)[0], 1)
    assert decoder(values, PROMPTS["one prompt"], [NOTHING]) == [ids[:1] for ids in expected(GEMMA, "one prompt")]


def test_a_token_whose_row_is_trained_can_be_said(made, expected, in_plain_pytorch):
    setup, decoder, _ = made(GEMMA)
    prompts = PROMPTS["one prompt"]
    said = expected(GEMMA, "one prompt")[0][0]
    (rows,) = (name for name in setup.start if "trainable_tokens" in name)
    embedding = next(value for name, value in setup.frozen.items() if "embed_tokens" in name and value.ndim == 2)
    loud = setup.start[rows].at[1].set(3 * embedding[said])  # the row of id 5
    changed = dataclasses.replace(setup, start=setup.start | {rows: loud})
    found = decoder(setup.program.values(changed.start, changed.frozen), prompts, [NOTHING])
    assert found[0][0] == 5
    assert found == generated(in_plain_pytorch(changed).eval(), prompts)


def test_more_batches_of_one_width_compile_nothing_more(made):
    decoder, values = decoder_of(made(GEMMA)[0], 2)
    for seed, lengths in enumerate([[5, 9, 3, 1], [7] * 8, [*range(1, 11)]]):
        decoder(values, make_prompts(20, lengths, seed), [NOTHING], batch_size=4)
    assert decoder.compilations == 1
    assert decoder._generate._cache_size() == decoder._prefix._cache_size() == 1
    assert decoder.tokens_per_second > 0


def test_rows_are_a_multiple_of_the_groups(made, expected):
    decoder, values = decoder_of(made(GEMMA)[0], groups=4)
    seen = []
    decoder._put = lambda arrays: seen.append(len(arrays[0])) or arrays
    assert decoder(values, PROMPTS["a common start"], [NOTHING], batch_size=2) == expected(GEMMA)
    assert seen == [4, 4]
