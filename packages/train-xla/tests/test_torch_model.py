"""What is trained, what it is called, and how it is cut: the table of train-jax, by the names of PEFT."""

import pytest
import torch
from toy_gemmas import CASES

from portlab_hf.adapter_files import peft_name
from portlab_hf.model import PEFT_PREFIX, parameter_specs, softcap, trained_parameters
from portlab_spec.mesh import param_spec
from portlab_spec.models import param_table

MESH = {"data": 1, "fsdp": 2, "tp": 2}


def plain(name):
    """Name of a parameter without what PEFT puts around it."""
    return name.removeprefix(PEFT_PREFIX).replace(".base_layer", "").replace(".token_adapter", "")


@pytest.mark.parametrize("case", CASES)
def test_only_the_adapter_is_trained_and_in_float32(case, adapted_toy):
    toy = adapted_toy(case)
    trained = trained_parameters(toy.adapted)
    assert {"lora_A", "lora_B", "trainable_tokens_delta"} == {
        name.split(".")[-3 if "lora" in name else -2] for name in trained
    }
    assert {parameter.dtype for parameter in trained.values()} == {torch.float32}


@pytest.mark.parametrize("case", CASES)
def test_every_weight_of_the_text_model_is_cut_by_the_table(case, adapted_toy):
    toy = adapted_toy(case)
    specs = parameter_specs(toy.adapted, toy.config, MESH)
    found = {
        plain(name): spec for name, spec in specs.items() if "lora_" not in name and "trainable_tokens" not in name
    }
    parameters = {plain(name) for name, _ in toy.adapted.named_parameters()}
    for param in param_table(toy.config):
        for name in param.tensor_names("model."):
            assert param.buffer or name in parameters
            assert param.buffer or found[name] == param_spec(param.dims, MESH), name


def test_adapters_are_cut_as_the_weights_beside_them(adapted_toy):
    toy = adapted_toy("gemma3, two kv heads")
    specs = {peft_name(name): spec for name, spec in parameter_specs(toy.adapted, toy.config, MESH).items()}
    layer = f"{PEFT_PREFIX}model.layers.1"
    assert specs[f"{layer}.self_attn.q_proj.lora_A.weight"] == (None, "fsdp")
    assert specs[f"{layer}.self_attn.q_proj.lora_B.weight"] == ("tp", None)
    assert specs[f"{layer}.self_attn.o_proj.lora_A.weight"] == (None, "tp")
    assert specs[f"{layer}.self_attn.o_proj.lora_B.weight"] == ("fsdp", None)
    assert specs[f"{layer}.mlp.down_proj.lora_A.weight"] == (None, "tp")
    rows = next(name for name in specs if "trainable_tokens_delta" in name)
    assert specs[rows] == (None, "fsdp")


def test_the_draw_depends_on_the_seed_alone(adapted_toy):
    first, again, other = (trained_parameters(adapted_toy("gemma3, two kv heads", seed=s).adapted) for s in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_an_adapter_says_which_base_it_belongs_to_by_the_id_and_not_by_a_path(adapted_toy):
    toy = adapted_toy("gemma3, two kv heads")
    assert toy.adapted.peft_config["default"].base_model_name_or_path == "gemma3, two kv heads"


@pytest.mark.parametrize(("case", "bound"), [("gemma3, two kv heads", None), ("gemma4, experts", 30.0)])
def test_softcap(case, bound, adapted_toy):
    assert softcap(adapted_toy(case).base) == bound


def test_ranks_and_scalings_follow_their_patterns(adapted_toy):
    toy = adapted_toy(
        "gemma3, two kv heads", rank_pattern={"layers.1.self_attn.q_proj": 2}, alpha_pattern={"down_proj": 32.0}
    )
    layer = toy.base.model.layers[1]
    assert layer.self_attn.q_proj.lora_A["default"].weight.shape[0] == 2
    assert layer.self_attn.q_proj.scaling["default"] == 8.0 / 2
    assert layer.mlp.down_proj.scaling["default"] == 32.0 / 4
    assert layer.self_attn.v_proj.scaling["default"] == 8.0 / 4
