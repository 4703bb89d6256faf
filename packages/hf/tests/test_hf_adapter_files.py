"""PEFT's two files, written from a model and read back into another."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from portlab_hf.adapter_files import CONFIG, WEIGHTS, adapter_tensors, load_adapter, peft_name, write_adapter
from portlab_hf.model import trained_parameters
from portlab_spec.errors import UserError

SIZES = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}


def base(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def adapted(rank: int = 2, targets: tuple[str, ...] = ("q_proj", "down_proj")) -> PeftModel:
    model = get_peft_model(base(), LoraConfig(r=rank, lora_alpha=4, target_modules=list(targets)))
    with torch.no_grad():
        for parameter in trained_parameters(model).values():
            parameter.normal_()
    return model


@pytest.fixture
def written(tmp_path):
    model = adapted()
    write_adapter(model, adapter_tensors(model), tmp_path)
    return model, tmp_path


def test_peft_loads_what_was_written(written):
    model, folder = written
    again = PeftModel.from_pretrained(base(), folder)
    ids = torch.arange(5)[None]
    torch.testing.assert_close(again(ids).logits, model(ids).logits)


def test_names_of_files_are_those_of_parameters_without_the_adapter_s_own(written):
    model, folder = written
    assert set(load_file(folder / WEIGHTS)) == {peft_name(name) for name in trained_parameters(model)}


def test_the_config_is_plain_json_whose_alpha_is_whole(written):
    config = json.loads((written[1] / CONFIG).read_text())
    assert config["lora_alpha"] == 4
    assert isinstance(config["target_modules"], list)
    assert config["inference_mode"] is True


def test_values_are_loaded_into_a_model_of_the_same_adapter(written):
    model, folder = written
    other = adapted()
    load_adapter(other, load_file(folder / WEIGHTS), str(folder))
    for name, parameter in trained_parameters(other).items():
        torch.testing.assert_close(parameter, trained_parameters(model)[name])


@pytest.mark.parametrize(
    ("other", "said"),
    [(adapted(rank=3), "is .*, .* and the recipe's"), (adapted(targets=("q_proj",)), "another adapter")],
    ids=["another rank", "other targets"],
)
def test_another_adapter_is_refused(written, other, said):
    with pytest.raises(UserError, match=said):
        load_adapter(other, load_file(written[1] / WEIGHTS), "the folder")
