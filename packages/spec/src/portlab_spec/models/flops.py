"""How many floating-point operations a training step needs, and how many a device can do.

Model FLOPs: what the mathematics asks for, whatever the implementation computes besides (padding, recomputed layers,
masked blocks). A matrix product of T tokens with N weights takes 2 N T; its backward pass as much again for the
gradient of the input, and as much again for the gradient of the weights, which frozen weights do not need:

    LoRA step    4 N T + 6 n T + 12 A + 4 H S
    full step    6 N T         + 12 A + 6 H S

    N  weights of the linear layers that a token meets: of experts, the active ones only
    n  weights of the adapters that a token meets
    T  tokens that pass the layers, padding excluded; what several rows start with counts once if it is computed once
    A  visible (query, key) pairs x heads x head size, summed over the layers: scores and their product with the
       values are 2 FLOPs each per pair and dimension, forward once and backward twice
    H  vocabulary x hidden size
    S  supervised slots, the only ones with logits

Left out, all far below 1 %: norms, RoPE, softmax, activation functions, gradients of single embedding rows, the
optimiser; and the first layer's input gradient, which nobody needs, is counted.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from portlab_spec.hardware import find_chip
from portlab_spec.models.config import GemmaConfig
from portlab_spec.models.table import param_table
from portlab_spec.models.targets import AdapterLeaf


@dataclass(frozen=True)
class ModelSize:
    """Weights that one token meets.

    Attributes:
        linears: N, of the linear layers.
        adapters: n, of LoRA's matrices.
        head: H, vocabulary x hidden size.
    """

    linears: int
    adapters: int
    head: int


@dataclass(frozen=True)
class StepSize:
    """What one step computes, summed over its micro-batches.

    Attributes:
        tokens: T.
        attention: A, of `attention_size`.
        slots: S.
    """

    tokens: int
    attention: int
    slots: int


def model_size(config: GemmaConfig, leaves: Sequence[AdapterLeaf]) -> ModelSize:
    """Weights that one token of a model with an adapter meets; of experts, the active ones."""
    experts = config.experts
    linears = adapters = 0
    for param in param_table(config):
        if len(param.dims) < 2 or param.name.startswith("embed_tokens") or param.name == "lm_head":
            continue
        active = experts.top_k / experts.count if experts and param.name.startswith("experts.") else 1
        linears += int(math.prod(param.shape) * param.count * active)
    for leaf in leaves:
        active = experts.top_k if experts and leaf.experts else 1
        adapters += leaf.rank * (leaf.into.size + leaf.out.size) * len(leaf.index) * active
    return ModelSize(linears, adapters, config.vocab_size * config.hidden_size)


def step_flops(model: ModelSize, step: StepSize, *, method: str = "lora") -> int:
    """FLOPs of one optimiser step over all devices, by the formula above.

    Args:
        model: weights that a token meets.
        step: tokens, pairs and slots.
        method: "lora", or "full" if the weights get gradients.
    """
    trained = method == "full"
    products = 6 if trained else 4
    adapters = 0 if trained else 6 * model.adapters
    layers = (products * model.linears + adapters) * step.tokens
    return layers + 12 * step.attention + products * model.head * step.slots


def attention_size(layers: Iterable[tuple[int, int, int]]) -> int:
    """A of the formula, from (visible pairs, query heads, head size) of every layer."""
    return sum(pairs * heads * head_dim for pairs, heads, head_dim in layers)


def visible_pairs(positions: np.ndarray, held: np.ndarray, window: int | None) -> int:
    """Pairs of a query and a key that it sees: a token sees itself and what precedes it in its own row.

    Args:
        positions: depth of each token in its row, any shape, integer.
        held: bool of the same shape; false for padding.
        window: how many keys a sliding layer sees at most; None for a full one.
    """
    seen = positions[held].astype(np.int64) + 1
    return int(np.sum(seen if window is None else np.minimum(seen, window)))


def peak_flops(device_kind: str) -> float | None:
    """Peak dense bfloat16 FLOP/s of a device by the name that JAX gives it; None for one of no known chip."""
    chip = find_chip(device_kind)
    return chip.bf16_flops / chip.devices if chip else None


def mfu(flops: float, seconds: float, devices: int, device_kind: str) -> float | None:
    """Model FLOPs utilisation (arXiv 2204.02311, appendix B): share of the devices' peak; None if unknown."""
    peak = peak_flops(device_kind)
    return None if peak is None or not seconds else flops / seconds / (devices * peak)
