"""Shared-prefix packing computes the same loss and gradients as the ordinary padded batch."""

import jax
import numpy as np
import pytest

from portlab_jax.lora import AdapterOptions, init_adapter
from portlab_jax.packing import batch_order, pack_batch, plan_layout
from portlab_jax.step import batch_loss
from portlab_spec.data.tokens import Row, shared_prefix_length
from portlab_spec.recipe import Lora

LORA = Lora(rank=4, alpha=8.0)
TOKEN_IDS = (3, 5)
OPTIONS = AdapterOptions.from_recipe(LORA, TOKEN_IDS)


def make_rows(rng, n=9, prefix=20, vocab=96):
    shared = rng.integers(3, vocab, prefix).tolist()
    rows = []
    for i in range(n):
        question, answer = rng.integers(3, 9), rng.integers(2, 6)
        suffix = rng.integers(3, vocab, question + answer).tolist()
        suffix[0] = 10 + i  # questions differ at once: the shared prefix is exactly `prefix`
        loss = [False] * (prefix + question) + [True] * answer
        rows.append(Row(f"r{i}", tuple(shared + suffix), tuple(loss), stratum="ab"[i % 2]))
    return rows


@pytest.fixture
def adapter(tiny):
    fresh = init_adapter(
        tiny.config, LORA, jax.random.key(0), embedding=tiny.params["embed_tokens"], token_ids=TOKEN_IDS
    )
    keys = iter(jax.random.split(jax.random.key(1), 100))
    return jax.tree.map(lambda leaf: leaf + 0.05 * jax.random.normal(next(keys), leaf.shape), fresh)


def loss_and_grads(tiny, adapter, rows, *, groups=1, share_prefix=True, pack=True, remat=False):
    layout = plan_layout([rows], groups=groups, share_prefix=share_prefix, pack=pack)
    batch = pack_batch(rows, layout, pack=pack)
    return jax.value_and_grad(batch_loss)(adapter, tiny.params, batch, tiny.config, OPTIONS, layout.chunk, remat=remat)


def assert_equal(a, b, tolerance=1e-5):
    np.testing.assert_allclose(a[0], b[0], rtol=tolerance)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a[1]), jax.tree.leaves(b[1]), strict=True):
        assert np.linalg.norm(x - y) <= tolerance * np.linalg.norm(y), jax.tree_util.keystr(path)


@pytest.mark.parametrize("prefix", [20, 1, 0], ids=["window shorter than prefix", "only BOS shared", "nothing shared"])
def test_packed_equals_padded(tiny, adapter, rng, prefix):
    """The `tiny` cases include windows of 6 and 8 tokens, shorter than the prefix of 20."""
    rows = make_rows(rng, prefix=prefix)
    assert shared_prefix_length(rows) == prefix
    padded = loss_and_grads(tiny, adapter, rows, share_prefix=False, pack=False)
    assert_equal(loss_and_grads(tiny, adapter, rows), padded)
    assert_equal(loss_and_grads(tiny, adapter, rows, share_prefix=False), padded)
    assert_equal(loss_and_grads(tiny, adapter, rows, pack=False), padded)


@pytest.mark.parametrize("groups", [2, 4])
def test_groups_do_not_change_the_result(tiny_one, rng, groups):
    rows = make_rows(rng)
    adapter = init_adapter(
        tiny_one.config, LORA, jax.random.key(0), embedding=tiny_one.params["embed_tokens"], token_ids=TOKEN_IDS
    )
    assert_equal(loss_and_grads(tiny_one, adapter, rows, groups=groups), loss_and_grads(tiny_one, adapter, rows))


def test_remat_does_not_change_the_result(tiny_one, rng):
    rows = make_rows(rng)
    adapter = init_adapter(
        tiny_one.config, LORA, jax.random.key(0), embedding=tiny_one.params["embed_tokens"], token_ids=TOKEN_IDS
    )
    assert_equal(loss_and_grads(tiny_one, adapter, rows, remat=True), loss_and_grads(tiny_one, adapter, rows))


def test_every_token_is_packed_once(rng):
    rows = make_rows(rng)
    layout = plan_layout([rows])
    batch = pack_batch(rows, layout)
    packed = sorted(batch.tokens[batch.segments > 0].tolist())
    assert packed == sorted(token for row in rows for token in row.ids[layout.prefix :])
    assert int(batch.weights.sum()) == sum(sum(row.loss) for row in rows)
    for slot, target, weight in zip(batch.slots[0], batch.targets[0], batch.weights[0], strict=True):
        if weight:
            r, t = divmod(int(slot), layout.row_length)
            assert batch.tokens[0, r, t + 1] == target
            assert batch.segments[0, r, t] == batch.segments[0, r, t + 1]


def test_one_layout_serves_the_whole_run(rng):
    rows = make_rows(rng, n=30)
    batches = list(batch_order(rows, 8, 12, seed=0))
    layout = plan_layout(batches)
    shapes = {tuple(a.shape for a in pack_batch(b, layout)) for b in batches}
    assert len(shapes) == 1


def test_batches_are_balanced_and_cover_every_row_each_epoch(rng):
    rows = make_rows(rng, n=20)
    batches = list(batch_order(rows, 5, 8, seed=3))
    for epoch in (batches[:4], batches[4:]):
        assert sorted(r.id for b in epoch for r in b) == sorted(r.id for r in rows)
    for batch in batches:
        assert 1 <= sum(r.stratum == "a" for r in batch) <= 4
    again = list(batch_order(list(reversed(rows)), 5, 8, seed=3))
    assert [len(b) for b in again] == [len(b) for b in batches]
    assert batches == list(batch_order(rows, 5, 8, seed=3))
    assert batches != list(batch_order(rows, 5, 8, seed=4))
