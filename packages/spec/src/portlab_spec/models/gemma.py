"""`config.json` of Gemma 3 and Gemma 4."""

from collections.abc import Mapping
from typing import Any

from portlab_spec.errors import UserError
from portlab_spec.models.config import Experts, GemmaConfig, PerLayerInputs, UnsupportedModel
from portlab_spec.models.layers import FULL, SLIDING, LayerKind, Rope

# Multimodal type -> type of its text model. The unified type (Gemma 4 12B) has no encoders; its text model is a dense
# Gemma 4 without per-layer inputs.
WRAPPERS = {"gemma3": "gemma3_text", "gemma4": "gemma4_text", "gemma4_unified": "gemma4_unified_text"}


def read_gemma3(raw: Mapping[str, Any], where: str) -> GemmaConfig:
    """Read the parsed config of a Gemma 3 text model.

    Raises:
        UnsupportedModel: a setting that is not implemented; `where` says in which file.
        UserError: layers that contradict each other.
        KeyError: a missing key.
    """
    _refuse(raw, where, "attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")
    # transformers 5 nests the RoPE settings by layer type; 4.x spreads them over three keys.
    rope = raw.get("rope_parameters") or {}
    full = rope.get(FULL) or {"rope_theta": raw.get("rope_theta", 1e6), **(raw.get("rope_scaling") or {})}
    local = rope.get(SLIDING) or {"rope_theta": raw.get("rope_local_base_freq", 1e4)}
    # Published multimodal configs leave out what equals transformers' defaults: heads, head_dim, vocabulary.
    shape = {"head_dim": raw.get("head_dim", 256), "kv_heads": raw.get("num_key_value_heads", 4)}
    kinds = {
        SLIDING: LayerKind(
            "sliding", mlp=raw["intermediate_size"], window=raw["sliding_window"], rope=_rope(local, where), **shape
        ),
        FULL: LayerKind("full", mlp=raw["intermediate_size"], window=None, rope=_rope(full, where), **shape),
    }
    return GemmaConfig(
        family="gemma3",
        vocab_size=raw.get("vocab_size", 262_208),
        hidden_size=raw["hidden_size"],
        num_attention_heads=raw.get("num_attention_heads", 8),
        layers=tuple(kinds[kind] for kind in _layer_types(raw, where)),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        attention_scale=float(raw.get("query_pre_attn_scalar", 256)) ** -0.5,
        max_position_embeddings=raw.get("max_position_embeddings", 131_072),
    )


def read_gemma4(raw: Mapping[str, Any], where: str) -> GemmaConfig:
    """Read the parsed config of a Gemma 4 text model; errors as in `read_gemma3`."""
    _refuse(raw, where, "attention_bias", "use_bidirectional_attention", allowed=("vision",))
    types = _layer_types(raw, where)
    rope = raw.get("rope_parameters") or {
        SLIDING: {"rope_theta": 1e4},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    }
    k_eq_v = bool(raw.get("attention_k_eq_v"))
    kv_heads = raw["num_key_value_heads"]
    full_shape = {
        "head_dim": raw.get("global_head_dim", 512),
        "num_key_value_heads": (raw.get("num_global_key_value_heads") or kv_heads) if k_eq_v else kv_heads,
    }
    # transformers 5 writes the full layers' shapes by layer, and nothing where they are those of the others.
    overrides = raw.get("per_layer_config") or {}
    first_shared = len(types) - raw.get("num_kv_shared_layers", 0)
    layers = []
    for i, kind in enumerate(types):
        shape = {"head_dim": raw["head_dim"], "num_key_value_heads": kv_heads}
        if kind == FULL and "per_layer_config" not in raw:
            shape |= full_shape
        shape |= overrides.get(str(i)) or overrides.get(kind) or {}
        shares = i >= first_shared
        layers.append(
            LayerKind(
                "full" if kind == FULL else "sliding",
                head_dim=shape["head_dim"],
                kv_heads=shape["num_key_value_heads"],
                mlp=raw["intermediate_size"] * (2 if shares and raw.get("use_double_wide_mlp") else 1),
                window=None if kind == FULL else raw["sliding_window"],
                rope=_rope(rope[kind], where),
                key_is_value=k_eq_v and kind == FULL and not shares,
                shares_kv=shares,
            )
        )
    if missing := set(types) - set(types[:first_shared]):
        raise UserError(f"every {' and '.join(missing)} layer shares keys and values that none has", where=where)
    per_layer = raw.get("hidden_size_per_layer_input", 0 if raw["model_type"] == "gemma4_unified_text" else 256)
    vocab = raw.get("vocab_size", 262_144)
    return GemmaConfig(
        family="gemma4",
        vocab_size=vocab,
        hidden_size=raw["hidden_size"],
        num_attention_heads=raw["num_attention_heads"],
        layers=tuple(layers),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        attention_scale=1.0,
        max_position_embeddings=raw.get("max_position_embeddings", 131_072),
        final_softcap=raw.get("final_logit_softcapping"),
        per_layer=PerLayerInputs(per_layer, raw.get("vocab_size_per_layer_input", vocab)) if per_layer else None,
        experts=Experts(raw["num_experts"], raw["top_k_experts"], raw["moe_intermediate_size"])
        if raw.get("enable_moe_block")
        else None,
    )


READERS = {"gemma3_text": read_gemma3, "gemma4_text": read_gemma4, "gemma4_unified_text": read_gemma4}


def _layer_types(raw: Mapping[str, Any], where: str) -> list[str]:
    activation = raw.get("hidden_activation", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        raise UnsupportedModel(f"hidden_activation {activation!r} is not implemented", where=where)
    if not raw.get("tie_word_embeddings", True):
        raise UnsupportedModel("untied embeddings are not implemented", where=where)
    layers = raw["num_hidden_layers"]
    pattern = raw.get("sliding_window_pattern", raw.get("_sliding_window_pattern", 6))
    types = list(raw.get("layer_types") or [FULL if (i + 1) % pattern == 0 else SLIDING for i in range(layers)])
    if len(types) != layers or not set(types) <= {SLIDING, FULL}:
        raise UserError(f"layer_types must name {layers} sliding or full layers", where=where)
    return types


def _refuse(raw: Mapping[str, Any], where: str, *keys: str, allowed: tuple[Any, ...] = ()) -> None:
    for key in keys:
        if raw.get(key) and raw[key] not in allowed:
            raise UnsupportedModel(f"{key}={raw[key]!r} is not implemented for {raw['model_type']}", where=where)


def _rope(settings: Mapping[str, Any], where: str) -> Rope:
    kind = settings.get("rope_type", "default")
    if kind not in ("default", "linear", "proportional"):
        raise UnsupportedModel(f"rope_type {kind!r} is not implemented", where=where)
    fraction = float(settings.get("partial_rotary_factor", 1.0)) if kind == "proportional" else 1.0
    return Rope(float(settings["rope_theta"]), float(settings.get("factor", 1.0)), fraction)
