"""Parts of a Gemma layer in numpy and float64, from the base's weights: what a backend should have computed of values
that both agree on, and what it would have computed with a known mistake.

Shape letters: P probed tokens, T all tokens of a row, D width, H query heads, K key heads, d head size.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from portlab_spec.errors import UserError
from portlab_spec.models import PREFIXES, GemmaConfig, Rope
from portlab_spec.models.table import find_prefix
from portlab_spec.models.targets import pattern_value, scaling
from portlab_spec.recipe import Lora
from portlab_spec.safetensors_file import open_tensors

Array = np.ndarray


@dataclass(frozen=True)
class Settings:
    """What backends get wrong in a layer, with the recipe's values as they should be.

    Attributes:
        norm_offset: RMS norms multiply by offset + weight.
        lora_scale: factor on the adapter's product; None for each layer's own.
    """

    norm_offset: float
    lora_scale: float | None = None


@dataclass(frozen=True)
class Attention:
    """What backends get wrong in attention.

    Attributes:
        scale: of the scores.
        window: tokens that a token sees, itself included; None for all before it.
        causal: whether tokens behind a token are hidden from it.
        rope: of queries and keys; None for none.
    """

    scale: float
    window: int | None
    causal: bool
    rope: Rope | None


class Layers:
    """The layers of a base with an adapter in it.

    Args:
        folder: of the base.
        adapter: tensors under the names of the evidence.
        lora: the recipe's section.
    """

    def __init__(self, folder: Path, adapter: Mapping[str, Array], lora: Lora) -> None:
        self.config = GemmaConfig.load(folder)
        self._folder, self._adapter, self._lora = folder, adapter, lora

    @cached_property
    def _tensors(self) -> Mapping[str, object]:
        return open_tensors(self._folder)

    @cached_property
    def _prefix(self) -> str:
        return find_prefix(self._tensors, str(self._folder))

    def settings(self) -> Settings:
        """As the model is meant."""
        return Settings(self.config.norm_offset)

    def attention(self, number: int) -> Attention:
        """As a layer is meant."""
        kind = self.config.layers[number]
        return Attention(self.config.attention_scale, kind.window, True, kind.rope)

    def weight(self, name: str) -> Array:
        """A tensor of the base, float64."""
        found = self._tensors[self._prefix + name]
        return np.asarray(found.numpy(), np.float64)  # type: ignore[attr-defined]

    def embeddings(self, ids: Array) -> Array:
        """Rows of the base's embedding, before scaling: (n, D), float64."""
        found = self._tensors[f"{self._prefix}embed_tokens.weight"]
        return np.asarray(found.numpy()[ids], np.float64)  # type: ignore[attr-defined]

    def scale_of(self, module: str) -> float:
        """Factor on the adapter's product in a module, as the recipe means it."""
        lora, path = self._lora, PREFIXES[0] + module
        rank = pattern_value(lora.rank_pattern, path, lora.rank)
        return scaling(pattern_value(lora.alpha_pattern, path, lora.alpha), rank, lora.use_rslora)

    def adapted(self, module: str) -> bool:
        """Does the adapter change this module?"""
        return f"{module}.lora_A.weight" in self._adapter

    def linear(self, module: str, x: Array, settings: Settings) -> Array:
        """x (P, in) through a layer and its adapter."""
        y = x @ self.weight(f"{module}.weight").T
        if self.adapted(module):
            a, b = (self._adapter[f"{module}.lora_{half}.weight"].astype(np.float64) for half in "AB")
            factor = self.scale_of(module) if settings.lora_scale is None else settings.lora_scale
            y = y + factor * (x @ a.T) @ b.T
        return y

    def norm(self, x: Array, name: str | None, settings: Settings) -> Array:
        """RMS norm over the last axis."""
        normed = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + self.config.rms_norm_eps)
        return normed if name is None else normed * (settings.norm_offset + self.weight(f"{name}.weight"))

    def inner(self, number: int, x: Array, part: str, settings: Settings) -> Array:
        """`query`, `key` or `value` (P, heads, d) of a layer before RoPE, from its input x (P, D)."""
        kind, layer = self.config.layers[number], f"layers.{number}"
        h = self.norm(x.astype(np.float64), f"{layer}.input_layernorm", settings)
        module = "k" if part == "value" and kind.key_is_value else part[0]
        heads = self.linear(f"{layer}.self_attn.{module}_proj", h, settings).reshape(len(x), -1, kind.head_dim)
        if part == "value":
            return self.norm(heads, None, settings) if self.config.family == "gemma4" else heads
        return self.norm(heads, f"{layer}.self_attn.{part[0]}_norm", settings)

    def output(self, number: int, x: Array, attended: Array, settings: Settings) -> Array:
        """A layer's output (P, D) from its input and what attention gives.

        Raises:
            UserError: the layer has experts or per-layer inputs, which are not written here.
        """
        config, layer = self.config, f"layers.{number}"
        if config.experts or config.per_layer:
            raise UserError("layers with experts or per-layer inputs are not recomputed")
        x = x.astype(np.float64)
        h = self.linear(f"{layer}.self_attn.o_proj", attended.astype(np.float64), settings)
        x = x + self.norm(h, f"{layer}.post_attention_layernorm", settings)
        h = self.norm(x, f"{layer}.pre_feedforward_layernorm", settings)
        gate, up = (self.linear(f"{layer}.mlp.{name}_proj", h, settings) for name in ("gate", "up"))
        gelu = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        h = self.linear(f"{layer}.mlp.down_proj", gelu * up, settings)
        x = x + self.norm(h, f"{layer}.post_feedforward_layernorm", settings)
        return x * self.weight(f"{layer}.layer_scalar") if config.family == "gemma4" else x


def attend(q: Array, k: Array, v: Array, columns: Array, settings: Attention) -> Array:
    """Attention of some tokens of a row over all of it.

    Args:
        q: (P, H, d), before RoPE.
        k, v: (T, K, d), k before RoPE.
        columns: (P,) tokens that the queries belong to.
        settings: scale, mask and rotation.

    Returns:
        (P, H d) in float64.
    """
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    tokens = np.arange(len(k))
    if settings.rope is not None:
        q, k = rotate(q, columns, settings.rope), rotate(k, tokens, settings.rope)
    copies = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, copies, 1), np.repeat(v, copies, 1)
    scores = np.einsum("phd,thd->hpt", q, k) * settings.scale
    past = columns[:, None] - tokens
    seen = past >= 0 if settings.causal else np.ones_like(past, bool)
    if settings.window is not None:
        seen &= past < settings.window
        if not settings.causal:
            seen &= past > -settings.window
    scores = np.where(seen, scores, -np.inf)
    likely = np.exp(scores - scores.max(-1, keepdims=True))
    likely /= likely.sum(-1, keepdims=True)
    return np.asarray(np.einsum("hpt,thd->phd", likely, v).reshape(len(q), -1))


def rotate(x: Array, positions: Array, rope: Rope) -> Array:
    """Rotate the two halves of heads: x (P, heads, d)."""
    size = x.shape[-1]
    turning = int(rope.fraction * size // 2)
    frequency = np.zeros(size // 2)
    frequency[:turning] = rope.theta ** (-np.arange(turning) * 2 / size) / rope.factor
    angles = positions[:, None, None] * frequency
    first, second = np.split(x, 2, -1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
