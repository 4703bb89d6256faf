"""Llama, Mistral, Qwen 2 and Qwen 3: what is read of them is what transformers builds."""

import math
import re

import pytest

from portlab_spec.errors import UserError
from portlab_spec.models import FULL, SLIDING, GemmaConfig, param_table, plan_adapter
from portlab_spec.models.flops import model_size
from portlab_spec.models.targets import module_regex
from portlab_spec.recipe import Lora

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA = SIZES | {"model_type": "llama"}
MISTRAL = SIZES | {"model_type": "mistral"}
QWEN2 = SIZES | {"model_type": "qwen2"}
QWEN3 = SIZES | {"model_type": "qwen3"}
WINDOWED = {"use_sliding_window": True, "sliding_window": 6}
MODELS = {
    "llama": LLAMA,
    "llama, tied": LLAMA | {"tie_word_embeddings": True},
    "llama, heads of their own size": LLAMA | {"head_dim": 12},
    "llama, a key head for each query head": {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"},
    "llama, biases": LLAMA | {"attention_bias": True, "mlp_bias": True},
    "mistral": MISTRAL | {"sliding_window": 6},
    "mistral, tied and full": MISTRAL | {"sliding_window": None, "tie_word_embeddings": True},
    "qwen2": QWEN2,
    "qwen2, tied": QWEN2 | {"tie_word_embeddings": True},
    "qwen2, sliding from a layer on": QWEN2 | WINDOWED | {"max_window_layers": 3},
    "qwen3": QWEN3 | {"head_dim": 16},
    "qwen3, tied": QWEN3 | {"head_dim": 16, "tie_word_embeddings": True},
    "qwen3, head size left out": QWEN3,
    "qwen3, biases": QWEN3 | {"attention_bias": True},
    "qwen3, layers by name": QWEN3 | WINDOWED | {"layer_types": [SLIDING, FULL] * 2},
}


class Pair:
    """A configuration as read here, and transformers' model of it, without memory."""

    def __init__(self, raw):
        self.theirs = transformers.AutoConfig.for_model(**raw)
        with torch.device("meta"):
            self.model = transformers.AutoModelForCausalLM.from_config(self.theirs)
        self.config = GemmaConfig.from_dict(raw)


@pytest.fixture(scope="module", params=MODELS)
def pair(request):
    return Pair(MODELS[request.param])


def test_the_table_lists_every_tensor_with_its_shape(pair):
    theirs = {name: tuple(tensor.shape) for name, tensor in pair.model.state_dict().items()}
    if pair.config.tie_word_embeddings:
        del theirs["lm_head.weight"]  # the embedding again
    ours = {name: p.shape for p in param_table(pair.config) for name in p.tensor_names("model.")}
    assert ours == theirs


def test_a_saved_config_reads_as_the_one_it_was_made_from(pair):
    assert GemmaConfig.from_dict(pair.theirs.to_dict()) == pair.config
    assert GemmaConfig.from_dict(pair.theirs.to_diff_dict()) == pair.config


def test_attention_is_scaled_as_theirs(pair):
    assert {layer.self_attn.scaling for layer in pair.model.model.layers} == {pair.config.attention_scale}


@torch.no_grad()
def test_every_layer_sees_what_theirs_sees(pair):
    length = 10
    ids = torch.zeros(1, length, dtype=torch.long)
    with torch.device("cpu"):
        model = transformers.AutoModelForCausalLM.from_config(pair.theirs, attn_implementation="eager").eval()
    weights = model(input_ids=ids, output_attentions=True).attentions
    distance = torch.arange(length)[:, None] - torch.arange(length)
    for kind, layer in zip(pair.config.layers, weights, strict=True):
        seen = (distance >= 0) & (distance < (kind.window or length))
        assert torch.equal(layer[0, 0] > 0, seen)


def test_targets_are_every_linear_layer_of_the_blocks(pair):
    linears = {
        name for name, module in pair.model.named_modules() if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
    leaves = plan_adapter(pair.config, Lora())
    assert {module for leaf in leaves for module in leaf.modules("model.")} == linears
    for leaf in leaves:
        for module in leaf.modules("model."):
            linear = pair.model.get_submodule(module)
            assert (leaf.into.size, leaf.out.size) == (linear.in_features, linear.out_features)


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["gate_proj"], [r".*layers\.(1|3)\..*o_proj"]])
def test_the_expression_for_peft_matches_the_planned_modules_alone(pair, targets):
    planned = [m for leaf in plan_adapter(pair.config, Lora(targets=targets)) for m in leaf.modules("model.")]
    known = [name for name, _ in pair.model.named_modules()]
    regex = module_regex(planned, known)
    assert sorted(name for name in known if re.fullmatch(regex, name)) == sorted(planned)


def test_the_head_and_biases_are_no_targets():
    config = GemmaConfig.from_dict(QWEN2)
    with pytest.raises(UserError, match="'lm_head' matches only lm_head, which is not a linear layer that LoRA adapts"):
        plan_adapter(config, Lora(targets=["lm_head"]))
    assert not any(param.target for param in param_table(config) if param.name.endswith("bias"))


def test_flops_count_the_linear_layers_and_the_head_once(pair):
    modules = pair.model.named_modules()
    sizes = {name: module.weight.numel() for name, module in modules if isinstance(module, torch.nn.Linear)}
    size = model_size(pair.config, plan_adapter(pair.config, Lora(rank=2, targets=["o_proj"])))
    assert size.head == sizes.pop("lm_head")
    assert size.linears == sum(sizes.values())
    heads = pair.config.num_attention_heads * pair.config.layers[0].head_dim
    assert size.adapters == 2 * (heads + SIZES["hidden_size"]) * SIZES["num_hidden_layers"]


def test_axes_and_units_are_those_of_gemma():
    names = ("embed_tokens", "self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")

    def axes(raw):
        table = {p.name: p for p in param_table(GemmaConfig.from_dict(raw))}
        return {name: [(dim.size, dim.axis, dim.units) for dim in table[name].dims] for name in names}

    gemma = SIZES | {"model_type": "gemma3_text", "head_dim": 8, "sliding_window": 6, "layer_types": [FULL] * 4}
    assert axes(QWEN2) == axes(gemma)


def test_a_bias_is_cut_as_the_outputs_of_its_layer():
    table = {p.name: p for p in param_table(GemmaConfig.from_dict(QWEN2))}
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        assert table[f"{name}.bias"].dims == table[name].dims[:1]


def test_a_head_of_its_own_is_cut_as_the_embedding_and_has_no_prefix():
    table = {p.name: p for p in param_table(GemmaConfig.from_dict(LLAMA))}
    assert table["lm_head"].dims == table["embed_tokens"].dims
    assert table["lm_head"].tensor_names("model.language_model.") == ["lm_head.weight"]


@pytest.mark.parametrize(
    ("keys", "theta", "factor", "scaling"),
    [
        ({}, 1e4, 1.0, None),
        ({"rope_theta": 5e5}, 5e5, 1.0, None),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, 5e5, 1.0, None),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}, 5e5, 2.0, None),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 5e5, 1.0, "llama3"),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0}}, 1e6, 1.0, "yarn"),
    ],
)
def test_rope_of_either_style_is_read_and_no_scaling_is_refused(keys, theta, factor, scaling):
    rope = GemmaConfig.from_dict(LLAMA | keys).layers[0].rope
    assert (rope.theta, rope.factor, rope.scaling) == (theta, factor, scaling)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (QWEN3 | {"layer_types": [SLIDING, FULL] * 2}, "names sliding layers, which have no window"),
        (QWEN2 | {"layer_types": [FULL]}, "layer_types must name 4 sliding or full layers"),
        ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, "the key 'hidden_size' is missing"),
        (LLAMA | {"model_type": "qwen3_moe"}, "the model type 'qwen3_moe' is not supported"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(raw, message):
    with pytest.raises(UserError, match=message):
        GemmaConfig.from_dict(raw)


def shape(model_type, vocab, hidden, mlp, layers, heads, kv_heads, **more):
    sizes = dict(zip(SIZES, (vocab, hidden, mlp, layers, heads, kv_heads), strict=False))
    return {"model_type": model_type, **sizes, **more}


TIED = {"tie_word_embeddings": True}
# As published at huggingface.co, configuration and parameters.
PUBLISHED = {
    "Qwen/Qwen2.5-0.5B": (shape("qwen2", 151_936, 896, 4864, 24, 14, 2, **TIED), 494_032_768),
    "Qwen/Qwen3-0.6B": (shape("qwen3", 151_936, 1024, 3072, 28, 16, 8, head_dim=128, **TIED), 596_049_920),
    "meta-llama/Llama-3.2-1B": (shape("llama", 128_256, 2048, 8192, 16, 32, 8, **TIED), 1_235_814_400),
    "mistralai/Mistral-7B-v0.1": (shape("mistral", 32_000, 4096, 14_336, 32, 32, 8), 7_241_732_096),
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_the_tables_count_the_published_parameters(model):
    raw, parameters = PUBLISHED[model]
    assert sum(math.prod(p.shape) * p.count for p in param_table(GemmaConfig.from_dict(raw))) == parameters
