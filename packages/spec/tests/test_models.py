"""Gemma 3 configurations of both generations of transformers, and the parameter table."""

import json

import pytest

from portlab_spec.errors import UserError
from portlab_spec.models import FULL, SLIDING, GemmaConfig, match_targets, param_table

RAW = {
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
}  # Gemma 3 1B as published, transformers 4 style


def test_every_sixth_layer_is_full():
    config = GemmaConfig.from_dict(RAW)
    assert config.layer_types[:6] == (SLIDING,) * 5 + (FULL,)
    assert len(config.layer_types) == 26
    assert config.layer_types.count(FULL) == 4


def test_old_and_new_rope_settings_mean_the_same():
    new = {k: v for k, v in RAW.items() if not k.startswith("rope")} | {
        "rope_parameters": {
            FULL: {"rope_type": "default", "rope_theta": 1e6},
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        }
    }
    assert GemmaConfig.from_dict(new) == GemmaConfig.from_dict(RAW)


def test_linear_scaling_belongs_to_full_layers():
    scaled = RAW | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert GemmaConfig.from_dict(scaled).rope_scaling_factor == 8.0


def test_the_table_counts_gemma_3_1b():
    config = GemmaConfig.from_dict(RAW)
    total = 0
    for param in param_table(config):
        size = 1
        for n in param.shape:
            size *= n
        total += size * (config.num_hidden_layers if param.per_layer else 1)
        assert len(param.axes) == len(param.shape)
    assert total == 999_885_952  # parameters of google/gemma-3-1b-pt


def test_modules_have_their_names_in_transformers():
    q = match_targets(param_table(GemmaConfig.from_dict(RAW)), ("q_proj",))[0]
    assert q.module(3) == "model.layers.3.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model type 'llama' is not supported"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"layer_types": [FULL] * 3}, "layer_types must name 26"),
        ({"hidden_activation": "relu"}, "'relu' is not implemented"),
        ({"tie_word_embeddings": False}, "untied embeddings"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 is not implemented"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "rope_type 'yarn'"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(change, message, tmp_path):
    raw = {k: v for k, v in (RAW | change).items() if v is not None}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UserError, match=message) as refused:
        GemmaConfig.load(tmp_path)
    assert "config.json" in str(refused.value)
