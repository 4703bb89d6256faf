"""What a Gemma model is, read from the Hugging Face `config.json`; nothing is preset by hand."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from portlab_spec.errors import UserError
from portlab_spec.files import read_json
from portlab_spec.models.layers import FULL, SLIDING, LayerKind, Rope, Section, Stack, find_sections


@dataclass(frozen=True)
class PerLayerInputs:
    """Gemma 4 E-series: a small embedding of every token for every layer.

    Attributes:
        size: its width.
        vocab_size: rows of its table.
    """

    size: int
    vocab_size: int


@dataclass(frozen=True)
class Experts:
    """Gemma 4 A-series: a mixture of experts beside the dense MLP.

    Attributes:
        count: experts in a layer.
        top_k: experts that a token goes through.
        width: hidden width of one.
    """

    count: int
    top_k: int
    width: int


@dataclass(frozen=True)
class GemmaConfig:
    """A Gemma text model.

    Attributes:
        family: "gemma3" or "gemma4".
        vocab_size, hidden_size, num_attention_heads, rms_norm_eps, max_position_embeddings: as in `config.json`.
        layers: the kind of each layer.
        attention_scale: factor on attention scores.
        final_softcap: logits become cap * tanh(logits / cap); None for no cap.
        per_layer: per-layer inputs, or None.
        experts: mixture of experts in every layer, or None.
    """

    family: Literal["gemma3", "gemma4"]
    vocab_size: int
    hidden_size: int
    num_attention_heads: int
    layers: tuple[LayerKind, ...]
    rms_norm_eps: float
    attention_scale: float
    max_position_embeddings: int
    final_softcap: float | None = None
    per_layer: PerLayerInputs | None = None
    experts: Experts | None = None

    @property
    def norm_offset(self) -> float:
        """RMS norms multiply by offset + weight: 1 in Gemma 3, 0 in Gemma 4."""
        return 1.0 if self.family == "gemma3" else 0.0

    @property
    def num_hidden_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def window(self) -> int | None:
        """Window of the sliding layers; None if there are none."""
        return next((kind.window for kind in self.layers if kind.window), None)

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """The layers as repeating patterns of stacks, first to last."""
        return find_sections(self.layers)

    @cached_property
    def stacks(self) -> tuple[Stack, ...]:
        """All stacks, in the order of their first layer."""
        return tuple(stack for section in self.sections for stack in section.stacks)

    @staticmethod
    def load(folder: Path) -> "GemmaConfig":
        """Read `config.json` of a model folder.

        Raises:
            UserError: no such file, not JSON, or a model that this version does not know.
        """
        path = folder / "config.json"
        return GemmaConfig.from_dict(read_json(path, "model config"), where=str(path))

    @staticmethod
    def from_dict(raw: Mapping[str, Any], *, where: str = "config.json") -> "GemmaConfig":
        """Read a parsed `config.json` of a text model or of a multimodal one, of transformers 4 or 5 style.

        Raises:
            UserError: an unknown architecture, a missing key or a setting that is not implemented.
        """
        kind = raw.get("model_type")
        text = raw.get("text_config") if kind in _WRAPPERS else raw
        read = _READERS.get(_WRAPPERS.get(str(kind), str(kind)))
        if read is None or not isinstance(text, Mapping):
            raise UserError(
                f"the model type {kind!r} is not supported",
                where=where,
                fix=f"Use a Gemma 3 or Gemma 4 model ({', '.join([*_READERS, *_WRAPPERS])})",
            )
        try:
            return read(text, where)
        except KeyError as missing:
            raise UserError(
                f"the key {missing} is missing", where=where, fix="Restore the model's config.json"
            ) from None


# Multimodal type -> type of its text model. The unified type (Gemma 4 12B) has no encoders; its text model is a dense
# Gemma 4 without per-layer inputs.
_WRAPPERS = {"gemma3": "gemma3_text", "gemma4": "gemma4_text", "gemma4_unified": "gemma4_unified_text"}


def _read_gemma3(raw: Mapping[str, Any], where: str) -> GemmaConfig:
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


def _read_gemma4(raw: Mapping[str, Any], where: str) -> GemmaConfig:
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


_READERS = {"gemma3_text": _read_gemma3, "gemma4_text": _read_gemma4, "gemma4_unified_text": _read_gemma4}


def _layer_types(raw: Mapping[str, Any], where: str) -> list[str]:
    activation = raw.get("hidden_activation", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        raise UserError(f"hidden_activation {activation!r} is not implemented", where=where)
    if not raw.get("tie_word_embeddings", True):
        raise UserError("untied embeddings are not implemented", where=where)
    layers = raw["num_hidden_layers"]
    pattern = raw.get("sliding_window_pattern", raw.get("_sliding_window_pattern", 6))
    types = list(raw.get("layer_types") or [FULL if (i + 1) % pattern == 0 else SLIDING for i in range(layers)])
    if len(types) != layers or not set(types) <= {SLIDING, FULL}:
        raise UserError(f"layer_types must name {layers} sliding or full layers", where=where)
    return types


def _refuse(raw: Mapping[str, Any], where: str, *keys: str, allowed: tuple[Any, ...] = ()) -> None:
    for key in keys:
        if raw.get(key) and raw[key] not in allowed:
            raise UserError(f"{key}={raw[key]!r} is not implemented for {raw['model_type']}", where=where)


def _rope(settings: Mapping[str, Any], where: str) -> Rope:
    kind = settings.get("rope_type", "default")
    if kind not in ("default", "linear", "proportional"):
        raise UserError(f"rope_type {kind!r} is not implemented", where=where)
    fraction = float(settings.get("partial_rotary_factor", 1.0)) if kind == "proportional" else 1.0
    return Rope(float(settings["rope_theta"]), float(settings.get("factor", 1.0)), fraction)


def config_sha256(folder: Path) -> str:
    """Digest of the bytes of a model's `config.json`: identifies the architecture in a checkpoint."""
    return hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
