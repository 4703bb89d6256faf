"""What a decoder is, read from the Hugging Face `config.json`; nothing is preset by hand."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from portlab_spec.errors import UserError
from portlab_spec.files import read_json
from portlab_spec.models.layers import LayerKind, Section, Stack, find_sections

Family = Literal["gemma3", "gemma4", "llama", "mistral", "qwen2", "qwen3"]


class UnsupportedModel(UserError):
    """A model that is not computed here; other software may run it."""


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
    """A text model: of Gemma, which the JAX stack computes itself, or of a family that transformers computes.

    Attributes:
        family: whose layers these are.
        vocab_size, hidden_size, num_attention_heads, rms_norm_eps, max_position_embeddings: as in `config.json`.
        layers: the kind of each layer.
        attention_scale: factor on attention scores.
        final_softcap: logits become cap * tanh(logits / cap); None for no cap.
        per_layer: per-layer inputs, or None.
        experts: mixture of experts in every layer, or None.
        tie_word_embeddings: the embedding is the output matrix too; otherwise `lm_head` is one of its own.
        biases: linear layers that add a bias, by last name.
    """

    family: Family
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
    tie_word_embeddings: bool = True
    biases: tuple[str, ...] = ()

    @property
    def is_gemma(self) -> bool:
        """Is it a Gemma, or of a family that is known by its tensors alone?"""
        return self.family in ("gemma3", "gemma4")

    @property
    def norm_offset(self) -> float:
        """RMS norms multiply by offset + weight: 1 in Gemma 3, 0 in the others."""
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
            UserError: no such file, or not JSON; else as `from_dict`.
        """
        path = folder / "config.json"
        return GemmaConfig.from_dict(read_json(path, "model config"), where=str(path))

    @staticmethod
    def from_dict(raw: Mapping[str, Any], *, where: str = "config.json") -> "GemmaConfig":
        """Read a parsed `config.json` of a text model or of a multimodal one, of transformers 4 or 5 style.

        Raises:
            UnsupportedModel: an unknown architecture, or a setting that is not implemented.
            UserError: a missing key.
        """
        from portlab_spec.models import gemma, llama  # which make configs

        readers, wrappers = gemma.READERS | llama.READERS, gemma.WRAPPERS
        kind = raw.get("model_type")
        text = raw.get("text_config") if kind in wrappers else raw
        read = readers.get(wrappers.get(str(kind), str(kind)))
        if read is None or not isinstance(text, Mapping):
            raise UnsupportedModel(
                f"the model type {kind!r} is not supported",
                where=where,
                fix=f"Use a model of a known type ({', '.join([*readers, *wrappers])})",
            )
        try:
            return read(text, where)
        except KeyError as missing:
            raise UserError(
                f"the key {missing} is missing", where=where, fix="Restore the model's config.json"
            ) from None


def config_sha256(folder: Path) -> str:
    """Digest of the bytes of a model's `config.json`: identifies the architecture in a checkpoint."""
    return hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
