"""The chunked loss and its hand-written gradients against the plain definition, on one device and on meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from eight_devices import run_on_eight_devices
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from portlab_jax.loss import LossOptions, head_logits, supervised_loss

V, D, G, S = 40, 8, 8, 12
IDS = (3, 7, 8, 31)  # on a mesh, rows of several parts of the vocabulary
MESHES = [(8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 1, 8)]


def plain_logits(hidden, token_rows, embedding, softcap=None):
    if token_rows is not None:
        embedding = embedding.at[jnp.array(IDS)].set(token_rows)
    logits = jnp.einsum("gsd,vd->gsv", hidden, embedding)
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def plain_loss(hidden, token_rows, embedding, targets, weights, softcap=None, z_loss=0.0):
    logits = plain_logits(hidden, token_rows, embedding, softcap)
    lse = jax.nn.logsumexp(logits, axis=-1)
    nll = lse - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return jnp.sum(weights * (nll + z_loss * lse**2))


@pytest.fixture
def case(rng):
    """Hidden states, token rows, embedding, targets and weights; each part of a mesh sees every kind of target."""
    hidden, rows, embedding = (rng.normal(size=s).astype(np.float32) for s in ((G, S, D), (len(IDS), D), (V, D)))
    targets = rng.integers(0, V, (G, S)).astype(np.int32)
    targets[:, : len(IDS)] = IDS
    weights = rng.choice([0.0, 1.0, 3.0], (G, S)).astype(np.float32)
    weights[:, : len(IDS)] = 1
    return tuple(map(jnp.asarray, (2 * hidden, rows, embedding, targets, weights)))


def options_for(token_rows, **changes):
    return LossOptions(**{"token_ids": IDS if token_rows is not None else (), "chunk": 4, **changes})


def gradients(loss, hidden, token_rows, embedding):
    """Gradients, scaled so that a cotangent other than 1 is seen to be applied."""
    arguments = {"hidden": hidden, "token_rows": token_rows, "embedding": embedding}
    return jax.jit(jax.grad(lambda a: 2.5 * loss(a["hidden"], a["token_rows"], a["embedding"])))(arguments)


def assert_close(got, expected, rtol=1e-6):
    """Equal to `rtol` of the largest entry: entries that cancel to about zero have no relative precision."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max())


def check(case, softcap=None, z_loss=0.0, chunk=4, place=lambda x, *spec: x):
    hidden, rows, embedding, targets, weights = case
    options = options_for(rows, softcap=softcap, z_loss=z_loss, chunk=chunk, train_embedding=True)
    expected = plain_loss(hidden, rows, embedding, targets, weights, softcap, z_loss)
    expected_nll = plain_loss(hidden, rows, embedding, targets, weights, softcap)
    correct = plain_logits(hidden, rows, embedding).argmax(-1) == targets
    expected_gradients = gradients(
        lambda h, r, e: plain_loss(h, r, e, targets, weights, softcap, z_loss), hidden, rows, embedding
    )
    groups = ("data", "fsdp")
    placed = (
        place(hidden, groups),
        None if rows is None else place(rows),
        place(embedding, "tp", "fsdp"),
        place(targets, groups),
        place(weights, groups),
    )
    sums = jax.jit(supervised_loss, static_argnums=5)(*placed, options)
    assert_close(sums.loss, expected)
    assert_close(sums.nll, expected_nll)
    assert sums.correct == jnp.sum(weights * correct)
    got = gradients(lambda h, r, e: supervised_loss(h, r, e, *placed[3:], options).loss, *placed[:3])
    assert_close(got, expected_gradients)


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("with_rows", [True, False])
def test_value_and_gradients(case, with_rows, softcap, z_loss):
    hidden, rows, *rest = case
    check((hidden, rows if with_rows else None, *rest), softcap, z_loss)


@pytest.mark.parametrize("chunk", [1, 3, 12])
def test_the_chunk_does_not_show_in_the_numbers(case, chunk):
    check(case, chunk=chunk)


def test_a_chunk_that_does_not_divide_is_refused(case):
    hidden, rows, embedding, targets, weights = case
    with pytest.raises(ValueError, match="12 supervised slots are not a multiple of the chunk, 5"):
        supervised_loss(hidden, rows, embedding, targets, weights, options_for(rows, chunk=5))


def test_padding_slots_have_no_effect(case):
    hidden, rows, embedding, targets, weights = case
    options = options_for(rows, softcap=4.0, z_loss=1e-2)
    padding = np.asarray(weights) == 0
    grad = jax.grad(lambda h: supervised_loss(h, rows, embedding, targets, weights, options).loss)(hidden)
    assert not np.asarray(grad)[padding].any()
    other = jnp.where(padding, 0, targets)
    a, b = (supervised_loss(hidden, rows, embedding, t, weights, options) for t in (targets, other))
    assert a == b


def test_a_frozen_embedding_has_no_gradient(case):
    hidden, rows, embedding, targets, weights = case
    grad = jax.grad(lambda e: supervised_loss(hidden, rows, e, targets, weights, options_for(rows)).loss)(embedding)
    assert not np.asarray(grad).any()


def test_only_the_loss_has_a_gradient(case):
    hidden, rows, embedding, targets, weights = case
    grad = jax.grad(lambda h: supervised_loss(h, rows, embedding, targets, weights, options_for(rows)).nll)(hidden)
    assert not np.asarray(grad).any()


@pytest.mark.parametrize("softcap", [None, 4.0])
def test_bfloat16_is_within_its_rounding(case, softcap):
    hidden, rows, embedding, targets, weights = case
    hidden, embedding = hidden.astype(jnp.bfloat16), embedding.astype(jnp.bfloat16)
    options = options_for(rows, softcap=softcap)
    exact = (hidden.astype(jnp.float32), rows, embedding.astype(jnp.float32))
    loss = supervised_loss(hidden, rows, embedding, targets, weights, options).loss
    assert_close(loss, plain_loss(*exact, targets, weights, softcap))
    got = gradients(lambda h, r, e: supervised_loss(h, r, e, targets, weights, options).loss, hidden, rows, embedding)
    expected = gradients(lambda h, r, e: plain_loss(h, r, e, targets, weights, softcap), *exact)
    assert got["hidden"].dtype == jnp.bfloat16
    assert_close(got["hidden"], expected["hidden"], rtol=2**-7)
    assert_close(got["token_rows"], expected["token_rows"])


def test_the_gradient_of_a_confident_prediction_survives_bfloat16():
    """A target of probability 0.999 still pulls: softmax - 1 is not taken of a rounded softmax."""
    embedding = jnp.eye(2, 4, dtype=jnp.bfloat16)
    hidden = jnp.array([[[6.9375, 0, 0, 0]]], jnp.bfloat16)
    one = jnp.ones((1, 1))
    target = jnp.zeros((1, 1), jnp.int32)
    got = jax.grad(lambda h: supervised_loss(h, None, embedding, target, one, LossOptions(chunk=1)).loss)(hidden)
    miss = 1 / (1 + np.exp(6.9375))
    np.testing.assert_allclose(np.asarray(got[0, 0, :2], np.float32), [-miss, miss], rtol=2**-7)


def test_the_embedding_gradient_of_float32_weights_is_not_rounded_to_the_activations(case):
    hidden, _, embedding, targets, weights = case
    hidden = hidden.astype(jnp.bfloat16)
    options = options_for(None, train_embedding=True)
    got = jax.grad(lambda e: supervised_loss(hidden, None, e, targets, weights, options).loss)(embedding)
    assert got.dtype == jnp.float32
    assert np.any(np.asarray(got) != np.asarray(got.astype(jnp.bfloat16), np.float32))


def test_head_logits_are_those_of_gemma_4(rng):
    torch.manual_seed(0)
    config = Gemma4TextConfig(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        global_head_dim=8,
        vocab_size_per_layer_input=V,
        hidden_size_per_layer_input=4,
        num_kv_shared_layers=0,
        final_logit_softcapping=5.0,
        tie_word_embeddings=True,
    )
    model = Gemma4ForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.normal_()
        ids = torch.tensor(rng.integers(0, V, (1, 6)))
        hidden = model.model(ids).last_hidden_state
        expected = model(ids).logits
    arrays = (jnp.asarray(t.numpy()) for t in (hidden, model.lm_head.weight.detach()))
    h, embedding = arrays
    assert expected.abs().max() > 4.5
    logits = head_logits(h, None, embedding, LossOptions(softcap=5.0))
    np.testing.assert_allclose(logits, expected.numpy(), rtol=1e-5, atol=1e-5)


def test_head_logits_hold_the_trained_rows(case):
    hidden, rows, embedding, *_ = case
    logits = head_logits(hidden[0, 0], rows, embedding, options_for(rows, softcap=4.0))
    expected = plain_logits(hidden[:1, :1], rows, embedding, 4.0)[0, 0]
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("train_embedding", [False, True])
def test_memory_does_not_grow_with_the_positions(train_embedding):
    """Beyond one chunk of logits there is room for no second one, and none for more positions."""
    v, d, chunk = 4096, 16, 8
    options = LossOptions(chunk=chunk, train_embedding=train_embedding)

    def temporary_bytes(s):
        shapes = [((1, s, d), jnp.float32), ((v, d), jnp.float32), ((1, s), jnp.int32), ((1, s), jnp.float32)]
        hidden, embedding, targets, weights = (jax.ShapeDtypeStruct(*shape) for shape in shapes)
        grad = jax.grad(lambda h, e, t, w: supervised_loss(h, None, e, t, w, options).loss, (0, 1))
        return jax.jit(grad).lower(hidden, embedding, targets, weights).compile().memory_analysis().temp_size_in_bytes

    small, large = temporary_bytes(8 * chunk), temporary_bytes(64 * chunk)
    positions = (64 - 8) * chunk * d * 4  # the gradient of the hidden states, before it is scaled
    assert large - small < 2.5 * positions
    logits = chunk * v * 4
    tables = 2 * v * d * 4 if train_embedding else 0
    assert small < 3 * logits + tables


# On meshes. A process has the CPU devices that it was started with: where these are fewer than eight, the tests that
# take a mesh run in a process of their own.


@pytest.fixture(params=MESHES, ids=lambda shape: "x".join(map(str, shape)))
def mesh(request):
    if jax.device_count() < 8:
        pytest.skip("run by test_on_eight_devices")
    made = jax.make_mesh(request.param, ("data", "fsdp", "tp"), axis_types=(AxisType.Explicit,) * 3)
    with jax.set_mesh(made):
        yield made


def on_mesh(x, *spec):
    return jax.device_put(x, P(*spec))


@pytest.mark.parametrize(("with_rows", "softcap"), [(True, 4.0), (False, None)])
def test_value_and_gradients_on_a_mesh(mesh, case, with_rows, softcap):
    hidden, rows, *rest = case
    check((hidden, rows if with_rows else None, *rest), softcap, z_loss=1e-2, place=on_mesh)


def test_gradients_on_a_mesh_are_sharded_as_their_arguments(mesh, case):
    hidden, rows, embedding, targets, weights = case
    groups = ("data", "fsdp")
    hidden, targets, weights = (on_mesh(x, groups) for x in (hidden, targets, weights))
    rows, embedding = on_mesh(rows, None, "fsdp"), on_mesh(embedding, "tp", "fsdp")
    options = options_for(rows, train_embedding=True)
    got = gradients(lambda h, r, e: supervised_loss(h, r, e, targets, weights, options).loss, hidden, rows, embedding)
    for name, argument in {"hidden": hidden, "token_rows": rows, "embedding": embedding}.items():
        assert jax.typeof(got[name]) == jax.typeof(argument)


def test_rows_that_every_part_of_a_mesh_sees_count_once(mesh, case):
    """One group on a larger mesh: hidden states are replicated, the embedding is not."""
    hidden, rows, embedding, targets, weights = case
    check((hidden[:1], rows, embedding, targets[:1], weights[:1]), place=on_mesh_but_groups)


def on_mesh_but_groups(x, *spec):
    return on_mesh(x, *(name if isinstance(name, str) else None for name in spec))


def test_a_vocabulary_that_a_mesh_does_not_share_out(mesh, case):
    """As when tp does not divide it: every part of tp holds all rows."""
    check(case, place=lambda x, *spec: on_mesh(x, *(None if name == "tp" else name for name in spec)))


def test_head_logits_on_a_mesh(mesh, case):
    hidden, rows, embedding, *_ = case
    placed = on_mesh(hidden, ("data", "fsdp")), on_mesh(rows), on_mesh(embedding, "tp", "fsdp")
    logits = jax.jit(head_logits, static_argnums=3)(*placed, options_for(rows, softcap=4.0))
    assert jax.typeof(logits).sharding.spec == P(("data", "fsdp"), None, "tp")
    np.testing.assert_allclose(logits, plain_logits(hidden, rows, embedding, 4.0), rtol=1e-5, atol=1e-5)


def test_logits_of_a_mesh_are_never_whole(mesh, case):
    """No part computes logits of vocabulary rows that it does not hold; the embedding is gathered once at most."""
    hidden, _, embedding, targets, weights = case
    groups = ("data", "fsdp")
    arguments = (on_mesh(hidden, groups), on_mesh(embedding, "tp", "fsdp"))
    rest = on_mesh(targets, groups), on_mesh(weights, groups)
    grad = jax.jit(jax.grad(lambda h, e: supervised_loss(h, None, e, *rest, options_for(None)).loss))
    text = grad.lower(*arguments).compile().as_text()
    rows = V // mesh.shape["tp"]
    assert f"f32[4,{rows}]" in text
    if rows < V:
        assert f",{V}]" not in text
    assert text.count(" all-gather(") == (mesh.shape["fsdp"] > 1)


def test_on_eight_devices():
    assert "skipped" not in run_on_eight_devices(__file__, "-k", "mesh")
