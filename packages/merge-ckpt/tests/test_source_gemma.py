"""Checkpoints of google-deepmind/gemma: trees recorded from gemma 4.0.1 (bench/foreign/make_gemma.py), filled anew."""

import re

import numpy as np
import pytest

from portlab_merge.location import open_location
from portlab_merge.orbax_store import open_item, read_arrays
from portlab_merge.sources import Given, Tree
from portlab_merge.sources.gemma import GemmaSource
from portlab_merge.steps import pick_step
from portlab_spec.errors import UserError

SOURCE, RANK = GemmaSource(), 4
# What the package adds to the result of a module: x, A, B -> y; the linear layers that y is, over its axis C.
FORWARD = {
    "attn/q_einsum/_LoRAEinsum_0": ("TD,Dr,rNH->TNH", ("self_attn.q_proj",)),
    "attn/kv_einsum/_LoRAEinsum_0": ("TD,Dr,rCKH->CTKH", ("self_attn.k_proj", "self_attn.v_proj")),
    "attn/qkv_einsum/_LoRAEinsum_0": (
        "TD,Dr,rCNH->CTNH",
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ),
    "attn/attn_vec_einsum/_LoRAEinsum_0": ("TNH,NHr,rD->TD", ("self_attn.o_proj",)),
    "mlp/_LoRAEinsum_gating_einsum": ("TF,Fr,rCH->CTH", ("mlp.gate_proj", "mlp.up_proj")),
    "mlp/_LoRAEinsum_linear": ("TH,Hr,rF->TF", ("mlp.down_proj",)),
}
Q = ("layer_0", "attn", "q_einsum", "_LoRAEinsum_0", "lora")


def read(leaves, *, given=None, faults=None):
    return SOURCE.read(Tree(leaves, faults or {}, {}), given or Given())


def factors(module=Q, layers=()):
    random = np.random.default_rng(1)
    a, b = (random.normal(size=(*layers, *shape)).astype(np.float32) for shape in ((8, RANK), (RANK, 2, 3)))
    return {(*module, "a"): a, (*module, "b"): b}


def added_by_gemma(leaves, x_of):
    """What each linear layer's result gains in float64, by the package's einsum: {module: (x, y)}."""
    flat = {"/".join(path): array.astype(np.float64) for path, array in leaves.items() if path[0] != "opt_state"}
    added = {}
    for name in (name for name in flat if name.endswith("/lora/a")):
        stem = re.fullmatch(r"(?:params/|transformer/)?(.*)/lora/a", name)[1]
        a, b = flat[name], flat[name[:-1] + "b"]
        if stack := re.fullmatch(r"stacked_layers/attention_type_(\d)/(.*)", stem):  # a pattern of six layers
            rows = [(int(stack[1]) + 6 * i, stack[2], a[i], b[i]) for i in range(len(a))]
        else:
            layer, module = re.fullmatch(r"layer_(\d+)/(.*)", stem).groups()
            rows = [(int(layer), module, a, b)]
        for layer, module, a_row, b_row in rows:
            einsum, modules = FORWARD[module]
            x = x_of(a_row.shape[:-1])
            y = np.einsum(einsum, x, a_row, b_row)
            for hf, part in zip(modules, y if len(modules) > 1 else [y], strict=True):
                added[f"model.layers.{layer}.{hf}"] = x.reshape(len(x), -1), part.reshape(len(x), -1)
    return added


@pytest.mark.parametrize("name", ["gemma_lora", "gemma_qkv", "gemma_stacked", "gemma_trainer"])
def test_every_linear_layer_gains_what_gemma_adds(name, recorded, save_alone, tmp_path):
    leaves = recorded(name)
    save_alone(tmp_path / "adapter", leaves)
    item = open_item(pick_step(open_location(str(tmp_path / "adapter"))).item)
    assert SOURCE.recognises(tuple(item.stored), {})
    arrays, faults = read_arrays(item, SOURCE.wants)
    adapter = read(arrays, faults=faults)
    random = np.random.default_rng(3)
    added = added_by_gemma(leaves, lambda inputs: random.normal(size=(5, *inputs)))
    assert adapter.problems == ()
    assert sorted(update.module for update in adapter.updates) == sorted(added)
    for update in adapter.updates:
        x, y = added[update.module]
        weight = update.scaling * (update.a.astype(np.float64) @ update.b).T
        np.testing.assert_allclose(x @ weight.T, y, rtol=1e-9, atol=1e-9, err_msg=update.module)


def test_seven_layers_come_out_of_a_stack_of_patterns_of_six(recorded):
    leaves = {path: array for path, array in recorded("gemma_stacked").items() if SOURCE.wants(path)}
    modules = [update.module for update in read(leaves).updates]
    assert [m for m in modules if "o_proj" in m] == [f"model.layers.{i}.self_attn.o_proj" for i in range(7)]


def test_the_state_of_the_optimiser_is_not_read(recorded):
    paths = {path for path in recorded("gemma_trainer") if SOURCE.wants(path)}
    assert {path[0] for path in paths} == {"params"}
    assert len(paths) == 7 * 5 * 2


def test_the_product_counts_as_it_is():
    adapter = read(factors())
    assert [update.scaling for update in adapter.updates] == [1.0]
    assert (adapter.lora.rank, adapter.lora.alpha) == (RANK, RANK)


@pytest.mark.parametrize("given", [Given(alpha=8.0), Given(use_rslora=True)])
def test_alpha_is_refused(given):
    with pytest.raises(UserError, match="has no alpha"):
        read(factors(), given=given)


def test_checkpoints_of_others_are_not_recognised():
    assert not SOURCE.recognises([("lora", "self_attn.q_proj", "a")], {})
    assert not SOURCE.recognises([("layers", "0", "attn", "q_einsum", "w_lora_a")], {})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda leaves: leaves.pop((*Q, "b")), "lora.a has no other factor"),
        (lambda leaves: leaves[*Q, "a"].fill(np.inf), "not finite"),
        (lambda leaves: leaves[*Q, "b"].fill(0), "lora_b of attn.q_einsum is all zero"),
        (lambda leaves: leaves.update({(*Q, "b"): np.ones((3, 2, 3))}), "expected A (D, r) and B (r, N, H)"),
        (lambda leaves: leaves.update(factors(("embedder", "mm_input_projection", "lora"))), "adapts no linear layer"),
        (lambda leaves: leaves.update(factors(("params", *Q))), "is the same as layer_0.attn.q_einsum"),
    ],
)
def test_a_leaf_that_cannot_be_used_is_named(change, problem):
    leaves = factors()
    change(leaves)
    assert any(problem in line for line in read(leaves).problems)


def test_an_encoder_that_was_never_trained_is_passed_over():
    encoder = factors(("vision_encoder", "siglip_encoder", "Dense_0", "lora"))
    encoder["vision_encoder", "siglip_encoder", "Dense_0", "lora", "b"][:] = 0
    adapter = read(factors() | encoder)
    assert adapter.problems == ()
    assert len(adapter.updates) == 1
