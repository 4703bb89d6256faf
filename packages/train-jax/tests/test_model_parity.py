"""Gemma 3 and Gemma 4 against transformers and PEFT: logits, loss and gradients in float32, on tiny random models."""

from copy import deepcopy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import ParamWrapper

from portlab_jax.lora import AdapterOptions, init_adapter
from portlab_jax.loss import head_logits
from portlab_jax.step import StepOptions, gradients, supervised_hidden
from portlab_spec.models import param_table, plan_adapter
from portlab_spec.recipe import Lora

pytestmark = pytest.mark.usefixtures("quick_compilation")

TOKEN_IDS = (3, 5, 11)
MIXED = "gemma4, keys are values"  # 2 sliding and 1 full layer, twice; full layers without v_proj
EXPERTS = "gemma4, experts"


def lora_of(tiny, **changes):
    """A recipe's LoRA section that adapts whatever the model has."""
    targets = [*Lora().targets]
    if tiny.config.per_layer:
        targets += ["per_layer_input_gate", "per_layer_projection"]
    if tiny.config.experts:
        targets += ["experts.gate_up_proj", "experts.down_proj"]
    return Lora(**{"rank": 4, "alpha": 12.0, "targets": targets} | changes)


# --- the same in PEFT


def peft_twin(tiny, lora, token_ids=TOKEN_IDS, *, noise=0.1):
    """PEFT on the transformers model, every adapter moved away from where it starts."""
    torch.manual_seed(1)
    experts = [target for target in lora.targets if target.startswith("experts.")]
    modules = [target for target in lora.targets if target not in experts]
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        use_rslora=lora.use_rslora,
        rank_pattern=lora.rank_pattern,
        alpha_pattern=lora.alpha_pattern,
        target_modules=modules if all(name.replace(".", "").isidentifier() for name in modules) else modules[0],
        target_parameters=experts or None,
        trainable_token_indices={"embed_tokens": list(token_ids)} if token_ids else None,
    )
    model = get_peft_model(deepcopy(tiny.torch), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(noise * torch.randn_like(parameter))
    return model


def lora_layer(twin, module):
    """The wrapper of a module, or of a parameter of the experts: those of one module lie around each other."""
    path, _, name = f"base_model.model.{module}".rpartition(".")
    if not path.endswith(".experts"):
        return twin.get_submodule(f"{path}.{name}")
    layer = twin.get_submodule(path)
    while layer.parameter_name != name:
        layer = layer.base_layer
    return layer


def in_our_layout(twin, leaves, token_ids=TOKEN_IDS, read=lambda parameter: parameter):
    """What PEFT's parameters hold (or their gradients), as our adapter."""

    def pair(leaf, module):
        layer = lora_layer(twin, module)
        a, b = (read(side["default"].weight).detach().numpy() for side in (layer.lora_A, layer.lora_B))
        if isinstance(layer, ParamWrapper):  # (E r, in) and (out, r E)
            experts = layer.num_experts
            a, b = a.reshape(experts, leaf.rank, -1), b.reshape(-1, leaf.rank, experts).transpose(2, 0, 1)
        return a.swapaxes(-1, -2), b.swapaxes(-1, -2)

    lora = {}
    for leaf in leaves:
        a, b = zip(*(pair(leaf, module) for module in leaf.modules("model.")), strict=True)
        lora[leaf.key] = {"a": jnp.array(np.stack(a)), "b": jnp.array(np.stack(b))}
    adapter = {"lora": lora}
    if token_ids:
        rows = next(p for name, p in twin.named_parameters() if "trainable_tokens_delta" in name and "embed" in name)
        adapter["token_rows"] = jnp.array(read(rows).detach().numpy())
    return adapter


def torch_loss(model, rows):
    """Mean loss over the supervised tokens, and the logits, of rows padded on the right."""
    length = max(len(row.ids) for row in rows)
    ids, labels = (torch.full((len(rows), length), fill) for fill in (0, -100))
    for i, row in enumerate(rows):
        ids[i, : len(row.ids)] = torch.tensor(row.ids)
        labels[i, : len(row.ids)] = torch.where(torch.tensor(row.loss), torch.tensor(row.ids), -100)
    mask = torch.arange(length)[None, :] < torch.tensor([len(row.ids) for row in rows])[:, None]
    out = model(ids, attention_mask=mask.long(), labels=labels)
    return out.loss, out.logits


# --- helpers on our side


def all_logits(tiny, trained, options, batch):
    """Logits (rows, T, V) of every position of packed rows that hold one example each."""
    _, _, rows, length = batch.rows.tokens.shape
    micro = jax.tree.map(lambda x: x[0], batch)
    everywhere = micro._replace(slots=np.arange(rows * length, dtype=np.int32)[None])

    @jax.jit
    def run(trained, params, batch):
        weights = options.weights(trained, params)
        hidden = supervised_hidden(weights, batch, options)
        return head_logits(hidden, weights.token_rows, weights.embedding, options.loss(1))

    with jax.set_mesh(tiny.mesh.mesh):
        return np.asarray(run(trained, tiny.params, everywhere)).reshape(rows, length, -1)


def our_gradients(tiny, trained, frozen, options, batch, chunk):
    step = jax.jit(gradients, static_argnames=("options", "chunk"))
    with jax.set_mesh(tiny.mesh.mesh):
        sums, total, grads = step(trained, frozen, batch, options=options, chunk=chunk)
        return float(sums.loss / total), jax.device_get(grads)


def assert_close(got, expected, tolerance=1e-4):
    """Every leaf, relative to its norm."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for (path, x), y in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        error = np.linalg.norm(np.asarray(x) - np.asarray(y)) / np.linalg.norm(y)
        assert error <= tolerance, f"{jax.tree_util.keystr(path)}: {error:.1e}"


# --- the model


def test_logits_of_whole_rows(tiny, make_rows, one_row_each):
    rows = make_rows(prefix=0, trained=TOKEN_IDS)
    _, expected = torch_loss(tiny.torch, rows)
    batch, _ = one_row_each(rows)
    got = all_logits(tiny, {"lora": {}}, StepOptions(tiny.config, AdapterOptions()), batch)
    for i, row in enumerate(rows):
        n = len(row.ids)
        np.testing.assert_allclose(got[i, :n], expected[i, :n].detach(), rtol=1e-4, atol=1e-4)


def check_against_peft(tiny, lora, rows, batch, chunk, token_ids=TOKEN_IDS):
    """Loss and gradient of every leaf."""
    leaves = plan_adapter(tiny.config, lora)
    options = StepOptions(tiny.config, AdapterOptions(leaves, token_ids=token_ids))
    twin = peft_twin(tiny, lora, token_ids)
    adapter = in_our_layout(twin, leaves, token_ids)
    expected, _ = torch_loss(twin, rows)
    expected.backward()
    loss, grads = our_gradients(tiny, adapter, tiny.params, options, batch, chunk)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert_close(grads, in_our_layout(twin, leaves, token_ids, read=lambda parameter: parameter.grad))


def test_logits_with_an_adapter(tiny, make_rows, one_row_each):
    lora = lora_of(tiny)
    leaves = plan_adapter(tiny.config, lora)
    twin = peft_twin(tiny, lora)
    rows = make_rows(prefix=0, trained=TOKEN_IDS)
    _, expected = torch_loss(twin, rows)
    batch, _ = one_row_each(rows)
    options = StepOptions(tiny.config, AdapterOptions(leaves, token_ids=TOKEN_IDS))
    got = all_logits(tiny, in_our_layout(twin, leaves), options, batch)
    for i, row in enumerate(rows):
        n = len(row.ids)
        np.testing.assert_allclose(got[i, :n], expected[i, :n].detach(), rtol=1e-4, atol=1e-4)


def test_loss_and_adapter_gradients_equal_peft(tiny, make_rows, packed):
    """Trained token rows occur in the shared part, in questions and as targets."""
    rows = make_rows(prefix=9, trained=TOKEN_IDS)
    check_against_peft(tiny, lora_of(tiny), rows, *packed(rows, tiny.config))


@pytest.mark.parametrize(
    "changes",
    [
        {"use_rslora": True, "rank_pattern": {r"layers\.[01]\..*q_proj": 2, "down_proj": 6}},
        {"alpha_pattern": {r"layers\.2\.mlp\.up_proj": 3.0}, "rank_pattern": {"layers.4.self_attn.k_proj": 8}},
        {"targets": (r".*layers\.(1|2|5)\..*(q|v|down)_proj",)},
    ],
    ids=["rslora and rank pattern", "alpha and rank patterns", "some layers by regex"],
)
def test_patterns_mean_what_they_mean_in_peft(tiny_model, make_rows, packed, changes):
    tiny = tiny_model(MIXED)
    rows = make_rows(prefix=9)
    check_against_peft(tiny, lora_of(tiny, **changes), rows, *packed(rows, tiny.config), token_ids=())


@pytest.mark.parametrize("case", ["gemma3, two kv heads", MIXED, "gemma4, shared keys and values", EXPERTS])
def test_gradients_of_all_weights_equal_autograd(tiny_model, case, make_rows, packed):
    """Full fine-tuning: norms, router and the embedding, which is the head too. (Layer scalars are no parameters.)"""
    tiny = tiny_model(case)
    rows = make_rows(prefix=9)
    model = deepcopy(tiny.torch)
    expected, _ = torch_loss(model, rows)
    expected.backward()
    gradient = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}

    trained, frozen, expected_grads = {"layers": {}}, {"layers": {}}, {"layers": {}}
    for param in param_table(tiny.config):
        here = tiny.params["layers"][param.stack] if param.stack else tiny.params
        into = frozen if param.name == "layer_scalar" else trained
        for tree in (trained, frozen, expected_grads) if param.stack else ():
            tree["layers"].setdefault(param.stack, {})
        place = into["layers"][param.stack] if param.stack else into
        place[param.name] = here[param.name]
        if param.name != "layer_scalar":
            grads = [gradient[name] for name in param.tensor_names("model.")]
            place = expected_grads["layers"][param.stack] if param.stack else expected_grads
            place[param.name] = np.stack(grads) if param.stack else grads[0]

    options = StepOptions(tiny.config, AdapterOptions(), full=True)
    batch, chunk = packed(rows, tiny.config)
    loss, grads = our_gradients(tiny, trained, frozen, options, batch, chunk)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert_close(grads, expected_grads)


# --- the adapter


@pytest.mark.parametrize("case", [MIXED, EXPERTS])
def test_an_adapter_starts_as_in_peft(tiny_model, case):
    tiny = tiny_model(case)
    lora = lora_of(tiny, rank=16)
    leaves = plan_adapter(tiny.config, lora)
    ours = init_adapter(leaves, jax.random.key(0))["lora"]
    theirs = in_our_layout(peft_twin(tiny, lora, (), noise=0.0), leaves, ())["lora"]
    for leaf in leaves:
        a, peft_a = (np.asarray(side[leaf.key]["a"]) for side in (ours, theirs))
        bound = 1 / np.sqrt(leaf.into.size)
        assert a.shape == peft_a.shape
        assert np.abs(a).max() <= bound
        assert np.abs(peft_a).max() <= bound
        assert a.std() == pytest.approx(bound / np.sqrt(3), rel=0.05)
        assert a.std() == pytest.approx(peft_a.std(), rel=0.05)
        assert not ours[leaf.key]["b"].any()


def test_layers_and_experts_start_with_values_of_their_own(tiny_model):
    tiny = tiny_model(EXPERTS)
    adapter = init_adapter(plan_adapter(tiny.config, lora_of(tiny)), jax.random.key(0))
    for key, pair in adapter["lora"].items():
        matrices = np.asarray(pair["a"]).reshape(-1, *pair["a"].shape[-2:])
        assert len(np.unique(matrices[:, 0, 0])) == len(matrices), key
