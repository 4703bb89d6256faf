"""Checkpoints of Tunix: trees recorded from Tunix 0.1.7 (bench/foreign/make_tunix.py) and filled anew."""

import math

import ml_dtypes
import numpy as np
import pytest

from portlab_merge.location import open_location
from portlab_merge.orbax_store import open_item, read_arrays
from portlab_merge.sources import Given, Tree
from portlab_merge.sources.tunix import TunixSource
from portlab_merge.steps import pick_step
from portlab_spec.errors import UserError

SOURCE, RANK, ALPHA = TunixSource(), 4, 6.0
# What qwix adds to the result of a module: x, A, B -> y; the linear layers that y is, over its axis C.
FORWARD = {
    "attn.q_einsum": ("TD,Dr,rNH->TNH", ("self_attn.q_proj",)),
    "attn.k_einsum": ("TD,Dr,rKH->TKH", ("self_attn.k_proj",)),
    "attn.kv_einsum": ("TD,Dr,rCKH->CTKH", ("self_attn.k_proj", "self_attn.v_proj")),
    "attn.qkv_einsum": ("TD,Dr,rCNH->CTNH", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    "attn.attn_vec_einsum": ("TNH,NHr,rD->TD", ("self_attn.o_proj",)),
    "mlp.gate_proj": ("TD,Dr,rF->TF", ("mlp.gate_proj",)),
    "mlp.up_proj": ("TD,Dr,rF->TF", ("mlp.up_proj",)),
    "mlp.down_proj": ("TF,Fr,rD->TD", ("mlp.down_proj",)),
    "per_layer_input_gate": ("TD,Dr,rP->TP", ("per_layer_input_gate",)),
    "per_layer_projection": ("TP,Pr,rD->TD", ("per_layer_projection",)),
    "embedder.per_layer_model_projection": ("TD,Dr,rLP->TLP", ("per_layer_model_projection",)),
}
Q = ("layers", "0", "attn", "q_einsum")
KV = ("layers", "0", "attn", "kv_einsum")


def read(leaves, *, alpha=ALPHA, faults=None, use_rslora=False):
    return SOURCE.read(Tree(leaves, faults or {}, {}), Given(alpha, use_rslora, where="RUN/3"))


def factors(module, a_shape=(8, RANK), b_shape=(RANK, 2, 3)):
    random = np.random.default_rng(len(module))
    a, b = (random.normal(size=shape).astype(np.float32) for shape in (a_shape, b_shape))
    return {(*module, "w_lora_a"): a, (*module, "w_lora_b"): b}


def lora_of(leaves):
    return {path[:-1]: array for path, array in leaves.items() if "_lora_" in path[-2]}


def added_by_tunix(lora, x_of):
    """What each linear layer's result gains in float64, by the einsum that qwix computes: {module: (x, y)}."""
    added = {}
    for path in (path for path in lora if path[-1].endswith("_a")):
        a, b = (lora[*path[:-1], path[-1][:-1] + side].astype(np.float64) for side in "ab")
        layer = f"layers.{path[1]}." if path[0] == "layers" else ""
        einsum, modules = FORWARD[".".join(path[2:-1] if layer else path[:-1])]
        x = x_of(a.shape[:-1])
        y = np.einsum(einsum, x, a, b) * (ALPHA / RANK)
        if modules == ("per_layer_model_projection",):  # Hugging Face divides the layer's result, Tunix the weight
            y *= math.sqrt(len(a))
        for module, part in zip(modules, y if len(modules) > 1 else [y], strict=True):
            added[f"model.{layer}{module}"] = x.reshape(len(x), -1), part.reshape(len(x), -1)
    return added


@pytest.mark.parametrize("name", ["tunix_gemma3", "tunix_gemma3_qkv", "tunix_gemma4_dense", "tunix_gemma4_e"])
def test_every_linear_layer_gains_what_tunix_adds(name, recorded, save_alone, tmp_path):
    leaves = recorded(name)
    save_alone(tmp_path / "3", leaves)
    item = open_item(pick_step(open_location(str(tmp_path))).item)
    assert SOURCE.recognises(tuple(item.stored), {})
    arrays, faults = read_arrays(item, SOURCE.wants)
    adapter = read(arrays, faults=faults)
    random = np.random.default_rng(3)
    added = added_by_tunix(lora_of(leaves), lambda inputs: random.normal(size=(5, *inputs)))
    assert adapter.problems == ()
    assert sorted(update.module for update in adapter.updates) == sorted(added)
    for update in adapter.updates:
        x, y = added[update.module]
        a, b = update.a.astype(np.float64), update.b.astype(np.float64)
        terms = update.scaling * (abs(x) @ abs(a) @ abs(b))
        # The root is multiplied into B, in f32; all else is as stored.
        rounding = 2**-23 if update.module == "model.per_layer_model_projection" else 1e-14
        assert (abs(x @ (update.scaling * (a @ b).T).T - y) <= rounding * terms).all(), update.module


def test_only_lora_leaves_are_read(recorded):
    stored = {path[:-1] for path in recorded("tunix_gemma4_e")}
    assert {path for path in stored if SOURCE.wants(path)} == set(lora_of(recorded("tunix_gemma4_e")))


def test_layers_whose_values_are_their_keys_have_no_v_proj(recorded):
    modules = {update.module for update in read(lora_of(recorded("tunix_gemma4_dense"))).updates}
    assert "model.layers.2.self_attn.k_proj" in modules
    assert "model.layers.2.self_attn.v_proj" not in modules
    assert "model.layers.1.self_attn.v_proj" in modules


def test_every_leaf_is_digested():
    leaves = factors(Q)
    assert set(read(leaves).leaf_sha256) == {"layers.0.attn.q_einsum.w_lora_a", "layers.0.attn.q_einsum.w_lora_b"}


def test_factors_stored_as_matrices_are_the_same_update():
    leaves = factors(KV, b_shape=(RANK, 2, 2, 3))
    flat = {path: array.reshape(RANK, -1) if path[-1] == "w_lora_b" else array for path, array in leaves.items()}
    for whole, matrix in zip(read(leaves).updates, read(flat).updates, strict=True):
        assert whole.module == matrix.module
        np.testing.assert_array_equal(whole.b, matrix.b)


def test_factors_in_bfloat16_are_taken_exactly():
    leaves = {path: array.astype(ml_dtypes.bfloat16) for path, array in factors(Q).items()}
    (update,) = read(leaves).updates
    assert update.a.dtype == update.b.dtype == np.float32
    np.testing.assert_array_equal(update.a, leaves[*Q, "w_lora_a"].astype(np.float32))


def test_rank_is_in_the_shapes():
    leaves = factors(Q) | factors(KV, b_shape=(RANK, 2, 1, 3)) | factors((*Q[:1], "7", *Q[2:]), (8, 2), (2, 2, 3))
    adapter = read(leaves)
    assert adapter.lora.rank == RANK
    assert adapter.lora.rank_pattern == {"layers.7.self_attn.q_proj": 2}
    assert {update.rank: update.scaling for update in adapter.updates} == {4: ALPHA / 4, 2: ALPHA / 2}


def test_alpha_has_to_be_given():
    with pytest.raises(UserError, match="alpha") as error:
        read(factors(Q), alpha=None)
    assert "--alpha" in error.value.fix


def test_rslora_is_refused():
    with pytest.raises(UserError, match="alpha / rank"):
        read(factors(Q), use_rslora=True)


def test_checkpoints_of_others_are_not_recognised():
    assert not SOURCE.recognises([("decoder", "layers", "mlp", "wi_0", "kernel_lora_a")], {})
    assert not SOURCE.recognises([("layers", "0", "attn", "q_einsum", "w")], {})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda leaves: leaves.pop((*Q, "w_lora_b")), "w_lora_a has no other factor"),
        (lambda leaves: leaves.pop((*Q, "w_lora_a")), "w_lora_b has no other factor"),
        (lambda leaves: leaves[*Q, "w_lora_a"].fill(np.nan), "not finite"),
        (lambda leaves: leaves[*Q, "w_lora_b"].fill(0), "lora_b of attn.q_einsum is all zero"),
        (lambda leaves: leaves.update(factors(Q, (8, 3))), "expected A (D, r) and B (r, N, H)"),
        (lambda leaves: leaves.update(factors(KV, b_shape=(RANK, 3, 1, 2))), "expected A (D, r) and B (r, 2, K, H)"),
        (lambda leaves: leaves.update(factors(KV, b_shape=(RANK, 7))), "expected A (D, r) and B (r, 2, K, H)"),
        (lambda leaves: leaves.update(factors(("layers", "0", "moe"))), "moe.w_lora_a adapts no linear layer"),
        (lambda leaves: leaves.update(factors(("vision_encoder", "head"))), "head.w_lora_b adapts no linear layer"),
    ],
)
def test_a_leaf_that_cannot_be_used_is_named(change, problem):
    leaves = factors(Q)
    change(leaves)
    assert any(problem in line for line in read(leaves).problems)


def test_a_leaf_that_cannot_be_read_is_named_once():
    leaves = factors(Q)
    del leaves[*Q, "w_lora_b"]
    problems = read(leaves, faults={(*Q, "w_lora_b"): "DATA_LOSS"}).problems
    assert problems == ("leaf layers.0.attn.q_einsum.w_lora_b cannot be read (DATA_LOSS)",)


def test_an_encoder_that_was_never_trained_is_passed_over():
    encoder = factors(("vision_encoder", "head"))
    encoder["vision_encoder", "head", "w_lora_b"][:] = 0
    adapter = read(factors(Q) | encoder)
    assert adapter.problems == ()
    assert len(adapter.updates) == 1
