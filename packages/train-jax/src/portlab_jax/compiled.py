"""Compile on purpose: each shape once, with a word about the memory it takes, and a warning when a shape is new."""

import ctypes
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

from portlab_spec.assets import cache_dir

log = logging.getLogger(__name__)

Signature = dict[str, str]


def use_compilation_cache() -> None:
    """Keep compiled programs between runs, unless the user has said where or that not."""
    if jax.config.jax_compilation_cache_dir is None and jax.config.jax_enable_compilation_cache:
        jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "compiled"))


def return_free_memory() -> None:
    """Give back what the compiler has freed: glibc keeps it otherwise, 0.3 GiB after a step of Gemma 3 270M."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, as the compiler planned them.

    Attributes:
        arguments: weights, state and batch.
        temporaries: activations and everything else that lives within a step.
        output: results that do not reuse an argument's memory.
    """

    arguments: int
    temporaries: int
    output: int

    @property
    def peak(self) -> int:
        """Upper bound of what a call needs."""
        return self.arguments + self.temporaries + self.output

    def describe(self) -> str:
        """In GiB, for people."""
        gib = 2.0**30
        return (
            f"{self.peak / gib:.2f} GiB per device (weights, state and batch {self.arguments / gib:.2f}, "
            f"activations {self.temporaries / gib:.2f})"
        )


@dataclass
class Compiled:
    """A function that is compiled ahead for each signature of its arguments, and counts.

    A signature is shape, type and sharding of every leaf. One that was not expected is compiled all the same, but
    named: on an accelerator it costs minutes, and is nearly always a mistake.

    Attributes:
        function: jitted.
        name: for messages.
        expected: signatures that come without a warning.
        seconds: spent on compiling.
        memory: of the latest compilation.
    """

    function: Callable[..., Any]
    name: str
    expected: int = 1
    seconds: float = 0.0
    memory: Memory | None = None
    _ready: dict[tuple[tuple[str, str], ...], Callable[..., Any]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How often it was compiled."""
        return len(self._ready)

    def __call__(self, *args: Any) -> Any:
        """Run, compiling first if the arguments' signature is new."""
        return self.prepare(*args)(*args)

    def prepare(self, *args: Any) -> Callable[..., Any]:
        """The compiled function for these arguments; arrays may be abstract."""
        now = signature(args)
        key = tuple(now.items())
        if key not in self._ready:
            if len(self._ready) >= self.expected:
                last = dict(next(reversed(self._ready)))
                log.warning("%s is compiled anew: %s", self.name, describe_change(last, now))
            started = time.perf_counter()
            executable = self.function.lower(*args).compile()  # type: ignore[attr-defined]
            return_free_memory()
            self.seconds += time.perf_counter() - started
            self.memory = _memory(executable)
            self._ready[key] = executable
        return self._ready[key]


def signature(args: Any) -> Signature:
    """Type and sharding of each leaf, by path."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): f"{jax.typeof(leaf)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(args)
    }


def describe_change(before: Signature, now: Signature) -> str:
    """The arguments that differ, and how."""
    lines = [
        f"{name} was {before[name]}, is {now[name]}" for name in now if name in before and before[name] != now[name]
    ]
    lines += [f"{name} is new" for name in now.keys() - before.keys()]
    lines += [f"{name} is gone" for name in before.keys() - now.keys()]
    return "; ".join(lines[:4]) + (f"; {len(lines) - 4} more" if len(lines) > 4 else "")


def _memory(executable: Any) -> Memory | None:
    stats = executable.memory_analysis()
    if stats is None:
        return None
    arguments, aliased = stats.argument_size_in_bytes, stats.alias_size_in_bytes
    return Memory(arguments, stats.temp_size_in_bytes, max(stats.output_size_in_bytes - aliased, 0))
