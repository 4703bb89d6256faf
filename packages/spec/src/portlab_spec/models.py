"""What a Gemma model is: its configuration and one table of its parameters.

Everything is read from the Hugging Face `config.json`; nothing is preset by hand. The parameter table is the only
place that knows a tensor's name: loading, LoRA targets, PEFT names and sharding all read it.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portlab_spec.errors import UserError
from portlab_spec.files import read_json

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class GemmaConfig:
    """A Gemma 3 text model. Field names follow `config.json`.

    `layer_types[i]` is "sliding_attention" or "full_attention". `rope_theta` and `rope_scaling_factor` belong to
    full layers, `rope_local_theta` to sliding ones.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    layer_types: tuple[str, ...]
    sliding_window: int
    rope_theta: float
    rope_local_theta: float
    rope_scaling_factor: float
    rms_norm_eps: float
    query_pre_attn_scalar: float
    max_position_embeddings: int

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
        """Read a parsed `config.json`, of transformers 4 or 5 style.

        Raises:
            UserError: an unknown architecture, a missing key or a setting that is not implemented.
        """
        kind = raw.get("model_type")
        if kind != "gemma3_text":
            raise UserError(
                f"the model type {kind!r} is not supported",
                where=where,
                fix="Use a Gemma 3 text model (model_type gemma3_text: 270M, 1B, FunctionGemma)",
            )
        try:
            return _read(raw, where)
        except KeyError as missing:
            raise UserError(
                f"the key {missing} is missing", where=where, fix="Restore the model's config.json"
            ) from None


def _read(raw: Mapping[str, Any], where: str) -> GemmaConfig:
    layers = raw["num_hidden_layers"]
    pattern = raw.get("sliding_window_pattern", raw.get("_sliding_window_pattern", 6))
    layer_types = raw.get("layer_types") or [FULL if (i + 1) % pattern == 0 else SLIDING for i in range(layers)]
    if len(layer_types) != layers or not set(layer_types) <= {SLIDING, FULL}:
        raise UserError(f"layer_types must name {layers} sliding or full layers", where=where)
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if raw.get(key):
            raise UserError(f"{key}={raw[key]!r} is not implemented for Gemma 3", where=where)
    activation = raw.get("hidden_activation", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        raise UserError(f"hidden_activation {activation!r} is not implemented", where=where)
    if not raw.get("tie_word_embeddings", True):
        raise UserError("untied embeddings are not implemented for Gemma 3", where=where)
    # transformers 5 nests the RoPE settings by layer type; 4.x spreads them over three keys.
    rope = raw.get("rope_parameters") or {}
    full = rope.get(FULL) or {"rope_theta": raw.get("rope_theta", 1e6), **(raw.get("rope_scaling") or {})}
    local = rope.get(SLIDING) or {"rope_theta": raw.get("rope_local_base_freq", 1e4)}
    if full.get("rope_type", "default") not in ("default", "linear"):
        raise UserError(f"rope_type {full['rope_type']!r} is not implemented", where=where)
    return GemmaConfig(
        family="gemma3",
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_hidden_layers=layers,
        num_attention_heads=raw["num_attention_heads"],
        num_key_value_heads=raw["num_key_value_heads"],
        head_dim=raw["head_dim"],
        layer_types=tuple(layer_types),
        sliding_window=raw["sliding_window"],
        rope_theta=float(full["rope_theta"]),
        rope_local_theta=float(local["rope_theta"]),
        rope_scaling_factor=float(full.get("factor", 1.0)),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        query_pre_attn_scalar=float(raw["query_pre_attn_scalar"]),
        max_position_embeddings=raw["max_position_embeddings"],
    )


def config_sha256(folder: Path) -> str:
    """Digest of the bytes of a model's `config.json`: identifies the architecture in a checkpoint."""
    return hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()


@dataclass(frozen=True)
class Param:
    """One parameter, or one per layer.

    Attributes:
        name: our name; per-layer ones are stacked over layers on axis 0.
        hf: Hugging Face tensor name; `{i}` stands for the layer.
        shape: shape of one tensor in Hugging Face orientation, (out, in) for a matrix. We keep that orientation.
        axes: logical axis of each dimension, for sharding rules.
        target: True for a linear layer that LoRA can adapt.
    """

    name: str
    hf: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    target: bool = False

    @property
    def per_layer(self) -> bool:
        return "{i}" in self.hf

    def module(self, layer: int) -> str:
        """Dotted module path in transformers: the tensor name without `.weight`."""
        return self.hf.format(i=layer).removesuffix(".weight")


def param_table(config: GemmaConfig) -> tuple[Param, ...]:
    """Every parameter of a Gemma 3 text model, in the order of the forward pass."""
    d, ff = config.hidden_size, config.intermediate_size
    q, kv = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))

    def norm(name: str, size: int) -> Param:
        return Param(name, f"model.layers.{{i}}.{name}.weight", (size,), (None,))

    def linear(name: str, out: int, into: int, axes: tuple[str, str]) -> Param:
        return Param(name, f"model.layers.{{i}}.{name}.weight", (out, into), axes, target=True)

    return (
        Param("embed_tokens", "model.embed_tokens.weight", (config.vocab_size, d), ("vocab", "embed")),
        norm("input_layernorm", d),
        linear("self_attn.q_proj", q, d, ("heads", "embed")),
        linear("self_attn.k_proj", kv, d, ("kv_heads", "embed")),
        linear("self_attn.v_proj", kv, d, ("kv_heads", "embed")),
        norm("self_attn.q_norm", config.head_dim),
        norm("self_attn.k_norm", config.head_dim),
        linear("self_attn.o_proj", d, q, ("embed", "heads")),
        norm("post_attention_layernorm", d),
        norm("pre_feedforward_layernorm", d),
        linear("mlp.gate_proj", ff, d, ("mlp", "embed")),
        linear("mlp.up_proj", ff, d, ("mlp", "embed")),
        linear("mlp.down_proj", d, ff, ("embed", "mlp")),
        norm("post_feedforward_layernorm", d),
        Param("norm", "model.norm.weight", (d,), (None,)),
    )


def match_targets(table: tuple[Param, ...], targets: tuple[str, ...]) -> tuple[Param, ...]:
    """The linear layers that LoRA targets name, in table order.

    A target is a module's last name (`q_proj`), as in PEFT, or its dotted name (`self_attn.q_proj`).

    Raises:
        UserError: a target matches nothing; the message lists what exists.
    """
    linears = [p for p in table if p.target]
    matched: set[str] = set()
    for target in targets:
        hits = [p.name for p in linears if p.name == target or p.name.endswith(f".{target}")]
        if not hits:
            known = ", ".join(p.name.rpartition(".")[2] for p in linears)
            raise UserError(
                f"the LoRA target {target!r} matches no linear layer",
                where="lora.targets",
                fix=f"Known: {known}",
            )
        matched.update(hits)
    return tuple(p for p in linears if p.name in matched)
