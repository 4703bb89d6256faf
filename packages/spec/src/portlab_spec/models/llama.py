"""`config.json` of Llama and of the dense decoders that differ from it in little: Mistral, Qwen 2, Qwen 3.

Their layers are computed by transformers alone. So what a file leaves out, and which layers are sliding, is as in its
`models/*/configuration_*.py` and `modeling_*.py`, version 5.23; what decides no shape, such as the activation, is not
read.
"""

from collections.abc import Mapping
from typing import Any

from portlab_spec.errors import UserError
from portlab_spec.models.config import GemmaConfig
from portlab_spec.models.layers import FULL, SLIDING, LayerKind, Rope

_QWEN = {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "sliding_window": 4096, "max_window_layers": 28}
# What a file of a family means by leaving a key out.
_DEFAULTS: dict[str, dict[str, int]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
}


def read_llama(raw: Mapping[str, Any], where: str) -> GemmaConfig:
    """Read a parsed `config.json` of one of these families.

    Args:
        raw: the file.
        where: it is, for messages.

    Raises:
        UserError: layer types that do not go with the other settings.
        KeyError: a missing key.
    """
    family = raw["model_type"]
    raw = _DEFAULTS[family] | dict(raw)
    hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
    head_dim = raw.get("head_dim") or hidden // heads
    rope = _rope(raw)

    def kind(window: int | None) -> LayerKind:
        return LayerKind(
            "full" if window is None else "sliding",
            head_dim=head_dim,
            kv_heads=raw.get("num_key_value_heads") or heads,
            mlp=raw["intermediate_size"],
            window=window,
            rope=rope,
        )

    return GemmaConfig(
        family=family,
        vocab_size=raw["vocab_size"],
        hidden_size=hidden,
        num_attention_heads=heads,
        layers=tuple(kind(window) for window in _windows(raw, where)),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        attention_scale=head_dim**-0.5,
        max_position_embeddings=raw["max_position_embeddings"],
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        biases=_biases(raw),
    )


READERS = dict.fromkeys(_DEFAULTS, read_llama)


def _windows(raw: Mapping[str, Any], where: str) -> list[int | None]:
    """Window of each layer; None for a full one."""
    family, layers = raw["model_type"], raw["num_hidden_layers"]
    if family == "llama":
        return [None] * layers
    if family == "mistral":  # transformers pays no heed to its layer_types
        return [raw["sliding_window"]] * layers
    window = raw["sliding_window"] if raw.get("use_sliding_window") else None
    first = layers if window is None else raw["max_window_layers"]
    types = list(raw.get("layer_types") or [SLIDING if i >= first else FULL for i in range(layers)])
    if len(types) != layers or not set(types) <= {SLIDING, FULL}:
        raise UserError(f"layer_types must name {layers} sliding or full layers", where=where)
    if window is None and SLIDING in types:
        raise UserError(
            "layer_types names sliding layers, which have no window",
            where=where,
            fix="Set use_sliding_window and sliding_window, or make the layers full",
        )
    return [window if kind == SLIDING else None for kind in types]


def _biases(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Linear layers that add a bias, by last name."""
    family = raw["model_type"]
    found: tuple[str, ...] = ()
    if family == "qwen2":
        return "q_proj", "k_proj", "v_proj"
    if family != "mistral" and raw.get("attention_bias"):
        found += "q_proj", "k_proj", "v_proj", "o_proj"
    if family == "llama" and raw.get("mlp_bias"):
        found += "gate_proj", "up_proj", "down_proj"
    return found


def _rope(raw: Mapping[str, Any]) -> Rope:
    """transformers 5 has `rope_parameters`; 4.x a base beside `rope_scaling`, in which "rope_type" was once "type"."""
    settings = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    theta = float(settings.get("rope_theta", raw.get("rope_theta", 1e4)))
    scaling = settings.get("rope_type", settings.get("type", "default"))
    if scaling == "linear":
        return Rope(theta, float(settings["factor"]))
    return Rope(theta, scaling=None if scaling == "default" else scaling)
