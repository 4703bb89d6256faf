"""Greedy decoding with a shared prefix gives what the whole sequence gives without a cache."""

import jax
import pytest
import torch

from portlab_jax.decode import Decoder, common_prefix_length
from portlab_jax.lora import AdapterOptions, init_adapter
from portlab_spec.recipe import Lora

NEW = 10
OPTIONS = AdapterOptions(1.0)
NO_ADAPTER = {"lora": {}}


def prompts_with(rng, prefix, suffixes):
    shared = rng.integers(3, 96, prefix).tolist()
    return [[*shared, 10 + i, *rng.integers(3, 96, n).tolist()] for i, n in enumerate(suffixes)]


def reference(tiny, prompt, stop_ids):
    """Token by token over the whole sequence in transformers, no cache."""
    ids = list(prompt)
    for _ in range(NEW):
        with torch.no_grad():
            ids.append(int(tiny.torch(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        if ids[-1] in stop_ids:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("prefix", [20, 1], ids=["window shorter than prefix", "only BOS shared"])
def test_equals_transformers_token_by_token(tiny, rng, prefix):
    prompts = prompts_with(rng, prefix, [3, 9, 1, 5])
    free = [reference(tiny, p, stop_ids=()) for p in prompts]
    stop_ids = (free[0][4], free[1][0])  # tokens that really occur, so that rows stop at different times
    expected = [reference(tiny, p, stop_ids) for p in prompts]
    assert len({len(e) for e in expected}) > 1
    decoder = Decoder(tiny.config, OPTIONS, stop_ids, NEW, tiny.mesh)
    assert decoder(tiny.params, NO_ADAPTER, prompts, batch_size=4) == expected


def test_batch_size_does_not_change_the_answers(tiny_one, rng):
    lora = Lora(rank=4, alpha=8.0)
    adapter = init_adapter(
        tiny_one.config, lora, jax.random.key(0), embedding=tiny_one.params["embed_tokens"], token_ids=(3, 5)
    )
    keys = iter(jax.random.split(jax.random.key(1), 100))
    adapter = jax.tree.map(lambda leaf: leaf + 0.1 * jax.random.normal(next(keys), leaf.shape), adapter)
    options = AdapterOptions.from_recipe(lora, (3, 5))
    prompts = prompts_with(rng, 12, [3, 9, 1, 5, 2])
    decoder = Decoder(tiny_one.config, options, (), NEW, tiny_one.mesh)
    whole = decoder(tiny_one.params, adapter, prompts, batch_size=8)
    assert whole == decoder(tiny_one.params, adapter, prompts, batch_size=2)
    assert all(len(ids) == NEW for ids in whole)


def test_common_prefix_leaves_every_prompt_a_token():
    assert common_prefix_length([[1, 2, 3], [1, 2]]) == 1
    assert common_prefix_length([[1, 2, 3], [1, 5, 3]]) == 1
    assert common_prefix_length([[1, 2, 3], [4]]) == 0
    assert common_prefix_length([[1, 2, 3]]) == 2


def test_progress_is_told_after_every_batch(tiny_one, rng):
    told = []
    decoder = Decoder(tiny_one.config, OPTIONS, (), 2, tiny_one.mesh)
    decoder(tiny_one.params, NO_ADAPTER, prompts_with(rng, 4, [1, 1, 1]), batch_size=2, advance=told.append)
    assert told == [2, 3]
