"""The exported folder in plain PEFT reproduces base + adapter."""

import re
import shutil
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from portlab_merge.base_model import open_base
from portlab_merge.overlay import MergeOptions, merge
from portlab_merge.peft_adapter import adapter_config, adapter_tensors, export_adapter, target_regex
from portlab_merge.peft_format import module_path
from portlab_merge.sources.peft import read_peft
from portlab_merge.verify import verify_adapter
from portlab_spec.errors import UserError


@pytest.mark.parametrize(("kv_heads", "use_rslora", "token_rows"), [(2, False, True), (1, True, False)])
def test_peft_reproduces_base_plus_adapter(
    make_base, make_run, exact_weights, logits, tmp_path, kv_heads, use_rslora, token_rows
):
    run = make_run(make_base(kv_heads=kv_heads), use_rslora=use_rslora, token_rows=token_rows)
    export_adapter(run.plan(), tmp_path / "adapter")
    expected = logits(run.base, exact_weights(run))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # PEFT warns about keys that are missing or unexpected
        found = logits(run.base, wrap=lambda model: PeftModel.from_pretrained(model, tmp_path / "adapter"))
    assert np.abs(expected - logits(run.base)).max() > 1
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_rows_in_the_base_and_the_rest_in_the_adapter_are_what_was_trained(
    make_base, make_run, exact_weights, logits, tmp_path
):
    run = make_run(make_base(dtype="float32"))
    rows, updates = run.plan().split()
    merge(rows, tmp_path / "with-rows", MergeOptions())
    config = export_adapter(updates, tmp_path / "adapter", base=tmp_path / "with-rows")
    assert config["base_model_name_or_path"] == str(tmp_path / "with-rows")
    assert "trainable_token_indices" not in config
    assert all("lora_" in name for name in load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    old, new = (load_file(folder / "model.safetensors") for folder in (run.base, tmp_path / "with-rows"))
    assert [name for name in old if not torch.equal(old[name], new[name])] == ["model.embed_tokens.weight"]
    found = logits(tmp_path / "with-rows", wrap=lambda model: PeftModel.from_pretrained(model, tmp_path / "adapter"))
    np.testing.assert_allclose(found, logits(run.base, exact_weights(run)), atol=1e-4)


@pytest.mark.parametrize(("token_rows", "what"), [(False, "no token rows"), (True, "nothing but token rows")])
def test_what_is_of_one_kind_cannot_be_split(base, make_run, token_rows, what):
    plan = make_run(base, token_rows=token_rows).plan()
    with pytest.raises(UserError, match=what):
        (replace(plan, targets=()) if token_rows else plan).split()


def test_peft_saves_the_same_tensors_again(run, tmp_path):
    from transformers import Gemma3ForCausalLM

    export_adapter(run.plan(), tmp_path / "adapter")
    model = Gemma3ForCausalLM.from_pretrained(run.base, dtype=torch.float32)
    PeftModel.from_pretrained(model, tmp_path / "adapter").save_pretrained(tmp_path / "again")
    ours, again = (load_file(tmp_path / f / "adapter_model.safetensors") for f in ("adapter", "again"))
    assert set(ours) == set(again)
    assert all(torch.equal(ours[name], again[name]) for name in ours)


def test_config_says_where_the_adapter_comes_from(run):
    config = adapter_config(run.plan())
    assert config["base_model_name_or_path"] == "tiny/gemma-3"
    assert config["revision"] == "abc"
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (4, 8, False)
    assert config["inference_mode"] is True
    assert config["trainable_token_indices"] == {"embed_tokens": [46, 5, 90]}


def test_target_regex_names_the_trained_layers_only(run):
    plan = run.plan()
    every = [t.module for t in plan.targets]
    some = [m for m in every if "layers.1." not in m]
    everywhere = [n.removesuffix(".weight") for n in plan.base.tensors]
    for modules in (every, some, every[:5]):
        regex = target_regex(modules, plan.base)
        assert {m for m in everywhere if re.fullmatch(regex, m)} == set(modules)


@pytest.fixture
def nested_base(base, tmp_path):
    """The base under the names of a published multimodal Gemma 3, with a bit of a vision tower."""
    folder = tmp_path / "multimodal"
    shutil.copytree(base, folder)
    tensors = load_file(base / "model.safetensors")
    tensors = {f"language_model.{name}": t for name, t in tensors.items()}
    tensors["vision_tower.encoder.layers.0.self_attn.q_proj.weight"] = torch.ones(2, 2)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_target_regex_spares_the_vision_tower(nested_base):
    modules = [f"model.language_model.layers.{i}.self_attn.q_proj" for i in range(3)]
    assert target_regex(modules, open_base(nested_base)) == r"model\.language_model\.layers\.\d+\.(self_attn\.q_proj)"


@pytest.mark.parametrize(
    ("key_style", "prefix"), [("new", "model.language_model."), ("old", "language_model.model.")], ids=["new", "old"]
)
def test_names_are_those_of_the_transformers_asked_for(make_run, nested_base, tmp_path, key_style, prefix):
    """Release 4.52 turned the wrapper's names round (huggingface/transformers#38927)."""
    plan = make_run(nested_base, prefix="language_model.model.").plan()
    config = export_adapter(plan, tmp_path / "adapter", key_style)
    keys = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert f"base_model.model.{prefix}embed_tokens.token_adapter.trainable_tokens_delta" in keys
    assert all(key.startswith(f"base_model.model.{prefix}") for key in keys)
    assert re.fullmatch(config["target_modules"], f"{prefix}layers.2.mlp.up_proj")
    assert not re.fullmatch(config["target_modules"], "model.vision_tower.encoder.layers.0.self_attn.q_proj")
    assert verify_adapter(plan, tmp_path / "adapter") == []


def test_names_of_a_text_model_have_one_style(run):
    assert adapter_config(run.plan(), "old") == adapter_config(run.plan(), "new")
    assert list(dict(adapter_tensors(run.plan(), "old"))) == list(dict(adapter_tensors(run.plan(), "new")))


def test_patterns_follow_the_names(make_run, nested_base, tmp_path):
    """The trainer's pattern names modules by the text model's prefix, which the exported ones do not have."""

    def edit(tree, metadata):
        metadata["lora"]["alpha_pattern"] = {r"model\.layers\.(0|2)\.self_attn\.q_proj": 16}

    plan = make_run(nested_base, edit=edit, prefix="language_model.model.").plan()
    config = export_adapter(plan, tmp_path / "adapter")
    assert config["alpha_pattern"] == {
        rf"model\.language_model\.layers\.{layer}\.self_attn\.q_proj": 16 for layer in (0, 2)
    }
    found = {module_path(f"{u.module}.weight"): u.scaling for u in read_peft(tmp_path / "adapter").updates}
    assert found == {module_path(t.tensor): t.scaling for t in plan.targets}
    assert set(found.values()) == {2.0, 4.0}
