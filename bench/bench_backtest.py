"""The planner's estimates beside training runs that others published.

    nox -s bench_backtest                          all runs, writes bench/results/bench_backtest.json
    nox -s bench_backtest -- --only E2B E4B        some of them, by a part of the name; writes nothing
    nox -s bench_backtest -- --compile E4B         compile other ones than those that take minutes; none if left empty

For each run of `published_runs` our own step of the same size is counted from its shapes for the very slice, as the
search of `plan-tpu` does it, and the smaller ones are compiled, as `plan-tpu` does it; compiled programs are
remembered. The roofline, of the program if there is one, is a lower bound. The planner's estimate
divides that by an efficiency, the geometric mean of bound over published time; so that no run judges itself, each is
estimated with the efficiency of the others. `portlab_jax.planner.estimate` holds the result as constants.

MaxText's TFLOP/s are model FLOPs: 6 per weight and token and causal attention, nothing that is computed twice. Ours are
counted alike in `model_tflop`, and as executed, with recomputed layers, in `flops`.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from portlab_jax.planner.estimate import Roofline, bound_of, roofline
from portlab_jax.planner.plan import compile_job
from portlab_jax.planner.program import Program
from portlab_jax.planner.records import Job
from portlab_jax.planner.search import Candidate
from portlab_jax.planner.topology import prepare_environment
from portlab_jax.planner.workload import find_config
from portlab_spec.errors import CheckFailed
from portlab_spec.hardware import Slice, parse_slice
from published_runs import OUT_OF_SCOPE, RUNS, PublishedRun
from result_file import write_result

Figures = dict[str, Any]

# Those that a machine with 16 GiB compiles within ten minutes or so.
COMPILED = ("12B", "E2B", "LoRA")


def job(run: PublishedRun, kind: str) -> Job:
    """Our step of the size of a run; every token but the first can be a target."""
    recipe = run.recipe().model_dump(mode="json")
    variants: tuple[Mapping[str, Any], ...] = ({},) if kind == "rank" else ()
    return Job(kind, recipe, run.slice, length=run.length, supervised=run.length - 1, variants=variants)  # type: ignore[arg-type]


def bounds(roof: Roofline) -> Figures:
    """A roofline for the result file."""
    return {**asdict(roof), "bound_by": roof.bound, "bound_seconds": roof.seconds}


def analytic(run: PublishedRun, part: Slice) -> Figures:
    """Counted from shapes.

    Raises:
        CheckFailed: our trainer would refuse the step.
    """
    result = compile_job(job(run, "rank"))
    if result.error or not result.candidates:
        raise CheckFailed(result.error or "refused", where=run.name, fix="Look at its mesh in bench/published_runs.py")
    candidate = Candidate.from_json(result.candidates[0])
    counts = candidate.analytic
    roof = bound_of(counts.total_flops, counts.traffic, counts.sent, part)
    return bounds(roof) | {"flops": counts.flops, "memory": counts.total_memory}


def compiled(run: PublishedRun, part: Slice) -> Figures:
    """Read off the compiled program.

    Raises:
        CheckFailed: the compiler died.
    """
    result = compile_job(job(run, "train"))
    if result.error:
        raise CheckFailed(result.error, where=run.name, fix="See bench/published_runs.py")
    (shape,) = result.programs["shapes"]
    program = Program.from_json(shape["program"])
    figures = {
        "fits": program.fits,
        "needed_bytes": program.needed,
        "attention": shape["attention"],
        "compile_seconds": program.compile_seconds,
        "peak_rss_bytes": program.peak_rss_bytes,
    }
    if not program.fits:
        return figures
    counts = {name: getattr(program, name) for name in ("flops", "bytes", "sent", "kernels", "unknown_loops")}
    return bounds(roofline(program, part)) | figures | counts


def model_tflop(run: PublishedRun, part: Slice) -> float:
    """Model FLOPs of a step of one chip in 10^12, nothing recomputed: as portlab_spec.models.flops and MaxText."""
    import jax

    from portlab_jax.setup import draw_up
    from portlab_spec.models.flops import StepSize, attention_size, step_flops, visible_pairs
    from portlab_spec.recipe import Mesh

    config, recipe = find_config(run.model), run.recipe()
    drawn = draw_up(recipe.model_copy(update={"mesh": Mesh(data=1, fsdp=1, tp=1)}), config, (), jax.devices()[:1])
    positions, held = np.arange(run.length), np.ones(run.length, bool)
    attention = attention_size(
        (run.rows * visible_pairs(positions, held, kind.window), config.num_attention_heads, kind.head_dim)
        for kind in config.layers
    )
    tokens = run.rows * run.length
    return step_flops(drawn.size, StepSize(tokens, attention, tokens), method=recipe.method) / part.chips / 1e12


def backtest(run: PublishedRun, *, compile_too: bool) -> Figures:
    """Everything about one run but the estimate, which takes the others."""
    part = parse_slice(run.slice)
    print(f"{run.name} ...", file=sys.stderr, flush=True)
    counted = analytic(run, part)
    program = compiled(run, part) if compile_too else None
    basis, of = ("compiled", program) if program and program["fits"] else ("analytic", counted)
    published = None if run.tflops_per_chip is None else run.tflops_per_chip * run.seconds
    return {
        "published": {
            "seconds": run.seconds,
            "step_time": run.step_time,
            "tflops_per_chip": run.tflops_per_chip,
            "trainer": run.trainer,
            "dated": run.dated,
            "source": run.source,
            "differs": run.differs,
        },
        "slice": run.slice,
        "recipe": run.recipe().model_dump(mode="json", exclude_defaults=True),
        "analytic": counted,
        "compiled": program,
        "basis": basis,
        "bound_by": of["bound_by"],
        "bound_seconds": of["bound_seconds"],
        "efficiency": of["bound_seconds"] / run.seconds,
        "model_tflop": {"ours": model_tflop(run, part), "published": published},
    }


def calibrate(figures: Mapping[str, Figures]) -> tuple[float, dict[str, Figures]]:
    """The efficiency, and each run as estimated from the others.

    Runs whose seconds are not a step's own are estimated too, from all that are, and fit nothing.
    """
    fitted = {name: f["efficiency"] for name, f in figures.items() if f["published"]["step_time"]}
    estimates = {}
    for name, f in figures.items():
        others = [efficiency for other, efficiency in fitted.items() if other != name]
        seconds = f["bound_seconds"] / statistics.geometric_mean(others)
        ratio = seconds / f["published"]["seconds"]
        estimates[name] = {"seconds": seconds, "error": ratio - 1, "factor": max(ratio, 1 / ratio)}
    return statistics.geometric_mean(fitted.values()), estimates


def table(figures: Mapping[str, Figures], estimates: Mapping[str, Figures]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [
        "| run | published, s | bound, s | by | efficiency | estimate, s | error | published / our model TFLOP |",
        "|---|---:|---:|---|---:|---:|---:|---:|",
    ]
    for name, f in figures.items():
        guess, tflop = estimates[name], f["model_tflop"]
        ratio = f"{tflop['published'] / tflop['ours']:.3f}" if tflop["published"] else ""
        lines.append(
            f"| {name} | {f['published']['seconds']:.3g} | {f['bound_seconds']:.3g} | {f['bound_by']} ({f['basis']}) "
            f"| {f['efficiency']:.2f} | {guess['seconds']:.3g} | {guess['error']:+.0%} | {ratio} |"
        )
    return lines


def choose(words: Sequence[str]) -> list[PublishedRun]:
    """Runs whose names contain one of some words."""
    return [run for run in RUNS if any(word in run.name for word in words)]


def main() -> None:
    """Estimate every run and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--compile", nargs="*", default=COMPILED)
    args = parser.parse_args()
    prepare_environment()
    to_compile = choose(args.compile)
    figures = {run.name: backtest(run, compile_too=run in to_compile) for run in choose(args.only or [""])}
    if sum(f["published"]["step_time"] for f in figures.values()) < 2:
        raise SystemExit("bench_backtest: an estimate needs two runs, one to fit and one to judge")
    efficiency, estimates = calibrate(figures)
    worst = max(guess["factor"] for guess in estimates.values())
    print("\n".join(table(figures, estimates)))
    print(f"\nefficiency {efficiency:.3f}, worst factor {worst:.2f}, {len(figures)} runs")
    if args.only:
        return
    result = write_result(
        "bench_backtest",
        ("jax", "jaxlib", "libtpu"),
        {name: f | {"estimate": estimates[name]} for name, f in figures.items()},
        {"efficiency": efficiency, "worst factor": worst},
        evidence="compiled and modelled, beside published",
        out_of_scope=OUT_OF_SCOPE,
    )
    print(f"written to {result.name}")


if __name__ == "__main__":
    main()
