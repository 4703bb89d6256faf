"""Going on from an adapter: PEFT's folders and our own runs, taken whole or refused with what differs."""

import json
from copy import deepcopy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from peft import LoraConfig, get_peft_model

from portlab_jax.adapter_init import load_adapter
from portlab_jax.checkpoint import Checkpoints
from portlab_jax.lora import init_adapter
from portlab_jax.step import TrainState
from portlab_spec.assets import ModelFolder
from portlab_spec.errors import UserError
from portlab_spec.models import plan_adapter
from portlab_spec.recipe import Lora, Recipe
from portlab_spec.run.metadata import run_metadata
from portlab_spec.run.train_log import TrainLog

LORA = Lora(rank=4, alpha=12.0, targets=("q_proj", "v_proj", "mlp.up_proj"))
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
TOKEN_IDS = (3, 5)


def save_peft(tiny, lora, folder, *, token_ids=TOKEN_IDS, **more):
    """A PEFT adapter with random values on disk, and the model in memory."""
    settings = {
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.use_rslora,
        "rank_pattern": lora.rank_pattern,
        "alpha_pattern": lora.alpha_pattern,
        "target_modules": [target for target in lora.targets if target not in EXPERTS],
        "target_parameters": [target for target in lora.targets if target in EXPERTS] or None,
        "trainable_token_indices": {"embed_tokens": list(token_ids)} if token_ids else None,
    }
    model = get_peft_model(deepcopy(tiny.torch), LoraConfig(**settings | more))
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def load(tiny, lora, path, token_ids=TOKEN_IDS):
    leaves = plan_adapter(tiny.config, lora)
    with jax.set_mesh(tiny.mesh.mesh):
        fresh = init_adapter(leaves, jax.random.key(0), embedding=tiny.params["embed_tokens"], token_ids=token_ids)
        return leaves, load_adapter(path, leaves, token_ids, fresh)


def updates(leaves, adapter):
    """What is added to each weight (out, in), by module."""
    found = {}
    for leaf in leaves:
        pair = adapter["lora"][leaf.key]
        product = leaf.scaling * np.asarray(pair["a"]) @ np.asarray(pair["b"])
        found |= dict(zip(leaf.modules("model."), product.swapaxes(-1, -2), strict=True))
    return found


def peft_updates(model):
    """The same, as PEFT computes it."""
    found = {}
    for name, layer in model.base_model.model.named_modules():
        while hasattr(layer, "lora_A") and not name.endswith("base_layer"):
            parameter = getattr(layer, "parameter_name", None)
            delta = layer.get_delta_weight("default").detach().numpy()
            found[f"{name}.{parameter}" if parameter else name] = delta
            layer = layer.base_layer
    return found


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("gemma3, two kv heads", {}),
        ("gemma3, two kv heads", {"use_rslora": True, "rank_pattern": {r"layers\.1\..*": 2}}),
        ("gemma3, two kv heads", {"alpha_pattern": {"up_proj": 3.0}}),
        ("gemma4, experts", {"targets": (*LORA.targets, *EXPERTS)}),
        ("gemma4, experts", {"targets": EXPERTS[1:]}),
        ("gemma4, shared keys and values", {"targets": ("k_proj", "per_layer_input_gate")}),
    ],
    ids=["plain", "rslora and ranks", "alphas", "with experts", "one parameter of the experts", "shared keys"],
)
def test_a_peft_adapter_means_the_same_here(tiny_model, tmp_path, case, changes):
    tiny, lora = tiny_model(case), LORA.model_copy(update=changes)
    peft = save_peft(tiny, lora, tmp_path)
    leaves, adapter = load(tiny, lora, tmp_path)
    found, expected = updates(leaves, adapter), peft_updates(peft)
    assert found.keys() == expected.keys()
    for module, update in expected.items():
        np.testing.assert_allclose(found[module], update, rtol=1e-5, atol=1e-6, err_msg=module)
    rows = next(p for name, p in peft.named_parameters() if "trainable_tokens_delta" in name)
    np.testing.assert_array_equal(adapter["token_rows"], rows.detach().numpy())


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_adapters_of_multimodal_models_fit(tiny_one, tmp_path, prefix):
    from safetensors.numpy import load_file, save_file

    peft = save_peft(tiny_one, LORA, tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    moved = {n.replace("base_model.model.model.", f"base_model.model.{prefix}"): t for n, t in load_file(path).items()}
    save_file(moved, path)
    leaves, adapter = load(tiny_one, LORA, tmp_path)
    assert updates(leaves, adapter).keys() == peft_updates(peft).keys()


def test_rows_that_the_adapter_did_not_train_start_from_the_base(tiny_one, tmp_path):
    save_peft(tiny_one, LORA, tmp_path, token_ids=(5,))
    _, adapter = load(tiny_one, LORA, tmp_path, token_ids=(3, 5))
    base = tiny_one.params["embed_tokens"]
    np.testing.assert_array_equal(adapter["token_rows"][0], base[3])
    assert np.abs(adapter["token_rows"][1] - base[5]).max() > 0.01


# --- what does not fit


@pytest.mark.parametrize(
    ("ours", "message"),
    [
        ({"rank": 8}, r"has rank 4, the recipe says 8"),
        ({"alpha": 16.0}, r"is scaled by 3, the recipe says 4 \(alpha, use_rslora\)"),
        ({"use_rslora": True}, r"is scaled by 3, the recipe says 6"),
        (
            {"targets": ("q_proj", "v_proj", "up_proj", "o_proj")},
            r"adapts layers.0.self_attn.o_proj, .* and 1 more, which it lacks \(12 of 16 modules are in both\)",
        ),
        (
            {"targets": ("q_proj",)},
            r"it holds layers.0.mlp.up_proj, .* and 5 more, which this run does not train \(4 of 4 modules",
        ),
    ],
    ids=["rank", "alpha", "rslora", "lacks modules", "has more modules"],
)
def test_another_adapter_is_refused_by_name(tiny_one, tmp_path, ours, message):
    save_peft(tiny_one, LORA, tmp_path)
    with pytest.raises(UserError, match=message):
        load(tiny_one, LORA.model_copy(update=ours), tmp_path)


def test_rows_that_would_be_lost_are_refused(tiny_one, tmp_path):
    save_peft(tiny_one, LORA, tmp_path)
    with pytest.raises(UserError, match="rows of the tokens 5, which this run does not train"):
        load(tiny_one, LORA, tmp_path, token_ids=(3,))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("use_dora", True, "uses use_dora"),
        ("bias", "lora_only", "uses bias"),
        ("modules_to_save", ["norm"], "uses modules_to_save"),
        ("init_lora_weights", "pissa_niter_4", "uses init_lora_weights=pissa_niter_4"),
        ("peft_type", "IA3", "is an adapter of type 'IA3'"),
    ],
)
def test_what_is_not_plain_lora_is_refused(tiny_one, tmp_path, key, value, message):
    save_peft(tiny_one, LORA, tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(UserError, match=message):
        load(tiny_one, LORA, tmp_path)


def test_adapters_of_other_towers_are_not_dropped_silently(tiny_one, tmp_path):
    from safetensors.numpy import load_file, save_file

    save_peft(tiny_one, LORA, tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    vision = "base_model.model.model.vision_tower.layers.0.self_attn.q_proj.lora_A.weight"
    save_file(load_file(path) | {vision: np.zeros((4, 8), np.float32)}, path)
    with pytest.raises(UserError, match=r"it holds base_model.model.model.vision_tower.*, which this run does not"):
        load(tiny_one, LORA, tmp_path)


def test_a_folder_without_an_adapter_is_refused(tiny_one, tmp_path):
    with pytest.raises(UserError, match=r"neither adapter_config.json nor a complete checkpoint"):
        load(tiny_one, LORA, tmp_path)


# --- our own runs


@pytest.fixture
def run_folder(tiny_one, tmp_path):
    """A run's checkpoints of steps 1 and 2; returns the folder and the adapter of step 2."""
    leaves = plan_adapter(tiny_one.config, LORA)
    model = ModelFolder(tiny_one.folder, "tiny", None)
    named = [(leaf.key, leaf.modules("model.")) for leaf in leaves]
    recipe = Recipe(lora=LORA)
    metadata = run_metadata(
        recipe, model, "gemma3", named, versions={}, token_rows=("model.embed_tokens.weight", TOKEN_IDS)
    )
    key = jax.random.key_data(jax.random.key(0))
    with jax.set_mesh(tiny_one.mesh.mesh), Checkpoints(tmp_path / "checkpoints") as checkpoints:
        embedding = tiny_one.params["embed_tokens"]
        fresh = init_adapter(leaves, jax.random.key(4), embedding=embedding, token_ids=TOKEN_IDS)
        for step in (1, 2):
            adapter = jax.tree.map(lambda leaf, step=step: leaf + step, fresh)
            state = TrainState(adapter, optax.EmptyState(), jnp.int32(step), key)
            checkpoints.save(state, TrainLog([0.0] * step, 1.0), metadata)
    return tmp_path, jax.device_get(adapter)


def test_a_run_that_was_not_finished_gives_its_newest_checkpoint(tiny_one, run_folder):
    folder, expected = run_folder
    for path in (folder, folder / "checkpoints" / "2"):
        _, adapter = load(tiny_one, LORA, path)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(adapter), expected)


def test_a_finished_run_gives_its_exported_adapter(tiny_one, run_folder):
    folder, _ = run_folder
    peft = save_peft(tiny_one, LORA, folder / "adapter")
    leaves, adapter = load(tiny_one, LORA, folder)
    expected = peft_updates(peft)["model.layers.0.self_attn.q_proj"]
    np.testing.assert_allclose(
        updates(leaves, adapter)["model.layers.0.self_attn.q_proj"], expected, rtol=1e-5, atol=1e-6
    )


def test_a_run_of_another_rank_is_refused(tiny_one, run_folder):
    folder, _ = run_folder
    with pytest.raises(UserError, match="has rank 4, the recipe says 2"):
        load(tiny_one, LORA.model_copy(update={"rank": 2}), folder)


def test_a_damaged_checkpoint_is_refused(tiny_one, run_folder):
    folder, _ = run_folder
    path = folder / "checkpoints" / "2" / "_CHECKPOINT_METADATA"
    record = json.loads(path.read_text())
    name = next(iter(record["custom_metadata"]["leaf_sha256"]))
    record["custom_metadata"]["leaf_sha256"][name] = "0" * 64
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"is damaged \(sha256\)"):
        load(tiny_one, LORA, folder)
