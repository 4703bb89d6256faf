"""Cross-validation of a recipe over the rows outside the test split: how choices are made.

    nox -s folds                                              the shipped recipe, five folds
    nox -s folds -- --folds 0 2 --optimizer.learning-rate 8e-4 --lora.targets q_proj v_proj

Each fold is trained on the other four and scored on itself; options other than `--folds` and `--name` are those of
train-jax. Adds one entry to bench/results/folds.json.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from portlab_spec.data import load_dataset
from portlab_spec.files import read_json, write_json
from result_file import RESULTS, origin

RESULT = RESULTS / "folds.json"
COUNT = 5


def fold_rows(data: str, fold: int) -> list[str]:
    """JSON lines of a data set without test rows, one fold of it as the validation split.

    Rows are dealt to folds by tool and by a hash of their id, so every fold is balanced.
    """
    rows = [c for c in load_dataset(data) if c.split != "test"]
    rows.sort(key=lambda c: (c.target.tool_calls[0].name, hashlib.sha256(c.id.encode()).hexdigest()))
    splits = ["validation" if i % COUNT == fold else "train" for i in range(len(rows))]
    return [c.model_copy(update={"split": s}).model_dump_json() for c, s in zip(rows, splits, strict=True)]


def run_fold(data: str, fold: int, options: list[str]) -> tuple[dict[str, object], list[str]]:
    """Train without a fold and score it: metrics, and the answers that are wrong."""
    print(f"fold {fold} ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        rows.write_text("\n".join(fold_rows(data, fold)) + "\n")
        command = [sys.executable, "-m", "portlab_jax", "--json", "--out", f"{folder}/run", "--seed", str(fold)]
        command += ["--data", str(rows), "--train-splits", "train", "--eval-split", "validation", *options]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"folds: fold {fold} failed (exit code {done.returncode})")
        outputs = read_json(Path(folder) / "run" / "after.json")["outputs"]
    expected = {c.id: c for c in load_dataset(data)}
    wrong = [
        f"{expected[i].messages[-2].content} -> {text}"
        for i, text in outputs.items()
        if f"call:{expected[i].target.tool_calls[0].name}{{}}" not in text
    ]
    return json.loads(done.stdout)["after"]["metrics"], wrong


def main() -> None:
    """Run the folds, record them and print the totals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folds", type=int, nargs="+", default=list(range(COUNT)), choices=range(COUNT))
    parser.add_argument("--name", default="shipped recipe", help="title of the entry")
    args, options = parser.parse_known_args()
    results = [run_fold("fitness-213", fold, options) for fold in args.folds]
    totals = {
        name: {key: sum(metrics[name][key] for metrics, _ in results) for key in ("hits", "count")}  # type: ignore[index]
        for name in ("call_exact", "parse_rate", "hallucinated_tool_rate")
    }
    entry = {
        "options": options,
        "folds": args.folds,
        "totals": totals,
        "wrong": [line for _, wrong in results for line in wrong],
        **origin("jax", "jaxlib", "optax", "orbax-checkpoint"),
    }
    entries = read_json(RESULT) if RESULT.exists() else {}
    write_json(RESULT, entries | {args.name: entry})
    print(f"{args.name}: " + ", ".join(f"{name} {t['hits']}/{t['count']}" for name, t in totals.items()))
    print(*entry["wrong"], sep="\n")


if __name__ == "__main__":
    main()
