"""One table of a model's parameters: names, shapes, axes and how random ones are drawn.

Loading, LoRA targets, PEFT names, sharding, FLOP and memory counts all read it. Matrices keep the orientation of
Hugging Face, (out, in), so that nothing is transposed on the way in or out.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from portlab_spec.errors import UserError
from portlab_spec.models.config import GemmaConfig
from portlab_spec.models.layers import LayerKind

# What the names of a text model start with: alone, inside a multimodal model, and there as Gemma 3 was first published.
PREFIXES = ("model.", "model.language_model.", "language_model.model.")


@dataclass(frozen=True)
class Dim:
    """One dimension of a tensor.

    Attributes:
        size: its length.
        axis: logical axis for sharding rules; None is never sharded.
        units: parts that a mesh must not cut, such as heads; sharding needs a divisor of it.
    """

    size: int
    axis: str | None = None
    units: int = 0

    @property
    def parts(self) -> int:
        """How many ways the dimension can be cut at most."""
        return self.units or self.size


@dataclass(frozen=True)
class Param:
    """One parameter of the model, or one of each layer of a stack.

    Attributes:
        name: our name; within a stack, tensors of its layers are stacked on axis 0.
        hf: Hugging Face tensor name behind the text model's prefix; `{i}` stands for the layer.
        outside: the tensor belongs to what is built around the text model, and its name has no prefix.
        dims: of one tensor in Hugging Face orientation.
        stack: name of the stack, "" outside the layers.
        layers: the stack's layers.
        target: a linear layer that LoRA can adapt.
        init: how random weights are drawn.
        buffer: a fixed number of the architecture, which no method trains.
    """

    name: str
    hf: str
    dims: tuple[Dim, ...]
    stack: str = ""
    layers: tuple[int, ...] = ()
    target: bool = False
    init: Literal["normal", "norm", "one"] = "normal"
    buffer: bool = False
    outside: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one tensor."""
        return tuple(dim.size for dim in self.dims)

    @property
    def key(self) -> str:
        """Unique name: `stack.name` within a stack."""
        return f"{self.stack}.{self.name}" if self.stack else self.name

    @property
    def count(self) -> int:
        """How many tensors the entry stands for."""
        return len(self.layers) if self.stack else 1

    def tensor_names(self, prefix: str) -> list[str]:
        """Names of its tensors in a safetensors file, in stacking order."""
        if self.outside:
            return [self.hf]
        return [prefix + self.hf.format(i=i) for i in self.layers] if self.stack else [prefix + self.hf]

    def modules(self, prefix: str) -> list[str]:
        """Dotted module paths in transformers: tensor names without `.weight`."""
        return [name.removesuffix(".weight") for name in self.tensor_names(prefix)]


@lru_cache
def param_table(config: GemmaConfig) -> tuple[Param, ...]:
    """Every parameter of a text model, in the order of the forward pass."""
    d = config.hidden_size
    table = [Param("embed_tokens", "embed_tokens.weight", (Dim(config.vocab_size, "vocab"), Dim(d, "embed")))]
    if config.per_layer:
        packed = config.num_hidden_layers * config.per_layer.size
        table += [
            Param(
                "embed_tokens_per_layer",
                "embed_tokens_per_layer.weight",
                (Dim(config.per_layer.vocab_size, "vocab"), Dim(packed, "embed")),
            ),
            Param("per_layer_model_projection", "per_layer_model_projection.weight", (Dim(packed), Dim(d, "embed"))),
            _norm("per_layer_projection_norm", config.per_layer.size),
        ]
    for stack in config.stacks:
        for entry in _layer(config, stack.kind):
            hf = f"layers.{{i}}.{entry.hf}"
            table.append(replace(entry, hf=hf, stack=stack.name, layers=stack.layers))
    table.append(_norm("norm", d))
    if not config.tie_word_embeddings:
        head = (Dim(config.vocab_size, "vocab"), Dim(d, "embed"))
        table.append(Param("lm_head", "lm_head.weight", head, outside=True))
    return tuple(table)


def _norm(name: str, size: int) -> Param:
    return Param(name, f"{name}.weight", (Dim(size),), init="norm")


def _layer(config: GemmaConfig, kind: LayerKind) -> Iterable[Param]:
    """The tensors of a layer, named within it."""
    gemma, d = config.is_gemma, config.hidden_size
    qk_norms = gemma or config.family == "qwen3"
    embed, ff = Dim(d, "embed"), Dim(kind.mlp, "mlp")
    heads = Dim(config.num_attention_heads * kind.head_dim, "heads", config.num_attention_heads)
    kv = Dim(kind.kv_heads * kind.head_dim, "kv_heads", kind.kv_heads)

    def norm(name: str, size: int = d) -> Param:
        return _norm(name, size)

    def linear(name: str, out: Dim, into: Dim, *, target: bool = True) -> Iterable[Param]:
        yield Param(name, f"{name}.weight", (out, into), target=target)
        if name.rpartition(".")[2] in config.biases:
            yield Param(f"{name}.bias", f"{name}.bias", (out,))

    def factor(name: str, size: int) -> Param:
        return Param(name, name, (Dim(size),), init="one")

    yield norm("input_layernorm")
    yield from linear("self_attn.q_proj", heads, embed)
    if qk_norms:
        yield norm("self_attn.q_norm", kind.head_dim)
    if not kind.shares_kv:
        yield from linear("self_attn.k_proj", kv, embed)
        if qk_norms:
            yield norm("self_attn.k_norm", kind.head_dim)
        if not kind.key_is_value:
            yield from linear("self_attn.v_proj", kv, embed)
    yield from linear("self_attn.o_proj", embed, heads)
    yield norm("post_attention_layernorm")
    if gemma:
        yield norm("pre_feedforward_layernorm")
    yield from linear("mlp.gate_proj", ff, embed)
    yield from linear("mlp.up_proj", ff, embed)
    yield from linear("mlp.down_proj", embed, ff)
    if config.experts:
        e = Dim(config.experts.count, "experts")
        yield norm("post_feedforward_layernorm_1")
        yield from linear("router.proj", Dim(config.experts.count), embed, target=False)
        yield factor("router.scale", d)
        yield factor("router.per_expert_scale", config.experts.count)
        yield norm("pre_feedforward_layernorm_2")
        gate_up = (e, Dim(2 * config.experts.width), embed)
        yield Param("experts.gate_up_proj", "experts.gate_up_proj", gate_up, target=True)
        down = (e, embed, Dim(config.experts.width))
        yield Param("experts.down_proj", "experts.down_proj", down, target=True)
        yield norm("post_feedforward_layernorm_2")
    if gemma:
        yield norm("post_feedforward_layernorm")
    if config.per_layer:
        p = Dim(config.per_layer.size)
        yield from linear("per_layer_input_gate", p, embed)
        yield from linear("per_layer_projection", embed, p)
        yield norm("post_per_layer_input_norm")
    if config.family == "gemma4":
        yield replace(factor("layer_scalar", 1), buffer=True)


def find_prefix(names: Iterable[str], where: str) -> str:
    """The prefix of the text model's tensor names, by the one embedding table that there must be.

    Raises:
        UserError: none of the known prefixes is there.
    """
    present = set(names)
    for prefix in PREFIXES:
        if f"{prefix}embed_tokens.weight" in present:
            return prefix
    raise UserError(
        "no tensor embed_tokens.weight of a text model",
        where=where,
        fix=f"Its name should start with one of {', '.join(PREFIXES)}",
    )
