"""Our Gemma 3 against transformers: logits and LoRA gradients, float32, on tiny random models."""

from copy import deepcopy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from portlab_jax.lora import AdapterOptions, init_adapter
from portlab_jax.loss import head_logits
from portlab_jax.model import Rows, hidden_states
from portlab_jax.packing import Batch
from portlab_jax.step import batch_loss
from portlab_spec.models import match_targets, param_table
from portlab_spec.recipe import Lora

LORA = Lora(rank=4, alpha=12.0)
TOKEN_IDS = (3, 5, 11)
NO_ADAPTER = {"lora": {}}


def ordinary_rows(ids, segments):
    """One segment per row, no shared prefix; positions count real tokens, so padding may stand on either side."""
    positions = np.maximum(np.cumsum(segments > 0, axis=1) - 1, 0)
    return Rows(jnp.zeros(0, jnp.int32), *map(jnp.asarray, (ids, segments, positions.astype(np.int32))))


def ours(tiny, rows, adapter=NO_ADAPTER, options=None):
    options = options or AdapterOptions(1.0)
    forward = jax.jit(lambda p, a, r: hidden_states(p, a, tiny.config, options, r))
    prefix, hidden, _ = forward(tiny.params, adapter, rows)
    embedding = tiny.params["embed_tokens"]

    def logits(h):
        flat = head_logits(h.reshape(-1, h.shape[-1]), adapter.get("token_rows"), embedding, options.token_ids)
        return np.asarray(flat).reshape(*h.shape[:-1], len(embedding))

    return logits(prefix), logits(hidden)


def random_batch(rng, rows=3, length=24, vocab=96):
    return rng.integers(3, vocab, (rows, length)).astype(np.int32)


def test_logits_of_whole_rows(tiny, rng):
    ids = random_batch(rng)
    _, got = ours(tiny, ordinary_rows(ids, np.ones_like(ids)))
    expected = tiny.torch(torch.from_numpy(ids).long()).logits.detach().numpy()
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_logits_of_padded_rows(tiny, rng, side):
    ids = random_batch(rng)
    lengths = [24, 17, 9]
    segments = np.zeros_like(ids)
    for row, n in enumerate(lengths):
        segments[row, slice(-n, None) if side == "left" else slice(0, n)] = 1
    ids = ids * segments
    _, got = ours(tiny, ordinary_rows(ids, segments))
    mask = torch.from_numpy(segments).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    expected = (
        tiny.torch(torch.from_numpy(ids).long(), attention_mask=mask, position_ids=positions).logits.detach().numpy()
    )
    real = segments.astype(bool)
    np.testing.assert_allclose(got[real], expected[real], rtol=1e-4, atol=1e-4)


def test_a_prefix_only_group_is_a_plain_forward_pass(tiny, rng):
    ids = random_batch(rng, rows=1)
    none = jnp.zeros((0, 1), jnp.int32)
    got, _ = ours(tiny, Rows(jnp.asarray(ids[0]), none, none, none))
    expected = tiny.torch(torch.from_numpy(ids).long()).logits.detach().numpy()[0]
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_padding_gives_no_nan(tiny_one):
    rows = ordinary_rows(np.zeros((2, 8), np.int32), np.zeros((2, 8), np.int32))
    _, got = ours(tiny_one, rows)
    assert np.isfinite(got).all()


def peft_twin(tiny, adapter):
    """PEFT on the transformers model, holding our adapter's values."""
    config = LoraConfig(
        r=LORA.rank,
        lora_alpha=LORA.alpha,
        target_modules=list(LORA.targets),
        trainable_token_indices={"embed_tokens": list(TOKEN_IDS)},
    )
    model = get_peft_model(deepcopy(tiny.torch), config)
    state = dict(model.named_parameters())
    with torch.no_grad():
        for param in match_targets(param_table(tiny.config), LORA.targets):
            leaf = adapter["lora"][param.name]
            for i in range(tiny.config.num_hidden_layers):
                base = f"base_model.model.{param.module(i)}"
                state[f"{base}.lora_A.default.weight"].copy_(torch.from_numpy(np.array(leaf["a"][i].T)))
                state[f"{base}.lora_B.default.weight"].copy_(torch.from_numpy(np.array(leaf["b"][i].T)))
        rows = next(p for name, p in state.items() if "trainable_tokens_delta" in name and "embed" in name)
        rows.copy_(torch.from_numpy(np.array(adapter["token_rows"])))
    return model


@pytest.fixture
def adapter(tiny):
    fresh = init_adapter(
        tiny.config, LORA, jax.random.key(0), embedding=tiny.params["embed_tokens"], token_ids=TOKEN_IDS
    )
    keys = iter(jax.random.split(jax.random.key(1), 100))
    return jax.tree.map(lambda leaf: leaf + 0.1 * jax.random.normal(next(keys), leaf.shape), fresh)


def test_adapter_logits_and_gradients_equal_peft(tiny, adapter, rng):
    options = AdapterOptions.from_recipe(LORA, TOKEN_IDS)
    ids = random_batch(rng)
    ids[:, 2] = TOKEN_IDS  # trained rows occur as inputs ...
    ids[:, -2] = TOKEN_IDS  # ... and as targets
    supervised = np.zeros_like(ids, bool)
    supervised[0, 9:], supervised[1, 15:], supervised[2, 3:] = True, True, True

    twin = peft_twin(tiny, adapter)
    labels = torch.from_numpy(np.where(supervised, ids, -100)).long()
    out = twin(torch.from_numpy(ids).long(), labels=labels)
    out.loss.backward()
    _, logits = ours(tiny, ordinary_rows(ids, np.ones_like(ids)), adapter, options)
    np.testing.assert_allclose(logits, out.logits.detach().numpy(), rtol=1e-4, atol=1e-4)

    at = np.flatnonzero(supervised)
    fill = -len(at) % 8
    slots, targets, weights = at - 1, ids.reshape(-1)[at], np.ones(len(at), np.float32)
    rows = ordinary_rows(ids, np.ones_like(ids))
    batch = Batch(
        *(
            np.asarray(x)[None]
            for x in (*rows, np.pad(slots, (0, fill)), np.pad(targets, (0, fill)), np.pad(weights, (0, fill)))
        )
    )
    grad = jax.jit(lambda a, p, b: jax.value_and_grad(batch_loss)(a, p, b, tiny.config, options, 8))
    loss, grads = grad(adapter, tiny.params, batch)
    np.testing.assert_allclose(loss, out.loss.item(), rtol=1e-5)
    state = dict(twin.named_parameters())
    for param in match_targets(param_table(tiny.config), LORA.targets):
        for i in range(tiny.config.num_hidden_layers):
            for ours_name, theirs in (("a", "lora_A"), ("b", "lora_B")):
                expected = state[f"base_model.model.{param.module(i)}.{theirs}.default.weight"].grad.numpy().T
                got = grads["lora"][param.name][ours_name][i]
                assert np.linalg.norm(got - expected) <= 1e-4 * np.linalg.norm(expected), (param.name, i, theirs)
    rows_grad = next(p for n, p in state.items() if "trainable_tokens_delta" in n and "embed" in n).grad.numpy()
    got = np.asarray(grads["token_rows"])
    assert np.linalg.norm(got - rows_grad) <= 1e-4 * np.linalg.norm(rows_grad)


def test_initial_a_has_pefts_distribution(tiny_one):
    adapter = init_adapter(tiny_one.config, LORA, jax.random.key(0))
    twin = get_peft_model(deepcopy(tiny_one.torch), LoraConfig(r=LORA.rank, target_modules=list(LORA.targets)))
    for param in match_targets(param_table(tiny_one.config), LORA.targets):
        ours_a = np.asarray(adapter["lora"][param.name]["a"])
        theirs = np.stack(
            [
                dict(twin.named_parameters())[f"base_model.model.{param.module(i)}.lora_A.default.weight"].detach()
                for i in range(tiny_one.config.num_hidden_layers)
            ]
        )
        bound = 1 / np.sqrt(param.shape[1])
        assert np.abs(ours_a).max() <= bound
        assert np.abs(theirs).max() <= bound
        assert ours_a.std() == pytest.approx(theirs.std(), rel=0.1)
        assert not np.asarray(adapter["lora"][param.name]["b"]).any()
