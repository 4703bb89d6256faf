"""LoRA targets: names, paths, regular expressions, rank and alpha patterns; what matches nothing is an error."""

from types import SimpleNamespace

import pytest

from portlab_spec.errors import UserError
from portlab_spec.models import FULL, SLIDING, GemmaConfig, plan_adapter
from portlab_spec.models.targets import describe

SMALL = {
    "model_type": "gemma4_text",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "sliding_window": 6,
    "layer_types": [SLIDING, SLIDING, FULL] * 2,
    "hidden_size_per_layer_input": 0,
}
K_IS_V = GemmaConfig.from_dict(SMALL | {"attention_k_eq_v": True})
MOE = GemmaConfig.from_dict(
    SMALL | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
)
SHARED = GemmaConfig.from_dict(SMALL | {"num_kv_shared_layers": 3})


def plan(config, *targets, rank=8, alpha=16.0, use_rslora=False, rank_pattern=None, alpha_pattern=None):
    return plan_adapter(
        config,
        SimpleNamespace(
            rank=rank,
            alpha=alpha,
            use_rslora=use_rslora,
            targets=targets,
            rank_pattern=rank_pattern or {},
            alpha_pattern=alpha_pattern or {},
        ),
    )


def keys(leaves):
    return [leaf.key for leaf in leaves]


def test_a_last_name_matches_every_layer_that_has_it():
    leaves = plan(K_IS_V, "q_proj")
    assert keys(leaves) == ["sliding.self_attn.q_proj", "full.self_attn.q_proj"]
    assert all(leaf.whole for leaf in leaves)
    assert leaves[1].modules("model.") == ["model.layers.2.self_attn.q_proj", "model.layers.5.self_attn.q_proj"]


def test_layers_without_the_module_are_left_out():
    assert keys(plan(K_IS_V, "v_proj")) == ["sliding.self_attn.v_proj"]
    assert keys(plan(SHARED, "k_proj")) == ["sliding.self_attn.k_proj", "full.self_attn.k_proj"]
    assert describe(plan(K_IS_V, "q_proj", "v_proj")) == "6 self_attn.q_proj, 4 self_attn.v_proj"


@pytest.mark.parametrize("target", ["self_attn.q_proj", "layers.3.self_attn.q_proj", "model.layers.3.self_attn.q_proj"])
def test_the_end_of_a_path_matches(target):
    leaves = plan(K_IS_V, target)
    adapted = {leaf.param.layers[i] for leaf in leaves for i in leaf.index}
    assert adapted == ({3} if "3" in target else set(range(6)))


def test_a_regular_expression_matches_whole_paths_and_may_pick_layers():
    (leaf,) = plan(K_IS_V, r".*layers\.(1|4)\.self_attn\.o_proj")
    assert leaf.index == (1, 3)
    assert not leaf.whole
    assert leaf.modules("model.language_model.")[0] == "model.language_model.layers.1.self_attn.o_proj"


def test_experts_must_be_named():
    assert not any("experts" in key for key in keys(plan(MOE, "down_proj", "gate_proj")))
    (sliding, full) = plan(MOE, "experts.down_proj")
    assert (sliding.key, sliding.experts[0].size, sliding.into.size, sliding.out.size) == (
        "sliding.experts.down_proj", 4, 16, 32,
    )  # fmt: skip
    assert full.modules("model.")[0] == "model.layers.2.experts.down_proj"


def test_rank_and_alpha_patterns_split_a_leaf():
    leaves = plan(
        K_IS_V, "q_proj", rank_pattern={r"layers\.0\.self_attn\.q_proj": 2}, alpha_pattern={"o_proj|q_proj": 4.0}
    )
    assert [(leaf.key, leaf.index, leaf.rank, leaf.scaling) for leaf in leaves] == [
        ("sliding.self_attn.q_proj@0", (0,), 2, 2.0),
        ("sliding.self_attn.q_proj@1", (1, 2, 3), 8, 0.5),
        ("full.self_attn.q_proj", (0, 1), 8, 0.5),
    ]


def test_rslora_divides_by_the_root_of_the_rank():
    assert plan(K_IS_V, "q_proj", rank=16, alpha=8.0, use_rslora=True)[0].scaling == 2.0


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("qproj",), "'qproj' matches no linear layer.*q_proj, k_proj"),
        (("q_proj", "v_prj"), "'v_prj' matches no linear layer"),
        (("input_layernorm",), "matches only input_layernorm, which is not a linear layer"),
        (("embed_tokens",), "matches only embed_tokens"),
        (("q_proj(",), "is not a regular expression"),
        ((".*vision_tower.*q_proj",), "matches no linear layer"),
    ],
)
def test_a_target_without_a_match_lists_what_exists(targets, message):
    with pytest.raises(UserError, match=message):
        plan(K_IS_V, *targets)


@pytest.mark.parametrize("name", ["rank_pattern", "alpha_pattern"])
def test_a_pattern_without_a_match_is_an_error(name):
    with pytest.raises(UserError, match=rf"lora.{name}: the pattern 'o_proj' matches no adapted layer.*q_proj"):
        plan(K_IS_V, "q_proj", **{name: {"o_proj": 4}})
