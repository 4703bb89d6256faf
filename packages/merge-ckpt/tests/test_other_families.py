"""PEFT adapters of Llama, Mistral and Qwen: merged, the base computes what it does with the adapter beside it."""

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from portlab_merge.base_model import open_base
from portlab_merge.checkpoint import Checkpoint
from portlab_merge.location import LocalPath
from portlab_merge.overlay import MergeOptions, merge
from portlab_merge.peft_adapter import export_adapter
from portlab_merge.plan import is_tied, make_plan
from portlab_merge.server_check import check_server
from portlab_merge.sources.peft import read_peft
from portlab_merge.verify import verify_adapter, verify_merged
from portlab_spec.models import GemmaConfig, plan_adapter
from portlab_spec.models.targets import module_regex
from portlab_spec.recipe import Lora

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
TIED = {"tie_word_embeddings": True}
FAMILIES = {
    "llama": {"model_type": "llama"},
    "mistral": {"model_type": "mistral", "sliding_window": 6},
    "qwen2, tied": {"model_type": "qwen2", **TIED},
    "qwen3, tied": {"model_type": "qwen3", **TIED},
}


@pytest.fixture(scope="module", params=FAMILIES)
def base(request, tmp_path_factory):
    """A random model of a family."""
    torch.manual_seed(0)
    settings = SIZES | FAMILIES[request.param]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.3)
    folder = tmp_path_factory.mktemp("base") / "base"
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(base):
    """An adapter beside every linear layer of its blocks, as PEFT saves it."""
    model = load(base)
    leaves = plan_adapter(GemmaConfig.load(base), Lora(rank=4, alpha=8))
    modules = [module for leaf in leaves for module in leaf.modules("model.")]
    targets = module_regex(modules, [name for name, _ in model.named_modules()])
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=targets))
    trained = {name: parameter for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert len(trained) == 2 * len(modules) == 2 * 7 * SIZES["num_hidden_layers"]
    for parameter in trained.values():
        torch.nn.init.normal_(parameter, 0, 0.3)
    adapted.save_pretrained(base.parent / "adapter")
    return base.parent / "adapter"


@pytest.fixture
def plan(base, adapter):
    opened = open_base(base)
    found = read_peft(adapter, tied_embeddings=is_tied(opened))
    return make_plan(opened, Checkpoint(LocalPath(adapter), None, (), found))


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def logits(model):
    return model(input_ids=torch.arange(40).reshape(2, 20) * 7 % SIZES["vocab_size"]).logits.numpy()


@pytest.fixture
def expected(base, adapter):
    """Logits of base + adapter."""
    return logits(PeftModel.from_pretrained(load(base), adapter))


def test_the_merged_model_computes_base_plus_adapter(plan, base, expected, tmp_path):
    merge(plan, tmp_path / "merged", MergeOptions())
    assert np.abs(expected - logits(load(base))).max() > 0.1 * np.abs(expected).max()
    np.testing.assert_allclose(logits(load(tmp_path / "merged")), expected, atol=2e-5 * np.abs(expected).max())
    assert verify_merged(plan, tmp_path / "merged") == []


def test_only_the_adapted_weights_change(plan, base, tmp_path):
    merge(plan, tmp_path / "merged", MergeOptions())
    old, new = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "merged"))
    assert list(new) == list(old)
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert changed == {target.tensor for target in plan.targets}


def test_the_exported_adapter_is_the_one_that_was_read(plan, base, expected, tmp_path):
    export_adapter(plan, tmp_path / "again")
    assert verify_adapter(plan, tmp_path / "again") == []
    again = PeftModel.from_pretrained(load(base), tmp_path / "again")
    np.testing.assert_allclose(logits(again), expected, atol=2e-5 * np.abs(expected).max())


def test_the_server_check_says_that_it_does_not_know_the_family(plan):
    (reason,) = check_server(plan, "vllm").reasons
    assert reason.startswith("the names of its modules are not known for architecture")
