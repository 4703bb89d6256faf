"""Configurations of Gemma 3 and Gemma 4, sections of layers, and the parameter table."""

import json
import math

import pytest

from portlab_spec.errors import UserError
from portlab_spec.models import FULL, SLIDING, GemmaConfig, UnsupportedModel, find_prefix, param_table

GEMMA3_1B = {
    "model_type": "gemma3_text",
    "vocab_size": 262144,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
    "query_pre_attn_scalar": 256,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "rope_local_base_freq": 10000,
    "sliding_window_pattern": 6,
    "eos_token_id": [1, 106],
}  # as published, transformers 4 style

GEMMA3_4B = {
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}  # as published: what equals transformers' defaults is left out


def gemma4(layers, pattern, **more):
    """A Gemma 4 configuration of published shape."""
    return {
        "model_type": "gemma4",
        "text_config": {
            "model_type": "gemma4_text",
            "vocab_size": 262144,
            "num_hidden_layers": layers,
            "layer_types": ([SLIDING] * (pattern - 1) + [FULL]) * (layers // pattern),
            "head_dim": 256,
            "global_head_dim": 512,
            "final_logit_softcapping": 30.0,
            **more,
        },
    }


GEMMA4_31B = gemma4(
    60, 6, hidden_size=5376, intermediate_size=21504, num_attention_heads=32, num_key_value_heads=16,
    num_global_key_value_heads=4, attention_k_eq_v=True, sliding_window=1024, hidden_size_per_layer_input=0,
)  # fmt: skip
GEMMA4_26B = gemma4(
    30, 6, hidden_size=2816, intermediate_size=2112, num_attention_heads=16, num_key_value_heads=8,
    num_global_key_value_heads=2, attention_k_eq_v=True, sliding_window=1024, hidden_size_per_layer_input=0,
    enable_moe_block=True, num_experts=128, top_k_experts=8, moe_intermediate_size=704,
)  # fmt: skip
GEMMA4_E2B = gemma4(
    35, 5, hidden_size=1536, intermediate_size=6144, num_attention_heads=8, num_key_value_heads=1,
    sliding_window=512, hidden_size_per_layer_input=256, num_kv_shared_layers=20, use_double_wide_mlp=True,
)  # fmt: skip


def shape_of(config):
    return [[(s.name, s.count, len(s.layers)) for s in section.stacks] for section in config.sections]


def size(config, where=lambda param: True):
    return sum(math.prod(p.shape) * p.count for p in param_table(config) if where(p))


def test_gemma_3_repeats_five_sliding_and_one_full():
    config = GemmaConfig.from_dict(GEMMA3_1B)
    assert shape_of(config) == [[("sliding", 5, 20), ("full", 1, 4)], [("sliding_2", 2, 2)]]
    assert config.stacks[1].layers == (5, 11, 17, 23)
    assert config.stacks[2].layers == (24, 25)


def test_every_layer_is_in_one_stack():
    for raw in (GEMMA3_1B, GEMMA3_4B, GEMMA4_31B, GEMMA4_26B, GEMMA4_E2B):
        config = GemmaConfig.from_dict(raw)
        layers = sorted(i for stack in config.stacks for i in stack.layers)
        assert layers == list(range(config.num_hidden_layers))
        assert all(config.layers[i] == stack.kind for stack in config.stacks for i in stack.layers)


def test_gemma_4_full_layers_have_their_own_shapes():
    config = GemmaConfig.from_dict(GEMMA4_31B)
    assert shape_of(config) == [[("sliding", 5, 50), ("full", 1, 10)]]
    sliding, full = (stack.kind for stack in config.stacks)
    assert (sliding.head_dim, sliding.kv_heads, sliding.window, sliding.key_is_value) == (256, 16, 1024, False)
    assert (full.head_dim, full.kv_heads, full.window, full.key_is_value) == (512, 4, None, True)
    assert (full.rope.theta, full.rope.fraction, sliding.rope.theta, sliding.rope.fraction) == (1e6, 0.25, 1e4, 1.0)
    assert config.final_softcap == 30.0


def test_gemma_4_e2b_shares_keys_and_values_in_its_last_twenty_layers():
    config = GemmaConfig.from_dict(GEMMA4_E2B)
    assert shape_of(config) == [
        [("sliding", 4, 12), ("full", 1, 3)],
        [("sliding_shared", 4, 16), ("full_shared", 1, 4)],
    ]
    names = {p.name for p in param_table(config) if p.stack == "sliding_shared"}
    assert not any("k_proj" in name or "v_proj" in name or "k_norm" in name for name in names)
    widths = {p.stack: p.shape[0] for p in param_table(config) if p.name == "mlp.gate_proj"}
    assert widths == {"sliding": 6144, "full": 6144, "sliding_shared": 12288, "full_shared": 12288}


def test_the_tables_count_the_published_parameters():
    assert size(GemmaConfig.from_dict(GEMMA3_1B)) == 999_885_952  # google/gemma-3-1b-pt
    assert size(GemmaConfig.from_dict(GEMMA3_4B)) == 3_880_263_168  # text part of google/gemma-3-4b-pt
    assert round(size(GemmaConfig.from_dict(GEMMA4_31B)) / 1e9, 1) == 30.7
    assert round(size(GemmaConfig.from_dict(GEMMA4_26B)) / 1e9, 1) == 25.2


def test_transformers_4_and_5_settings_mean_the_same():
    new = {k: v for k, v in GEMMA3_1B.items() if not k.startswith("rope")} | {
        "rope_parameters": {
            FULL: {"rope_type": "default", "rope_theta": 1e6},
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        }
    }
    assert GemmaConfig.from_dict(new) == GemmaConfig.from_dict(GEMMA3_1B)
    old = GEMMA4_31B["text_config"]
    per_layer = {str(i): {"head_dim": 512, "num_key_value_heads": 4} for i in range(5, 60, 6)}
    new = {k: v for k, v in old.items() if "global" not in k} | {"per_layer_config": per_layer}
    assert GemmaConfig.from_dict(new) == GemmaConfig.from_dict(GEMMA4_31B)


def test_full_layers_of_the_sliding_ones_shape_need_no_entry_by_layer():
    raw = {k: v for k, v in GEMMA4_31B["text_config"].items() if "global" not in k} | {"per_layer_config": {}}
    kinds = {(kind.head_dim, kind.kv_heads) for kind in GemmaConfig.from_dict(raw).layers}
    assert kinds == {(raw["head_dim"], raw["num_key_value_heads"])}


def test_the_unified_type_is_a_dense_gemma_4():
    text = GEMMA4_31B["text_config"] | {"model_type": "gemma4_unified_text"}
    del text["hidden_size_per_layer_input"]  # a key that this type does not have
    unified = {"model_type": "gemma4_unified", "text_config": text}
    assert GemmaConfig.from_dict(unified) == GemmaConfig.from_dict(GEMMA4_31B)


def test_a_multimodal_config_fills_in_the_published_defaults():
    config = GemmaConfig.from_dict(GEMMA3_4B)
    assert (config.vocab_size, config.num_attention_heads) == (262_208, 8)
    sliding, full = (stack.kind for stack in config.stacks[:2])
    assert (full.rope.factor, sliding.rope.factor) == (8.0, 1.0)
    assert (sliding.kv_heads, sliding.head_dim, sliding.window) == (4, 256, 1024)


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
def test_tensors_are_found_under_every_published_prefix(prefix):
    names = [f"{prefix}embed_tokens.weight", "vision_tower.embeddings.weight"]
    assert find_prefix(names, "folder") == prefix
    q = next(p for p in param_table(GemmaConfig.from_dict(GEMMA3_1B)) if p.name == "self_attn.q_proj")
    assert q.tensor_names(prefix)[3] == f"{prefix}layers.3.self_attn.q_proj.weight"
    assert q.modules(prefix)[3] == f"{prefix}layers.3.self_attn.q_proj"


def test_an_unknown_prefix_is_refused():
    with pytest.raises(UserError, match=r"no tensor embed_tokens\.weight"):
        find_prefix(["transformer.wte.weight"], "folder")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model type 'gpt2' is not supported.*gemma3_text.*llama, mistral, qwen2, qwen3"),
        ({"hidden_activation": "relu"}, "'relu' is not implemented"),
        ({"tie_word_embeddings": False}, "untied embeddings"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 is not implemented"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "rope_type 'yarn'"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(change, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GEMMA3_1B | change))
    with pytest.raises(UnsupportedModel, match=message) as refused:
        GemmaConfig.load(tmp_path)
    assert "config.json" in str(refused.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"layer_types": [FULL] * 3}, "layer_types must name 26"),
    ],
)
def test_a_damaged_config_is_another_fault(change, message, tmp_path):
    raw = {k: v for k, v in (GEMMA3_1B | change).items() if v is not None}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UserError, match=message) as refused:
        GemmaConfig.load(tmp_path)
    assert "config.json" in str(refused.value)
    assert not isinstance(refused.value, UnsupportedModel)


def test_shared_keys_and_values_need_a_source():
    raw = dict(GEMMA4_E2B["text_config"], num_kv_shared_layers=31)
    with pytest.raises(UserError, match="full_attention layer shares keys and values that none has"):
        GemmaConfig.from_dict(raw)
