"""Every family, on disk as it is published: merged, it loads in transformers and computes base + adapter."""

import hashlib
import json

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
)

from portlab_merge.overlay import MergeOptions, merge
from portlab_merge.peft_adapter import export_adapter
from portlab_merge.verify import verify_adapter, verify_merged
from portlab_spec.models import GemmaConfig, find_prefix, plan_adapter
from portlab_spec.recipe import Lora

VOCAB, WIDTH, HEAD, RANK = 96, 32, 16, 4
TOKEN_IDS = (46, 90)
SLIDING, FULL = "sliding_attention", "full_attention"
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD,
    "sliding_window": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
IMAGES = {"boi_token_id": 91, "eoi_token_id": 92, "image_token_id": 93}


def gemma3_text():
    return Gemma3TextConfig(**TEXT, num_hidden_layers=4, layer_types=[SLIDING, SLIDING, SLIDING, FULL])


def gemma3_multimodal():
    vision = VISION | {"image_size": 28, "patch_size": 14}
    config = Gemma3Config(
        text_config=gemma3_text().to_dict(), vision_config=vision, mm_tokens_per_image=4, image_token_index=93, **IMAGES
    )
    return Gemma3ForConditionalGeneration(config)


def gemma4_text(layer_types=(SLIDING, SLIDING, FULL) * 2, **more):
    settings = {"global_head_dim": 2 * HEAD, "hidden_size_per_layer_input": 0, "layer_types": list(layer_types)}
    return Gemma4TextConfig(**TEXT, num_hidden_layers=len(layer_types), **settings | more)


def gemma4_per_layer():
    """As E2B: per-layer inputs, the last layers share keys and values and have a double-wide MLP."""
    return gemma4_text(
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB,
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
    )


def gemma4_multimodal():
    vision = VISION | {"num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 16}
    config = Gemma4Config(
        text_config=gemma4_per_layer().to_dict(), vision_config=vision, audio_config=None, audio_token_id=94, **IMAGES
    )
    return Gemma4ForConditionalGeneration(config)


KEYS_ARE_VALUES = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
EXPERTS = {"enable_moe_block": True, "num_experts": 3, "top_k_experts": 2, "moe_intermediate_size": 24}
# Model, prefix of its text tensors on disk, options of save_pretrained.
FAMILIES = {
    "gemma3": (lambda: Gemma3ForCausalLM(gemma3_text()), "model.", {}),
    "gemma3, multimodal as published": (gemma3_multimodal, "language_model.model.", {"save_original_format": True}),
    "gemma3, multimodal": (gemma3_multimodal, "model.language_model.", {"save_original_format": False}),
    "gemma4, keys are values": (lambda: Gemma4ForCausalLM(gemma4_text(**KEYS_ARE_VALUES)), "model.", {}),
    "gemma4, shared keys and values": (lambda: Gemma4ForCausalLM(gemma4_per_layer()), "model.", {}),
    "gemma4, experts": (lambda: Gemma4ForCausalLM(gemma4_text(**KEYS_ARE_VALUES, **EXPERTS)), "model.", {}),
    "gemma4, multimodal": (gemma4_multimodal, "model.language_model.", {}),
}


@pytest.fixture(scope="session", params=FAMILIES)
def family_base(request, tmp_path_factory):
    """A base folder whose tensors are those of the published files: shared keys and values are there as well."""
    make, prefix, options = FAMILIES[request.param]
    torch.manual_seed(0)
    model = make().float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    folder = tmp_path_factory.mktemp("family") / "base"
    model.save_pretrained(folder, **options)
    text = model.config.get_text_config()
    tensors = load_file(folder / "model.safetensors")
    for layer in range(text.num_hidden_layers - getattr(text, "num_kv_shared_layers", 0), text.num_hidden_layers):
        # transformers has no such tensors and does not save them; Google's files and other servers do
        for name in ("k_proj", "v_proj", "k_norm"):
            head = 2 * HEAD if text.layer_types[layer] == FULL else HEAD
            shape = (head,) if name == "k_norm" else (2 * head, WIDTH)
            tensors[f"{prefix}layers.{layer}.self_attn.{name}.weight"] = torch.randn(shape)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert find_prefix(tensors, str(folder)) == prefix
    return folder


@pytest.fixture
def family_leaves(family_base):
    """What is adapted: every linear layer and experts' matrix of the text model."""
    config = GemmaConfig.load(family_base)
    targets = [*Lora().targets]
    if config.per_layer:
        targets += ["per_layer_input_gate", "per_layer_projection"]
    if config.experts:
        targets += ["experts.gate_up_proj", "experts.down_proj"]
    return plan_adapter(config, Lora(rank=RANK, targets=targets))


@pytest.fixture
def family_run(make_run, family_base, family_leaves):
    """A run that adapts them all, and two rows of the embedding."""
    random = np.random.default_rng(1)
    prefix = find_prefix(load_file(family_base / "model.safetensors"), str(family_base))

    def edit(tree, metadata):
        tree["lora"] = {}
        for leaf in family_leaves:
            lead, into, out = (len(leaf.index), *(d.size for d in leaf.experts)), leaf.into.size, leaf.out.size
            a, b = random.normal(0, 0.3, (*lead, into, RANK)), random.normal(0, 0.3, (*lead, RANK, out))
            tree["lora"][leaf.key] = {"a": a.astype(np.float32), "b": b.astype(np.float32)}
        tree["token_rows"] = random.normal(0, 0.3, (len(TOKEN_IDS), WIDTH)).astype(np.float32)
        leaves = {f"lora/{key}/{side}": pair[side] for key, pair in tree["lora"].items() for side in "ab"}
        leaves["token_rows"] = tree["token_rows"]
        metadata["leaf_sha256"] = {name: hashlib.sha256(leaf).hexdigest() for name, leaf in leaves.items()}
        metadata["lora"] |= {
            "targets": sorted({leaf.param.name for leaf in family_leaves}),
            "leaves": [{"target": leaf.key, "modules": leaf.modules(prefix)} for leaf in family_leaves],
            "token_rows": {"parameter": f"{prefix}embed_tokens.weight", "ids": list(TOKEN_IDS)},
        }

    return make_run(family_base, edit=edit, token_rows=False, prefix=prefix)


def load(folder):
    """The model through its Auto class, and the keys that did not find their place."""
    wrapped = "vision_config" in json.loads((folder / "config.json").read_text())
    auto = AutoModelForImageTextToText if wrapped else AutoModelForCausalLM
    model, info = auto.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    return model.eval(), {kind: sorted(keys) for kind, keys in info.items() if keys}


@torch.no_grad()
def logits(model):
    tokens = torch.arange(40).reshape(2, 20) * 7 % 90
    tokens[:, 3], tokens[:, 9] = TOKEN_IDS
    return model(input_ids=tokens).logits.numpy()


@torch.no_grad()
def with_adapter(model, run, leaves):
    """The model with the adapter beside its layers, as it is trained; in torch, from the formula."""
    prefix = "model.language_model." if hasattr(model.model, "language_model") else "model."
    scaling = run.metadata["lora"]["alpha"] / RANK
    for leaf in leaves:
        stacked = (torch.from_numpy(run.tree["lora"][leaf.key][side]) for side in "ab")
        for module, a, b in zip(leaf.modules(prefix), *stacked, strict=True):
            if leaf.experts:
                model.get_parameter(module).add_(scaling * (a @ b).mT)
            else:
                model.get_submodule(module).register_forward_hook(
                    lambda _, inputs, out, a=a, b=b: out + scaling * (inputs[0] @ a @ b)
                )
    embedding = model.get_input_embeddings().weight
    assert model.get_output_embeddings().weight is embedding
    embedding[list(TOKEN_IDS)] = torch.from_numpy(run.tree["token_rows"])
    return model


@pytest.fixture
def expected(family_run, family_leaves):
    """Logits of base + adapter."""
    return logits(with_adapter(load(family_run.base)[0], family_run, family_leaves))


def test_merged_model_loads_in_transformers_and_computes_base_plus_adapter(family_run, expected, tmp_path):
    merge(family_run.plan(), tmp_path / "merged", MergeOptions())
    model, astray = load(tmp_path / "merged")
    assert astray == {}
    assert np.abs(expected - logits(load(family_run.base)[0])).max() > 0.1 * np.abs(expected).max()
    np.testing.assert_allclose(logits(model), expected, atol=2e-5 * np.abs(expected).max())
    assert verify_merged(family_run.plan(), tmp_path / "merged") == []


def test_only_what_was_trained_changes(family_run, family_leaves, tmp_path):
    merge(family_run.plan(), tmp_path / "merged", MergeOptions())
    old, new = (load_file(folder / "model.safetensors") for folder in (family_run.base, tmp_path / "merged"))
    assert list(new) == list(old)
    prefix = find_prefix(old, str(family_run.base))
    names = {module for leaf in family_leaves for module in leaf.modules(prefix)} | {f"{prefix}embed_tokens"}
    trained = {name if name in old else f"{name}.weight" for name in names}
    assert {name for name in old if not torch.equal(old[name], new[name])} == trained


def test_peft_computes_base_plus_adapter(family_run, expected, tmp_path, recwarn):
    export_adapter(family_run.plan(), tmp_path / "adapter")
    model = PeftModel.from_pretrained(load(family_run.base)[0], tmp_path / "adapter").eval()
    assert [str(warning.message) for warning in recwarn if "keys" in str(warning.message)] == []
    np.testing.assert_allclose(logits(model), expected, atol=2e-5 * np.abs(expected).max())
    assert verify_adapter(family_run.plan(), tmp_path / "adapter") == []
