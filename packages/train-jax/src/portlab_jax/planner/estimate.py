"""From what a program computes and moves to how long it takes and what that costs: a model, and no measurement.

The roofline is a lower bound: each resource works alone at its published peak, and the slowest decides,

    compute  FLOPs of matrix products / peak bfloat16 FLOP/s
    hbm      bytes read and written / HBM bandwidth
    ici      bytes sent to other chips / half of the ICI bandwidth of the links that the slice uses, since the
             published one counts both directions and all links

The estimate divides the bound by an efficiency that was fitted to published runs (`nox -s bench_backtest`,
docs/planning.md); what they cannot tell, it does not know either.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from portlab_jax.planner.program import Program
from portlab_spec.hardware import Slice
from portlab_spec.prices import Price

Resource = Literal["compute", "hbm", "ici"]

# Geometric mean of our bounds over published step times, and the worst factor between a published time and its
# estimate from the other runs: bench/results/bench_backtest.json, to which a test holds them.
EFFICIENCY = 0.49
WORST_FACTOR = 1.7


@dataclass(frozen=True)
class Roofline:
    """Seconds that one run of a program keeps each resource of a device busy, at its peak."""

    compute: float
    hbm: float
    ici: float

    @property
    def bound(self) -> Resource:
        """The resource that takes longest."""
        times: dict[Resource, float] = {"compute": self.compute, "hbm": self.hbm, "ici": self.ici}
        return max(times, key=times.__getitem__)

    @property
    def seconds(self) -> float:
        """The lower bound."""
        return max(self.compute, self.hbm, self.ici)


def roofline(program: Program, part: Slice) -> Roofline:
    """The bound of a program that fits."""
    return bound_of(program.flops, program.bytes, program.sent_bytes, part)


def bound_of(flops: float, hbm_bytes: float, sent_bytes: float, part: Slice) -> Roofline:
    """The bound of what one device computes, moves and sends; links that are not published cost nothing."""
    chip, per = part.chip, part.chip.devices
    link = (part.ici_bandwidth or float("inf")) / 2
    return Roofline(flops * per / chip.bf16_flops, hbm_bytes * per / chip.hbm_bandwidth, sent_bytes * per / link)


@dataclass(frozen=True)
class Estimate:
    """A run of a recipe on a slice.

    Attributes:
        roofline: of a step; the mean over the run's steps if they have several shapes.
        step_seconds: modelled: the bound divided by the efficiency.
        tokens_per_second: of the examples, before anything is shared, all chips together.
        examples_per_second: all chips together.
        hours: of the run's steps; starting, compiling, scoring and saving not included.
        usd: for these hours; None without a price.
        usd_per_million_tokens: of examples; None without a price.
    """

    roofline: Roofline
    step_seconds: float
    tokens_per_second: float
    examples_per_second: float
    hours: float
    usd: float | None
    usd_per_million_tokens: float | None


def estimate(
    shapes: Sequence[tuple[int, Program]],
    part: Slice,
    *,
    rows: int,
    tokens: float,
    steps: int,
    price: Price | None,
    efficiency: float = EFFICIENCY,
) -> Estimate:
    """Estimate a run.

    Args:
        shapes: how many steps run which program.
        part: the slice.
        rows, tokens: of a step.
        steps: of the run.
        price: of one chip for an hour.
        efficiency: share of the bound's speed that is reached.
    """
    total = sum(count for count, _ in shapes) or 1
    bounds = [(count / total, roofline(program, part)) for count, program in shapes]
    mean = Roofline(
        *(sum(share * getattr(bound, name) for share, bound in bounds) for name in ("compute", "hbm", "ici"))
    )
    seconds = sum(share * bound.seconds for share, bound in bounds) / efficiency
    hours = steps * seconds / 3600
    usd = None if price is None else hours * part.chips * price.usd_per_hour
    trained = tokens * steps / 1e6
    return Estimate(mean, seconds, tokens / seconds, rows / seconds, hours, usd, None if usd is None else usd / trained)
