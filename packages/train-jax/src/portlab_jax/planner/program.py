"""A program compiled for devices that are not here: its memory, costs, largest arrays and how long that took."""

import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import jax

from portlab_jax.planner.buffers import Buffer, largest_buffers
from portlab_jax.planner.costs import count
from portlab_jax.planner.hlo import parse
from portlab_spec.report import peak_rss_bytes

_SIZE = r"([\d.]+)([KMGT]?)i?B?"
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class ProgramMemory:
    """Bytes of one device, as the compiler planned them.

    Attributes:
        arguments: weights, state and batch.
        temporaries: what lives within a run, at the fullest moment.
        output: results that do not take an argument's place.
        code: the program itself.
        peak: what a run needs at its fullest.
    """

    arguments: int
    temporaries: int
    output: int
    code: int
    peak: int


@dataclass(frozen=True)
class Program:
    """A compiled program, all figures per device.

    Attributes:
        memory: None if it does not fit.
        needed: bytes of HBM that it needs, those over the limit included.
        limit: bytes of HBM that the compiler lets programs use; None where it did not say.
        flops, bytes: of a run, loops multiplied in; see `costs`.
        compiler_flops: what the compiler itself counts, loops once.
        collectives, sent: runs and bytes sent, by kind.
        kernels: custom kernels whose FLOPs are not stated, by name.
        unknown_loops: loops that count once because their rounds are not known.
        largest: the largest arrays at the fullest moment.
        lower_seconds, compile_seconds: wall time.
        peak_rss_bytes: of the process that compiled it.
    """

    memory: ProgramMemory | None
    needed: int
    limit: int | None
    flops: float
    bytes: float
    compiler_flops: float
    collectives: dict[str, int]
    sent: dict[str, int]
    kernels: dict[str, int]
    unknown_loops: int
    largest: tuple[Buffer, ...]
    lower_seconds: float
    compile_seconds: float
    peak_rss_bytes: int

    @property
    def sent_bytes(self) -> int:
        """Bytes that a device sends to others in a run."""
        return sum(self.sent.values())

    @property
    def fits(self) -> bool:
        """Whether the compiler accepted it."""
        return self.memory is not None

    def to_json(self) -> dict[str, Any]:
        """For files."""
        return asdict(self)

    @staticmethod
    def from_json(raw: dict[str, Any]) -> "Program":
        """The inverse of `to_json`."""
        memory = ProgramMemory(**raw["memory"]) if raw["memory"] else None
        return Program(**{**raw, "memory": memory, "largest": tuple(Buffer(**b) for b in raw["largest"])})


Compile = Callable[..., Program]  # from a jitted function and its abstract arguments


def lower(function: Any, *args: Any) -> tuple[Any, float]:
    """Lower a jitted function for abstract arguments, and the seconds that took."""
    started = time.perf_counter()
    return function.lower(*args), time.perf_counter() - started


def compile_lowered(lowered: Any, lower_seconds: float) -> Program:
    """Compile a lowered function.

    Raises:
        jax.errors.JaxRuntimeError: the compiler refuses it for another reason than memory.
    """
    started = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        seconds = time.perf_counter() - started
        if (shortage := read_shortage(str(error))) is None:
            raise
        needed, limit, largest = shortage
        return Program(
            None, needed, limit, 0.0, 0.0, 0.0, {}, {}, {}, 0, largest, lower_seconds, seconds, peak_rss_bytes()
        )
    return describe(compiled, lower_seconds, time.perf_counter() - started)


def describe(compiled: Any, lower_seconds: float, compile_seconds: float) -> Program:
    """Read everything off a compiled program."""
    stats = compiled.memory_analysis()
    output = max(stats.output_size_in_bytes - stats.alias_size_in_bytes, 0)
    memory = _memory(
        stats.argument_size_in_bytes,
        output,
        stats.temp_size_in_bytes,
        stats.generated_code_size_in_bytes,
        getattr(stats, "peak_memory_in_bytes", 0),
    )
    module = parse(compiled.as_text())
    costs = count(module)
    largest, _ = largest_buffers(module)
    analysis = compiled.cost_analysis() or {}
    return Program(
        memory=memory,
        needed=memory.peak,
        limit=None,
        flops=costs.flops,
        bytes=costs.bytes,
        compiler_flops=float(analysis.get("flops", 0.0)),
        collectives=dict(costs.collectives),
        sent=dict(costs.sent),
        kernels=dict(costs.kernels),
        unknown_loops=costs.unknown_loops,
        largest=tuple(largest),
        lower_seconds=lower_seconds,
        compile_seconds=compile_seconds,
        peak_rss_bytes=peak_rss_bytes(),
    )


def _memory(arguments: int, output: int, temporaries: int, code: int, stated_peak: int) -> ProgramMemory:
    """Memory in parts that add up.

    The size of all temporaries counts on-chip memory and gaps too, and is more than what the compiler holds against
    the limit (by a third for a step of Gemma 4 31B); its peak says what is alive at the fullest moment.
    """
    if stated_peak:
        temporaries = max(stated_peak - arguments - output, 0)
    return ProgramMemory(arguments, temporaries, output, code, arguments + temporaries + output + code)


def read_shortage(message: str) -> tuple[int, int, tuple[Buffer, ...]] | None:
    """What the compiler says when a program is too large: bytes needed, bytes there are, largest allocations.

    One of its two messages counts temporaries alone: then more is needed than it says.
    """
    found = re.search(rf"Used {_SIZE} of {_SIZE} hbm", message) or re.search(
        rf"total memory required for .*?\({_SIZE}\) exceeds available HBM \({_SIZE}\)", message
    )
    if found is None:
        return None
    needed, limit = (int(float(found[i]) * _UNITS[found[i + 1]]) for i in (1, 3))
    largest = []
    for entry in re.split(r"\n\s*\d+\. ", message)[1:]:
        size = re.search(r"Size: ([\d.]+)([KMGT]?)", entry)
        if size is None:
            continue
        name = re.search(r'op_name="([^"]*)"', entry) or re.search(r"Operator: (.*)", entry)
        shape = re.search(r"Shape: ([a-z0-9]+\[[\d,]*\])", entry)
        source = re.search(r'source_file="([^"]*)"(?: source_line=(\d+))?', entry)
        where = f"{source[1]}:{source[2]}" if source else ""
        largest.append(
            Buffer(
                int(float(size[1]) * _UNITS[size[2]]),
                shape[1] if shape else "?",
                name[1].strip() if name else "?",
                where,
            )
        )
    return needed, limit, tuple(largest)
