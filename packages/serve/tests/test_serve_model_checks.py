"""The preflight of a model folder: clean folders pass on every target, and each known fault is found and named."""

from pathlib import Path

import numpy as np
import pytest

from portlab_serve.command_line import resolve
from portlab_serve.findings import Finding
from portlab_serve.launch import Launch, prepare
from portlab_spec.files import write_json

MODELS = ["functiongemma", "gemma3_4b", "gemma4_31b", "gemma4_e2b", "gemma4_26b"]


def launch(model, target="vllm", *more: str, environ=None, tool_format="auto") -> Launch:
    return prepare(resolve([str(model.path), *more]), target, environ or {}, tool_format)


def faults(model, target="vllm", *more: str, **options) -> list[Finding]:
    return [finding for finding in launch(model, target, *more, **options).findings if finding.level != "note"]


def only_fault(model, target="vllm", *more: str, **options) -> Finding:
    (finding,) = faults(model, target, *more, **options)
    return finding


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("target", ["vllm", "vllm-tpu", "cpu"])
def test_a_model_as_published_passes(name, target, request):
    assert faults(request.getfixturevalue(name), target, "--chat-template-content-format", "string") == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [("functiongemma", "torchax"), ("gemma3_4b", "torchax"), ("gemma4_31b", "jax"), ("gemma4_26b", "jax")],
)
def test_on_tpu_gemma_4_runs_in_jax_and_the_others_through_torchax(name, expected, request):
    assert launch(request.getfixturevalue(name), "vllm-tpu").implementation == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("functiongemma", "functiongemma"),
        ("gemma3_4b", "gemma3-json"),
        ("gemma4_31b", "gemma4-31b"),
        ("gemma4_e2b", "gemma4"),
    ],
)
def test_the_tool_format_is_read_off_the_control_tokens(name, expected, request):
    assert launch(request.getfixturevalue(name)).tool_format == expected


# ---------------------------------------------------------------------------------------------------- config


def test_a_folder_without_config_is_refused(functiongemma):
    (functiongemma.path / "config.json").unlink()
    assert only_fault(functiongemma).what == "model config not found"


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    (finding,) = prepare(resolve([str(tmp_path / "none")]), "vllm", {}).findings
    assert (finding.level, finding.what) == ("error", "no such folder")


def test_a_model_of_the_hub_is_not_checked():
    (finding,) = prepare(resolve(["google/functiongemma-270m-it"]), "vllm", {}).findings
    assert finding.level == "note"


@pytest.mark.parametrize("listed", [[], None, ["Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"]])
def test_there_must_be_one_architecture(functiongemma, listed):
    functiongemma.write_config(architectures=listed)
    assert "the server wants exactly one" in faults(functiongemma)[0].what


def test_a_text_only_gemma_4_has_no_config_for_the_jax_model(gemma4_31b):
    gemma4_31b.raw = gemma4_31b.raw["text_config"]
    gemma4_31b.write_config(architectures=["Gemma4ForCausalLM"])
    assert faults(gemma4_31b, "vllm") == []
    assert "reads text_config" in only_fault(gemma4_31b, "vllm-tpu").what
    assert faults(gemma4_31b, "vllm-tpu", environ={"MODEL_IMPL_TYPE": "vllm"}) == []


# --------------------------------------------------------------------------------------------------- weights


def test_names_of_the_multimodal_class_under_the_text_class_are_refused(functiongemma):
    functiongemma.rename("model.language_model.")
    finding = only_fault(functiongemma)
    assert finding.what == "tensors are named model.language_model.*, and Gemma3ForCausalLM (torch) takes model.*"
    assert "Gemma3ForConditionalGeneration" in finding.fix


def test_names_of_the_text_class_under_the_multimodal_class_are_refused(gemma3_4b):
    gemma3_4b.rename("model.")
    assert "Gemma3ForConditionalGeneration (torch) takes" in only_fault(gemma3_4b).what


def test_the_jax_model_takes_the_multimodal_layout_only(gemma4_31b):
    gemma4_31b.rename("model.")
    assert faults(gemma4_31b, "vllm") == []
    assert "(jax) takes model.language_model." in only_fault(gemma4_31b, "vllm-tpu").what


def test_a_missing_tensor_is_named(functiongemma):
    del functiongemma.tensors["model.layers.3.mlp.up_proj.weight"]
    functiongemma.write_tensors()
    finding = only_fault(functiongemma)
    assert finding.what.endswith("first model.layers.3.mlp.up_proj.weight: they would stay random")


def test_an_unmerged_adapter_is_refused(functiongemma):
    functiongemma.write_tensors(**{"model.layers.0.mlp.up_proj.lora_A.weight": np.zeros((2, 16), np.float32)})
    what = "1 tensors are unknown to Gemma3ForCausalLM, first model.layers.0.mlp.up_proj.lora_A.weight: it refuses them"
    assert only_fault(functiongemma).what == what


def test_a_tensor_of_another_size_is_named(functiongemma):
    functiongemma.write_tensors(**{"model.norm.weight": np.zeros(8, np.float32)})
    assert only_fault(functiongemma).what == "model.norm.weight has shape [8], config.json says [16]"


def test_weights_of_encoders_are_no_fault(gemma4_31b):
    gemma4_31b.write_tensors(**{"model.vision_tower.encoder.layers.0.w.weight": np.zeros(2, np.float32)})
    assert faults(gemma4_31b) == []


def test_keys_of_layers_that_share_them_are_no_fault(gemma4_e2b):
    gemma4_e2b.write_tensors(**{"model.language_model.layers.5.self_attn.k_proj.weight": np.zeros((8, 16), np.float32)})
    assert faults(gemma4_e2b) == []


def test_without_their_norm_the_jax_loader_may_fail(gemma4_e2b):
    del gemma4_e2b.tensors["model.language_model.layers.5.self_attn.k_norm.weight"]
    gemma4_e2b.write_tensors()
    assert faults(gemma4_e2b, "vllm") == []
    assert only_fault(gemma4_e2b, "vllm-tpu").level == "warning"


def test_a_missing_shard_is_named(functiongemma):
    (functiongemma.path / "model.safetensors").rename(functiongemma.path / "model-00001-of-00002.safetensors")
    files = dict.fromkeys(functiongemma.tensors, "model-00001-of-00002.safetensors")
    files["model.norm.weight"] = "model-00002-of-00002.safetensors"
    write_json(functiongemma.path / "model.safetensors.index.json", {"weight_map": files})
    assert only_fault(functiongemma).what == "shard model-00002-of-00002.safetensors is missing"


def test_a_tied_head_that_repeats_the_embedding_is_a_warning(functiongemma):
    functiongemma.write_tensors(**{"lm_head.weight": functiongemma.tensors["model.embed_tokens.weight"]})
    assert only_fault(functiongemma).level == "warning"


def test_a_tied_head_of_its_own_is_refused(functiongemma):
    functiongemma.write_tensors(**{"lm_head.weight": functiongemma.tensors["model.embed_tokens.weight"] + 1})
    finding = only_fault(functiongemma)
    assert (finding.level, finding.check) == ("error", "head")


# ------------------------------------------------------------------------------------------- tokens and files


@pytest.mark.parametrize(
    ("stops", "lacks"),
    [(1, "106 <end_of_turn>, 50 <start_function_response>"), ([1, 106], "50 <start_function_response>")],
)
def test_a_missing_stop_is_named(functiongemma, stops, lacks):
    write_json(functiongemma.path / "generation_config.json", {"eos_token_id": stops})
    finding = only_fault(functiongemma)
    assert f"lacks {lacks}: generation would run on" in finding.what
    assert "[1, 50, 106]" in finding.fix


def test_without_a_generation_config_the_config_says_the_stops(functiongemma):
    (functiongemma.path / "generation_config.json").unlink()
    functiongemma.write_config(eos_token_id=[1, 106, 50])
    assert faults(functiongemma) == []


def test_a_model_without_tokenizer_is_refused(functiongemma):
    (functiongemma.path / "tokenizer.json").unlink()
    assert faults(functiongemma)[0].check == "tokenizer"


def test_a_format_whose_tokens_are_missing_is_refused(gemma3_4b):
    finding = faults(gemma3_4b, tool_format="functiongemma")[0]
    assert finding.what == "has no token <start_function_declaration>, which functiongemma needs"


def test_a_token_beyond_the_embedding_is_refused(functiongemma):
    functiongemma.write_tokens({**{"<start_of_image>": 255_999}, **{"<eos>": 1}})
    found = [finding.what for finding in faults(functiongemma, tool_format="gemma3-json")]
    assert "has id 255999, and the embedding 128 rows" in found


def test_a_multimodal_model_needs_its_processor(gemma3_4b):
    (gemma3_4b.path / "processor_config.json").unlink()
    assert only_fault(gemma3_4b).check == "processor"
    write_json(gemma3_4b.path / "preprocessor_config.json", {})
    assert faults(gemma3_4b) == []


def test_a_model_of_another_family_is_served_unchecked(tmp_path: Path, functiongemma):
    functiongemma.raw = {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}
    functiongemma.write_config()
    assert [f for f in faults(functiongemma) if f.level == "error"] == []
