"""Merging side by side: merge-ckpt, PEFT, mergekit, Tunix, and a plain copy of the base as the floor.

    nox -s bench_merge -- --mergekit-python PYTHON             everything; bench/results/bench_merge.json
    nox -s bench_merge -- --only 1b --scale 0.1                small, one base (nothing is written)
    nox -s bench_merge -- --contender portlab --contender cp   some of them (nothing is written)
    nox -s bench_merge -- --work FOLDER                        keeps bases and adapters there, and takes those

All merge the same rank-16 adapter on all seven projections into the same bfloat16 base, contenders in turn, round
after round. Every run starts from its command with inputs that are in no cache, and ends when the output is on disk;
`cp` and `dd` copy the base and merge nothing. `dd` goes past the page cache, as merge-ckpt writes. Tunix saves from a
live model, which is not counted: its seconds are those of the call, its memory and CPU those of the process; it takes
neither sharded nor multimodal bases. PEFT's call alone, without its imports, is beside it. mergekit has PEFT merge into
a cache folder and copies from there.

The first output of each is held against base + update in float64.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from merge_accuracy import accuracy
from merge_fixture import ALPHA, RANK, SHAPES, Fixture, make_fixture
from peers.disk import forget
from portlab_spec.errors import UserError
from process_cost import Cost, run
from result_file import write_result

Figures = dict[str, Any]

PEERS = Path(__file__).parent / "peers"
ENVIRONMENTS = Path(__file__).parents[1] / ".nox"
# Nothing is to be looked up on the Hub; CPUs only.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
DIRECT_COPY = (
    'mkdir "$2"; for f in "$1"/*; do '
    'dd if="$f" of="$2/${f##*/}" bs=4M iflag=direct oflag=direct conv=fsync status=none || exit 1; done'
)


class Setup(NamedTuple):
    """A case's fixture, where to write, and the interpreters of peers."""

    fixture: Fixture
    out: Path
    tunix_python: Path
    mergekit_python: Path


def cp(setup: Setup) -> list[str | Path]:
    """The floor."""
    return ["cp", "-r", setup.fixture.base, setup.out]


def dd(setup: Setup) -> list[str | Path]:
    """The floor past the page cache."""
    return ["sh", "-c", DIRECT_COPY, "sh", setup.fixture.base, setup.out]


def portlab(setup: Setup) -> list[str | Path]:
    """Ours, from the Orbax step."""
    inputs = ["--ckpt", setup.fixture.run, "--base", setup.fixture.base]
    return [sys.executable, "-m", "portlab_merge", "merge", *inputs, "--out", setup.out]


def peft(setup: Setup) -> list[str | Path]:
    """From the PEFT folder."""
    return [sys.executable, PEERS / "peft_merge.py", setup.fixture.base, setup.fixture.peft, setup.out]


def mergekit(setup: Setup) -> list[str | Path]:
    """From the PEFT folder, which becomes a model in a cache first; a cache of an earlier run would be taken."""
    config, cache = (setup.out.with_name(f"mergekit{suffix}") for suffix in (".yaml", "-cache"))
    shutil.rmtree(cache, ignore_errors=True)
    model = f"{setup.fixture.base}+{setup.fixture.peft}"
    config.write_text(
        json.dumps({"merge_method": "passthrough", "models": [{"model": model}], "dtype": "bfloat16"}) + "\n"
    )
    arguments = [config, setup.out, "--lora-merge-cache", cache, "--no-copy-tokenizer"]
    return [setup.mergekit_python, "-m", "mergekit.scripts.run_yaml", *arguments]


def tunix(setup: Setup) -> list[str | Path]:
    """From a live model that holds the adapter."""
    arguments = [setup.fixture.base, setup.fixture.peft, setup.out, str(RANK), str(ALPHA)]
    return [setup.tunix_python, PEERS / "tunix_merge.py", *arguments]


CONTENDERS: dict[str, Callable[[Setup], list[str | Path]]] = {
    f.__name__: f for f in (cp, dd, portlab, peft, mergekit, tunix)
}
COPIES = ("cp", "dd")
CASES = {"1b": tuple(CONTENDERS), "4b-cut": tuple(name for name in CONTENDERS if name != "tunix")}


def measure(setup: Setup, name: str) -> Cost:
    """One run of a contender, from a cold cache.

    Raises:
        UserError: it cannot run.
    """
    shutil.rmtree(setup.out, ignore_errors=True)
    command = CONTENDERS[name](setup)
    for folder in setup.fixture:
        forget(folder)
    cost = run(command, setup.out, ENVIRONMENT)
    timed_within = Path(f"{setup.out}.json")
    if timed_within.exists():
        cost = cost._replace(**json.loads(timed_within.read_text()))
        timed_within.unlink()
    return cost._replace(seconds=cost.call_seconds) if name == "tunix" else cost


def run_case(setup: Setup, names: list[str], rounds: int) -> dict[str, Figures]:
    """Figures by contender."""
    costs: dict[str, list[Cost]] = {name: [] for name in names}
    found: dict[str, Figures] = {}
    for _ in range(rounds):
        for name in names:
            costs[name].append(measure(setup, name))
            print(f"{name}: {costs[name][-1]}", file=sys.stderr, flush=True)
            if name not in found:
                found[name] = {} if name in COPIES else accuracy(setup.fixture, setup.out)
    shutil.rmtree(setup.out)
    return {name: summary(runs) | found[name] for name, runs in costs.items()}


def summary(runs: list[Cost]) -> Figures:
    """The best time, the median, the worst memory; the rest of the best run."""
    best = min(runs, key=lambda cost: cost.seconds)._asdict()
    if not best["call_seconds"]:
        del best["call_seconds"]
    return best | {
        "median_seconds": statistics.median(cost.seconds for cost in runs),
        "peak_memory_bytes": max(cost.peak_memory_bytes for cost in runs),
        "all_seconds": [cost.seconds for cost in runs],
    }


def ratios(figures: dict[str, Figures]) -> dict[str, float]:
    """Seconds of each over the copy's, and over ours; memory over ours. Medians of interleaved runs."""
    seconds = {name: f["median_seconds"] for name, f in figures.items()}
    memory = {name: f["peak_memory_bytes"] for name, f in figures.items()}
    peers = [name for name in figures if name not in (*COPIES, "portlab")]
    against_copies = {f"seconds: {n} / {c}": seconds[n] / seconds[c] for c in COPIES if c in seconds for n in seconds}
    if "portlab" not in figures:
        return against_copies
    return (
        {what: value for what, value in against_copies.items() if not what.endswith(("cp / cp", "dd / dd"))}
        | {f"seconds: {name} / portlab": seconds[name] / seconds["portlab"] for name in peers}
        | {
            f"seconds: call of {name} alone / portlab": figures[name]["call_seconds"] / figures["portlab"]["seconds"]
            for name in peers
            if "call_seconds" in figures[name]
        }
        | {f"memory: {name} / portlab": memory[name] / memory["portlab"] for name in peers}
    )


def table(figures: dict[str, Figures]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [
        "| contender | seconds, best | median | CPU, s | peak memory, MiB | read, GB | written, GB "
        "| error, ULP: largest | mean | not the rounded value | other tensors identical |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, f in figures.items():
        cells = [
            name,
            f"{f['seconds']:.2f}",
            f"{f['median_seconds']:.2f}",
            f"{f['cpu_seconds']:.1f}",
            f"{f['peak_memory_bytes'] / 2**20:.0f}",
            f"{f['read_bytes'] / 1e9:.2f}",
            f"{f['written_bytes'] / 1e9:.2f}",
        ]
        if name not in COPIES:
            cells += [
                f"{f['largest_error_ulp']:.3f}",
                f"{f['mean_error_ulp']:.5f}",
                f"{f['misrounded_share']:.2e}",
                f"{f['other_tensors_identical']} of {f['other_tensors']}",
            ]
        lines.append("| " + " | ".join([*cells, *[""] * (11 - len(cells))]) + " |")
    return lines


def main() -> None:
    """Make the fixtures, run the contenders, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--contender", choices=CONTENDERS, action="append")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="of layers and vocabulary")
    parser.add_argument("--work", type=Path, help="folder for bases and adapters; otherwise they are not kept")
    parser.add_argument("--tunix-python", type=Path, default=ENVIRONMENTS / "bench_tunix/bin/python")
    parser.add_argument("--mergekit-python", type=Path, default=ENVIRONMENTS / "bench_mergekit/bin/python")
    args = parser.parse_args()
    results: dict[str, dict[str, Figures]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-merge-") as temporary:
        work = args.work or Path(temporary)
        for case in [args.only] if args.only else CASES:
            names = [name for name in CASES[case] if not args.contender or name in args.contender]
            for name, python in (("tunix", args.tunix_python), ("mergekit", args.mergekit_python)):
                if name in names and not python.exists():
                    raise UserError(f"no interpreter for {name}", where=str(python), fix=f"Pass --{name}-python")
            fixture = make_fixture(work / f"{case}-{args.scale}", SHAPES[case].scaled(args.scale))
            setup = Setup(fixture, work / "out", args.tunix_python, args.mergekit_python)
            results[case] = run_case(setup, names, args.rounds)
            print("\n".join(["", f"{case}:", "", *table(results[case]), ""]))
            print("\n".join(f"{what}: {value:.3f}" for what, value in ratios(results[case]).items()), flush=True)
    if args.only or args.contender or args.scale != 1.0:
        return
    path = write_result(
        "bench_merge",
        ("portlab-merge-ckpt", "numpy", "tensorstore", "torch", "transformers", "peft"),
        {f"{case}: {name}": f for case, figures in results.items() for name, f in figures.items()},
        {f"{case}: {what}": value for case, figures in results.items() for what, value in ratios(figures).items()},
        shapes={case: asdict(SHAPES[case]) for case in results},
        rank=RANK,
        rounds=args.rounds,
        load_average=os.getloadavg(),
    )
    print(f"written to {path.name}")


if __name__ == "__main__":
    main()
