"""Held-out accuracy of the main job over several seeds.

    nox -s seeds                          seeds 0, 1, 2; writes bench/results/seeds.json

Every seed is a whole run of `train-jax` with the shipped recipe, scored on the test split. Nothing was chosen on that
split: recipe choices were made on the validation split (`--train-splits train --eval-split validation`).
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile

from portlab_spec.files import write_json
from result_file import RESULTS, origin

RESULT = RESULTS / "seeds.json"
SHOWN = ("call_exact", "name_accuracy", "parse_rate", "hallucinated_tool_rate", "most_frequent_tool")


def run_seed(seed: int, extra: list[str]) -> dict[str, object]:
    """One main job; its report."""
    print(f"seed {seed} ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "portlab_jax", "--json", "--seed", str(seed), "--out", f"{folder}/run", *extra]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"seeds: the run of seed {seed} failed (exit code {done.returncode})")
    report = dict(json.loads(done.stdout))
    del report["paths"]  # folders that no longer exist
    return report


def main() -> None:
    """Run every seed, write the reports and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args, extra = parser.parse_known_args()
    reports = [run_seed(seed, extra) for seed in args.seeds]
    means = {n: statistics.mean(r["after"]["metrics"][n]["value"] for r in reports) for n in SHOWN}
    write_json(
        RESULT,
        {
            **origin("jax", "jaxlib", "optax", "orbax-checkpoint"),
            "mean_after": means,
            "reports": reports,
        },
    )
    print("| | " + " | ".join(SHOWN) + " | seconds: prepare, before, train, after, export | peak memory, GiB |")
    print("|---|" + "---:|" * (len(SHOWN) + 2))
    print(row("untuned", reports[0], "before"))
    for seed, report in zip(args.seeds, reports, strict=True):
        print(row(f"seed {seed}", report, "after"))
    print(f"| mean of {len(reports)} | " + " | ".join(f"{means[n]:.1%}" for n in SHOWN) + " | | |")


def row(title: str, report: dict[str, object], when: str) -> str:
    """One line of the table."""
    metrics = report[when]["metrics"]  # type: ignore[index]
    cells = [f"{metrics[n]['hits']}/{metrics[n]['count']}" for n in SHOWN]
    seconds = ", ".join(f"{s:.0f}" for s in report["seconds"].values())  # type: ignore[attr-defined]
    memory = f"{report['peak_rss_bytes'] / 2**30:.2f}"  # type: ignore[operator]
    tail = [seconds, memory] if when == "after" else ["", ""]
    return f"| {title} | " + " | ".join([*cells, *tail]) + " |"


if __name__ == "__main__":
    main()
