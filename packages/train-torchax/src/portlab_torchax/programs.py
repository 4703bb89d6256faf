"""Programs compiled on purpose: each layout once, counted, with a word about the memory it takes."""

import time
from collections.abc import Callable
from typing import Any

from portlab_spec.packing import Layout, Plan


class Programs:
    """The compiled steps of a run, one for each layout.

    Attributes:
        count: compilations so far.
    """

    def __init__(self, make: Callable[[Layout], Any]) -> None:
        """Compile when asked.

        Args:
            make: a jitted function for a layout.
        """
        self._make = make
        self._ready: dict[Layout, Any] = {}
        self.count = 0

    def ready(self, layout: Layout) -> bool:
        """Is the program of a layout compiled?"""
        return layout in self._ready

    def compile(self, layout: Layout, plan: Plan, *args: Any) -> str:
        """Compile the program of a layout for arguments like these; what it took, in words."""
        started = time.perf_counter()
        program = self._make(layout).lower(*args).compile()
        self._ready[layout] = program
        self.count += 1
        seconds = time.perf_counter() - started
        shared = 1 - plan.held_tokens / plan.row_tokens
        return f"compiled the step for {layout.tokens_per_step} tokens in {seconds:.1f} s{memory_of(program)}" + (
            f", {shared:.0%} of all tokens shared" if shared else ""
        )

    def __call__(self, layout: Layout, *args: Any) -> Any:
        """Run the program of a layout."""
        return self._ready[layout](*args)


def memory_of(program: Any) -> str:
    """What a device needs for a compiled program, in words; nothing if the compiler does not say."""
    stats = program.memory_analysis()
    if stats is None:
        return ""
    gib = 2.0**30
    arguments, temporaries = stats.argument_size_in_bytes, stats.temp_size_in_bytes
    output = max(stats.output_size_in_bytes - stats.alias_size_in_bytes, 0)
    return (
        f", {(arguments + temporaries + output) / gib:.2f} GiB per device (weights, state and batch "
        f"{arguments / gib:.2f}, activations {temporaries / gib:.2f})"
    )
