"""What a training step computes, holds and sends, counted from its shapes: no compiler, milliseconds.

It prunes the search, says which change would make a run fit, and checks the counts that are read off compiled
programs. All figures are of one device. The mesh cuts weights by `fsdp` x `tp` and the batch by `data` x `fsdp`.

Products of a step, by part, for N token positions, S supervised slots and P attended pairs of a device:

    linear     2 N W forward and 2 N W for the gradient of the input; trained weights 2 N W more; layers that are
               recomputed (remat block, offload) 2 N W more
    adapters   as linear, with gradients of their own weights
    attention  per pair and head dimension 4 forward and 10 backward; kernels (splash) that compute scores once for
               the queries and once for the keys 14; forward once more if recomputed
    head       2 S H for the logits and 2 S H for the gradient, trained embeddings 2 S H more
"""

import math
from dataclasses import dataclass

import jax

from portlab_jax.attention.splash import computed_pairs
from portlab_jax.setup import Blueprint, abstract_frozen, abstract_state, device_bytes
from portlab_jax.step import TrainState
from portlab_spec.models import GemmaConfig, LayerKind, Param, param_table
from portlab_spec.packing import Layout

RECOMPUTED = ("block", "offload")


@dataclass(frozen=True)
class Analytic:
    """Counts of one step, of one device.

    Attributes:
        flops: of matrix products, by part.
        memory: bytes by kind.
        traffic: bytes read from and written to HBM, roughly.
        sent: bytes sent to other devices.
    """

    flops: dict[str, float]
    memory: dict[str, float]
    traffic: float
    sent: float

    @property
    def total_flops(self) -> float:
        """All parts."""
        return sum(self.flops.values())

    @property
    def total_memory(self) -> float:
        """All kinds, as if all were there at the same time."""
        return sum(self.memory.values())


def analyse(drawn: Blueprint, layout: Layout) -> Analytic:
    """Count a step. Call it under the mesh."""
    state = abstract_state(drawn)
    held, sent = memory(drawn, layout, state), sent_bytes(drawn, layout, state)
    return Analytic(flops(drawn, layout), held, traffic(drawn, layout), sent)


def flops(drawn: Blueprint, layout: Layout) -> dict[str, float]:
    """FLOPs of matrix products by part."""
    config, tp = drawn.config, drawn.mesh.mesh.shape["tp"]
    full, again = drawn.options.full, drawn.recipe.remat in RECOMPUTED
    positions = layout.accumulate * layout.rows * layout.row_length
    slots = layout.accumulate * layout.slots
    linear = 4 + 2 * full + 2 * again
    heads = config.num_attention_heads / _ways(config.num_attention_heads, tp)
    attention = 0.0
    implementations = dict(drawn.for_layout(layout).attention)
    for kind in config.layers:
        implementation = implementations[kind.attention]
        per_pair = (14 if implementation.startswith("splash") else 10) + 4 * (1 + again)
        pairs = layout.accumulate * layout.rows * attended_pairs(layout, kind, implementation)
        attention += per_pair * pairs * kind.head_dim * heads
    rank_flops = 0 if full else 6 + 2 * again
    head = (4 + 2 * full) * slots * config.vocab_size * config.hidden_size / _ways(config.vocab_size, tp)
    return {
        "linear": linear * positions * drawn.size.linears / tp,
        "adapters": rank_flops * positions * drawn.size.adapters / tp,
        "attention": attention,
        "head": head,
    }


def attended_pairs(layout: Layout, kind: LayerKind, implementation: str) -> float:
    """Pairs of a query and a key that one packed row computes, masked ones of visible blocks included."""
    length = layout.row_length
    if implementation.startswith("splash"):
        return float(computed_pairs(length, kind.window))
    listed = layout.full_blocks if kind.window is None else layout.sliding_blocks
    return float(length * listed * layout.block)


def memory(drawn: Blueprint, layout: Layout, state: TrainState) -> dict[str, float]:
    """Bytes by kind: what a device must hold when the step is fullest."""
    config, size = drawn.config, drawn.options.dtype.itemsize
    positions = layout.rows * layout.row_length
    full, tp = drawn.options.full, drawn.mesh.mesh.shape["tp"]
    trained = device_bytes(state.adapter)
    layers = config.num_hidden_layers
    kept = layers * config.hidden_size * size  # each layer's input
    if drawn.recipe.remat not in RECOMPUTED:
        kept = sum(_kept(config, kind, drawn.recipe.remat, tp) for kind in config.layers) * size
    if drawn.recipe.remat == "offload":
        kept = 0
    widest = max(_kept(config, kind, "none", tp) for kind in config.layers) * size
    gathered = _largest_layer(config) / tp * size
    head = layout.chunk * config.vocab_size / _ways(config.vocab_size, tp) * 4 * 3
    table = config.vocab_size * config.hidden_size / _ways(config.vocab_size, tp) * size
    return {
        "weights": device_bytes(abstract_frozen(drawn)),
        "trained": trained,
        "optimizer": device_bytes(state.opt),
        "gradients": trained * (2 if layout.accumulate > 1 else 1),
        "kept activations": positions * kept,
        "one layer": positions * widest * 3 + 2 * gathered * (2 if full else 1),
        "logits": head + (table if drawn.mesh.mesh.shape["fsdp"] > 1 else 0),
    }


def traffic(drawn: Blueprint, layout: Layout) -> float:
    """Bytes to and from HBM: weights once, and a layer's activations written and read, in each pass over the layers."""
    config, size, tp = drawn.config, drawn.options.dtype.itemsize, drawn.mesh.mesh.shape["tp"]
    passes = 2 + (drawn.recipe.remat in RECOMPUTED) + drawn.options.full
    positions = layout.accumulate * layout.rows * layout.row_length
    weights = layout.accumulate * drawn.size.linears * size / tp
    activations = positions * sum(2 * _kept(config, kind, "none", tp) for kind in config.layers) * size
    logits = layout.accumulate * layout.slots * config.vocab_size / _ways(config.vocab_size, tp) * 4 * 4
    return passes * (weights + activations) + logits


def _kept(config: GemmaConfig, kind: LayerKind, remat: str, tp: int) -> float:
    """Numbers that the backward pass keeps of a token in one layer, by the policies of `portlab_jax.remat`."""
    heads = config.num_attention_heads * kind.head_dim / _ways(config.num_attention_heads, tp)
    kv = kind.kv_heads * kind.head_dim / _ways(kind.kv_heads, tp)
    mlp, d = kind.mlp / _ways(kind.mlp, tp), config.hidden_size
    kept = 2 * heads + 2 * kv + 2 * d + 2 * mlp  # products and what was attended
    if remat == "none":
        kept += 2 * d + heads + kv + mlp + d  # norms, RoPE, gate, residual
    if config.experts:
        kept += config.experts.top_k * (config.experts.width * 3 + d)
    return kept


def _largest_layer(config: GemmaConfig) -> float:
    """Weights of the largest layer."""
    stacks: dict[str, int] = {}
    for param in param_table(config):
        if param.stack:
            stacks[param.stack] = stacks.get(param.stack, 0) + math.prod(param.shape)
    return max(stacks.values())


def sent_bytes(drawn: Blueprint, layout: Layout, state: TrainState) -> float:
    """Bytes that a device sends in a step, by ring algorithms.

    fsdp gathers each weight forward, once more backward, and scatters gradients of what is trained; tp adds up two
    activations per layer forward, three backward, and two more if layers run again; data adds up the gradients.
    """
    config, shape = drawn.config, drawn.mesh.mesh.shape
    data, fsdp, tp = shape["data"], shape["fsdp"], shape["tp"]
    size, full = drawn.options.dtype.itemsize, drawn.options.full
    again = drawn.recipe.remat in RECOMPUTED
    weights = sum(_linear_bytes(param, size) for param in param_table(config)) / tp
    table = config.vocab_size * config.hidden_size * size / _ways(config.vocab_size, tp)
    share = (fsdp - 1) / fsdp
    sent = layout.accumulate * share * (2 * weights + 2 * table)
    if full:
        sent += layout.accumulate * share * weights * 4 / size
    positions = layout.accumulate * layout.rows * layout.row_length
    # Sums over tp are of float32, and compiled programs hold five a layer rather than four.
    activation = positions * config.hidden_size * 4
    sent += config.num_hidden_layers * (5 + 2 * again) * 2 * (tp - 1) / tp * activation
    trained = sum(math.prod(leaf.shape) * 4 for leaf in jax.tree.leaves(state.adapter))
    groups = data * fsdp
    return sent + 2 * (groups - 1) / groups * trained / tp


def _linear_bytes(param: Param, size: int) -> float:
    if not param.stack or len(param.dims) < 2:
        return 0.0
    return float(math.prod(param.shape) * param.count * size)


def _ways(parts: int, ways: int) -> int:
    return ways if parts % ways == 0 else 1
