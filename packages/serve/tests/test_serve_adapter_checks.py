"""The preflight of adapters: what the server would refuse, and above all what it would ignore."""

import json
from pathlib import Path

import numpy as np
import pytest
from serving_folders import write_weights

from portlab_serve.adapter_checks import requested_adapters
from portlab_serve.command_line import resolve
from portlab_serve.launch import Launch, prepare
from portlab_spec.errors import UserError
from portlab_spec.files import write_json


def launch(model, folder, target="vllm", *more: str, environ=None) -> Launch:
    return prepare(resolve([str(model.path), "--lora-modules", f"a={folder}", *more]), target, environ or {})


def faults(*args, **options):
    return [f for f in launch(*args, **options).findings if f.level != "note"]


def only_fault(*args, **options):
    (finding,) = faults(*args, **options)
    return finding


@pytest.mark.parametrize("name", ["functiongemma", "gemma3_4b", "gemma4_e2b"])
@pytest.mark.parametrize("target", ["vllm", "vllm-tpu", "cpu"])
def test_an_adapter_of_all_layers_passes(name, target, request, tmp_path):
    model = request.getfixturevalue(name)
    assert faults(model, model.adapter(tmp_path / "a"), target) == []


def test_the_adapter_is_enabled(functiongemma, tmp_path):
    command = launch(functiongemma, functiongemma.adapter(tmp_path / "a")).command
    assert "--enable-lora" in command
    assert "--max-lora-rank" not in command


@pytest.mark.parametrize(("rank", "flag"), [(17, "32"), (48, "64")])
def test_the_rank_is_made_room_for(functiongemma, tmp_path, rank, flag):
    command = launch(functiongemma, functiongemma.adapter(tmp_path / "a", rank=rank)).command
    assert command[command.index("--max-lora-rank") + 1] == flag


def test_a_rank_above_the_users_flag_is_refused_with_the_flag(functiongemma, tmp_path):
    finding = only_fault(functiongemma, functiongemma.adapter(tmp_path / "a", rank=17), "vllm", "--max-lora-rank", "16")
    assert finding.what == "rank 17 is above --max-lora-rank 16: the server refuses it"
    assert finding.fix == "Pass --max-lora-rank 32"


def test_no_flag_takes_a_rank_above_512(functiongemma, tmp_path):
    assert "beyond 512" in only_fault(functiongemma, functiongemma.adapter(tmp_path / "a", rank=513)).what


# ----------------------------------------------------------------------------------- what would do nothing


def test_a_prefix_that_loads_and_does_nothing_is_refused(gemma3_4b, tmp_path):
    finding = faults(gemma3_4b, gemma3_4b.adapter(tmp_path / "a", prefix="model."))[0]
    assert "are not in the server's model, first model.layers.0" in finding.what
    assert finding.what.endswith("it would serve the base there, in silence")


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_both_published_prefixes_of_a_multimodal_model_are_applied(gemma3_4b, tmp_path, prefix):
    assert faults(gemma3_4b, gemma3_4b.adapter(tmp_path / "a", prefix=prefix)) == []


def test_an_adapter_that_was_never_trained_is_refused(functiongemma, tmp_path):
    folder = functiongemma.adapter(tmp_path / "a", only=lambda m: m.endswith("layers.0.mlp.up_proj"))
    key = "base_model.model.model.layers.0.mlp.up_proj.lora"
    write_weights(
        tmp_path / "a" / "adapter_model.safetensors",
        {f"{key}_A.weight": np.ones((4, 16), np.float32), f"{key}_B.weight": np.zeros((24, 4), np.float32)},
    )
    assert only_fault(functiongemma, folder).what == "every lora_B is zero: it changes nothing"


def test_k_proj_where_keys_are_values_is_refused(gemma4_31b, tmp_path):
    folder = gemma4_31b.adapter(tmp_path / "a", only=lambda m: m.endswith("k_proj"))
    assert "the server would move the keys only" in only_fault(gemma4_31b, folder).what


def test_modules_that_the_server_is_told_to_leave_out_are_refused(functiongemma, tmp_path):
    folder = functiongemma.adapter(tmp_path / "a", only=lambda m: m.endswith(("q_proj", "up_proj")))
    finding = only_fault(functiongemma, folder, "vllm", "--lora-target-modules", "q_proj")
    assert finding.fix == "Add up_proj to --lora-target-modules"


def test_an_adapter_of_another_base_is_refused(functiongemma, tmp_path):
    folder = functiongemma.adapter(tmp_path / "a", only=lambda m: m.endswith("layers.0.mlp.up_proj"))
    functiongemma.raw |= {"intermediate_size": 40}
    functiongemma.write_config()
    assert any("is 24 x 16, in this base 40 x 16" in f.what for f in faults(functiongemma, folder))


def test_another_base_by_name_is_a_warning(functiongemma, tmp_path):
    folder = functiongemma.adapter(tmp_path / "a", base_model_name_or_path="google/gemma-3-1b-it")
    assert only_fault(functiongemma, folder).level == "warning"


# ---------------------------------------------------------------------------------- what would be refused


@pytest.mark.parametrize(
    "config",
    [
        {"use_dora": True},
        {"lora_bias": True},
        {"bias": "all"},
        {"modules_to_save": ["lm_head"]},
        {"trainable_token_indices": {"embed_tokens": [48]}},
        {"init_lora_weights": "pissa"},
        {"peft_type": "IA3"},
    ],
)
def test_what_the_server_does_not_have_is_refused(functiongemma, tmp_path, config):
    assert only_fault(functiongemma, functiongemma.adapter(tmp_path / "a", **config)).level == "error"


@pytest.mark.parametrize("key", ["lora_alpha", "target_modules"])
def test_a_config_without_what_the_server_asks_for_is_refused(functiongemma, tmp_path, key):
    folder = Path(functiongemma.adapter(tmp_path / "a"))
    config = json.loads((folder / "adapter_config.json").read_text())
    del config[key]
    write_json(folder / "adapter_config.json", config)
    assert only_fault(functiongemma, str(folder)).what == f"adapter_config.json lacks {key}: the server refuses it"


def test_tensors_that_are_no_factors_are_refused(functiongemma, tmp_path):
    folder = functiongemma.adapter(tmp_path / "a")
    write_weights(tmp_path / "a" / "adapter_model.safetensors", {"base_model.model.x.weight": np.ones(2, np.float32)})
    assert [f.what for f in faults(functiongemma, folder)] == [
        "holds no lora_A and lora_B",
        "1 tensors are no factors of a linear layer, first base_model.model.x.weight: the server refuses them",
    ]


def test_a_model_with_experts_takes_no_adapter_on_tpu(gemma4_26b, tmp_path):
    folder = gemma4_26b.adapter(tmp_path / "a", only=lambda m: "q_proj" in m)
    assert faults(gemma4_26b, folder, "vllm") == []
    assert "takes no adapter on TPU" in only_fault(gemma4_26b, folder, "vllm-tpu").what


def test_a_folder_without_config_is_refused(functiongemma, tmp_path):
    (tmp_path / "a").mkdir()
    assert only_fault(functiongemma, tmp_path / "a").what == "adapter config not found"


# -------------------------------------------------------------------------------------------------- on TPU


def test_adapters_on_tpu_run_through_torchax(gemma4_e2b, tmp_path):
    made = launch(gemma4_e2b, gemma4_e2b.adapter(tmp_path / "a"), "vllm-tpu")
    assert made.implementation == "torchax"
    assert made.environment["MODEL_IMPL_TYPE"] == "vllm"


def test_asking_for_jax_beside_an_adapter_is_refused(gemma4_e2b, tmp_path):
    with pytest.raises(UserError, match="flax_nnx takes no adapter"):
        launch(gemma4_e2b, gemma4_e2b.adapter(tmp_path / "a"), "vllm-tpu", environ={"MODEL_IMPL_TYPE": "flax_nnx"})


# ----------------------------------------------------------------------------------------- --lora-modules


def test_both_spellings_of_an_adapter_are_read():
    held = json.dumps({"name": "b", "path": "/x,y", "base_model_name": "m"})
    assert [(r.name, r.path) for r in requested_adapters(["a=/x", held])] == [("a", "/x"), ("b", "/x,y")]


@pytest.mark.parametrize("value", ["/x", "a=/x,y", '{"name": "a"}', "[]"])
def test_what_is_no_adapter_is_refused(value):
    with pytest.raises(UserError, match="is no adapter"):
        requested_adapters([value])
