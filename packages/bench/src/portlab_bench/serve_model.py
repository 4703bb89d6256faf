"""How fast a machine serves a model: a roofline of prefill and decode with three efficiencies, and a queue.

    decode step of B sequences   t(B) = W / bw / e_w  +  B (K(c) / bw  +  2 N / peak) / e_s
    prefill of p tokens          s(p) = (2 N p + attention) / peak / e_p

    W   bytes of weights           bw, peak  of all chips together
    N   weights that a token meets, K(c)  bytes of keys and values that a sequence of c tokens reads

e_w and e_s are fitted by least squares (relative errors) to the five published batches of Gemma 4 31B on v6e-8 with
tensor parallelism of 8 and tuned kernel blocks (Zimbres, DOI 10.5281/zenodo.21957969), contexts there taken for 128
tokens; e_p is the efficiency of published training runs (bench_backtest). What the model says of published runs that
it was not fitted to stands in docs/bench-tables.md; it is off by up to 2.1x there, and its cells say "modelled".

One engine does both: while prompts arrive at rate r, prefill takes the share u = r s(p) of its time, and decoding goes
on in the rest, so that B = r o t(B) / (1 - u) sequences are under way with o output tokens each. A prompt waits for
those before it (`wait`) and for one decode step. B is bounded by memory; a rate that needs more is not borne.
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

from portlab_bench.compiled import load_compiled
from portlab_bench.machines import WEIGHT_BYTES, Machine, Precision, parse_machine
from portlab_bench.published import find_published
from portlab_bench.roofline import base_size
from portlab_spec.models.config import GemmaConfig
from portlab_spec.models.flops import attention_size, visible_pairs
from portlab_spec.models.layers import LayerKind
from portlab_spec.models.published import published_config
from portlab_spec.models.table import param_table

# Share of memory that vLLM takes for weights and cache: Google's daily benchmark of this model sets it so.
MEMORY_SHARE = 0.9
FITTED_ON = tuple(f"zimbres-tp8-block128-b{batch}-itl" for batch in (64, 128, 256, 512, 1024))
FITTED_CONTEXT = 128  # prompts are said to be short, answers are 128 tokens: the mean over an answer
MODEL = "google/gemma-4-31B-it"


@dataclass(frozen=True)
class Efficiencies:
    """Shares of the published peaks that are reached: reading weights, the rest of a decode step, prefill."""

    weights: float
    sequences: float
    prefill: float


@dataclass(frozen=True)
class Workload:
    """Requests that are all alike.

    Attributes:
        prompt, output: tokens.
    """

    prompt: int = 1024
    output: int = 256

    @property
    def context(self) -> float:
        """Tokens that a sequence has behind it, in the middle of its answer."""
        return self.prompt + self.output / 2

    def __str__(self) -> str:
        return f"{self.prompt:,} tokens in, {self.output:,} out"


@dataclass(frozen=True)
class Point:
    """A rate that a machine can bear.

    Attributes:
        rate: requests per second.
        batch: sequences that decode together.
        tpot: seconds between tokens of an answer.
        ttft: seconds to the first token, median.
        ttft_p99: of the slowest in a hundred.
        output_throughput: tokens per second.
        busy: share of the time that prefill takes.
    """

    rate: float
    batch: float
    tpot: float
    ttft: float
    ttft_p99: float
    output_throughput: float
    busy: float


def weight_bytes(config: GemmaConfig, precision: Precision = "bf16") -> float:
    """Bytes of all weights."""
    return sum(math.prod(param.shape) * param.count for param in param_table(config)) * WEIGHT_BYTES[precision]


def kv_bytes(config: GemmaConfig, tokens: float, ways: int = 1, *, windowed: bool = True, size: int = 2) -> float:
    """Bytes of keys and values of one sequence, over all devices.

    Args:
        config: the model; layers that share those of others have none.
        tokens: of the sequence.
        ways: of tensor parallelism; heads that are fewer are held several times.
        windowed: sliding layers hold their window at most, as vLLM does on GPUs
            (docs.vllm.ai/en/latest/design/hybrid_kv_cache_manager); otherwise every layer holds every token, as the
            published capacity of the TPU engine shows (docs/bench-tables.md).
        size: bytes of a number.
    """
    return sum(_kv_layer(kind, tokens, ways, windowed) * size for kind in config.layers)


def _kv_layer(kind: LayerKind, tokens: float, ways: int, windowed: bool) -> float:
    if kind.shares_kv:
        return 0.0
    held = min(tokens, kind.window) if windowed and kind.window else tokens
    return 2 * max(kind.kv_heads, ways) * kind.head_dim * held


class ServeModel:
    """A model on a machine.

    Args:
        config: the model.
        machine: the hardware.
        precision: of weights and products; keys and values are bfloat16.
        efficiencies: the fitted ones by default.
    """

    def __init__(
        self,
        config: GemmaConfig,
        machine: Machine,
        precision: Precision = "bf16",
        efficiencies: Efficiencies | None = None,
    ) -> None:
        self.config, self.machine, self.precision = config, machine, precision
        self.efficiencies = efficiencies or fitted()
        self.weights = weight_bytes(config, precision)
        self.size = base_size(config)

    @property
    def fits(self) -> bool:
        """Whether the weights leave room."""
        return self.cache_bytes > 0

    @property
    def cache_bytes(self) -> float:
        """Bytes for keys and values, of all chips; negative if the weights alone are too large."""
        return self.machine.hbm_bytes * MEMORY_SHARE - self.weights

    def max_batch(self, work: Workload) -> int:
        """Sequences whose keys and values have room when all are at their longest."""
        windowed = self.machine.part is None
        each = kv_bytes(self.config, work.prompt + work.output, self.machine.devices, windowed=windowed)
        return max(0, math.floor(self.cache_bytes / each))

    def step_terms(self, context: float) -> tuple[float, float]:
        """Seconds of a decode step at the peaks: for its weights, and for each sequence."""
        size, machine = self.size, self.machine
        read = (size.linears + size.head) * WEIGHT_BYTES[self.precision] / machine.hbm_bandwidth
        keys = kv_bytes(self.config, context, machine.devices) / machine.hbm_bandwidth
        return read, keys + 2 * (size.linears + size.head) / machine.flops(self.precision)

    def step_seconds(self, batch: float, context: float) -> float:
        """Seconds of a decode step."""
        read, each = self.step_terms(context)
        return read / self.efficiencies.weights + batch * each / self.efficiencies.sequences

    def prefill_flops(self, prompt: int) -> float:
        """FLOPs of a prompt: products of all tokens, attention, logits of the last token."""
        positions, held = np.arange(prompt), np.ones(prompt, bool)
        kinds = {kind: self.config.layers.count(kind) for kind in dict.fromkeys(self.config.layers)}
        pairs = attention_size(
            (count * visible_pairs(positions, held, kind.window), self.config.num_attention_heads, kind.head_dim)
            for kind, count in kinds.items()
        )
        return 2.0 * self.size.linears * prompt + 4.0 * pairs + 2.0 * self.size.head

    def prefill_seconds(self, prompt: int) -> float:
        """Seconds of a prompt that nothing else delays."""
        return self.prefill_flops(prompt) / self.machine.flops(self.precision) / self.efficiencies.prefill

    def at(self, rate: float, work: Workload) -> Point | None:
        """What requests see at a rate; None if the machine cannot bear it."""
        prefill = self.prefill_seconds(work.prompt)
        busy = rate * prefill
        fixed = self.step_seconds(0, work.context)
        slope = self.step_seconds(1, work.context) - fixed
        room = 1 - busy - rate * work.output * slope
        if room <= 0:
            return None
        batch = rate * work.output * fixed / room
        if batch > self.max_batch(work):
            return None
        # Requests that find nobody decode alone, however few they are.
        step = self.step_seconds(max(batch, 1.0), work.context)
        return Point(
            rate=rate,
            batch=batch,
            tpot=step / (1 - busy),
            ttft=prefill + step + wait(busy, prefill, 0.5),
            ttft_p99=prefill + step + wait(busy, prefill, 0.99),
            output_throughput=rate * work.output,
            busy=busy,
        )

    def capacity(self, work: Workload, ttft_p99: float | None = None) -> Point | None:
        """The highest rate that it bears with the objective met; None if not even one request at a time meets it.

        Args:
            work: the requests.
            ttft_p99: seconds; without, the highest rate at all.
        """

        def good(rate: float) -> Point | None:
            point = self.at(rate, work)
            return point if point and (ttft_p99 is None or point.ttft_p99 <= ttft_p99) else None

        if not self.fits or self.max_batch(work) < 1:
            return None
        low, high = 1e-6, 1 / self.prefill_seconds(work.prompt)
        if not (best := good(low)):
            return None
        for _ in range(50):
            middle = (low + high) / 2
            if point := good(middle):
                low, best = middle, point
            else:
                high = middle
        return best


def wait(busy: float, service: float, share: float) -> float:
    """Seconds that all but 1 - `share` wait at most, for equal services and Poisson arrivals (M/D/1).

    With services of length 1, the tail of the waiting time is C e^(-x w), with the x > 0 of busy (e^x - 1) = x and
    C = (1 - busy) / (busy e^x - 1) (Cramér-Lundberg): exact far out, a little too long before one service.
    """
    if not 0 <= busy < 1:
        raise ValueError(f"a server that is busy {busy:.2f} of the time has no steady queue")
    if busy <= 1 - share:  # so many find it idle
        return 0.0
    low, high = 1e-9, 1.0
    while busy * math.expm1(high) < high:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if busy * math.expm1(middle) < middle else (low, middle)
    root = high
    constant = (1 - busy) / (busy * math.exp(root) - 1)
    return max(0.0, service * math.log(constant / (1 - share)) / root)


@cache
def fitted() -> Efficiencies:
    """The efficiencies, from the published batches and runs that ship."""
    config = published_config(MODEL)
    assert config is not None
    model = ServeModel(config, parse_machine("v6e-8"), efficiencies=Efficiencies(1, 1, 1))
    read, each = model.step_terms(FITTED_CONTEXT)
    records = [find_published(identity) for identity in FITTED_ON]
    # Each row over its published time, so that errors count relative to it: a x + b y = 1.
    rows = np.array([[read / r.value, (r.batch or 0) * each / r.value] for r in records])
    inverse, *_ = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)
    return Efficiencies(float(1 / inverse[0]), float(1 / inverse[1]), load_compiled().efficiency)
