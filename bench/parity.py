"""All trainers and plain PyTorch held to each other: on the default model, and on a toy of each family.

Figures are the largest error of each stage in roundings of float32, beside what is allowed; a backend that differs, or
that could not run, fails the session once all have run.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from parity_work import toy_work

from portlab_parity.causes import explain
from portlab_parity.compare import ROUNDING, TOLERANCES, compare
from portlab_parity.prepare import prepare
from portlab_parity.report import as_json, describe
from portlab_parity.run import find_backend, run_backend
from portlab_spec.errors import UserError
from portlab_spec.evidence import Evidence
from portlab_spec.recipe import load_recipe
from result_file import write_result

ROOT = Path(__file__).parents[1]
TRL = str(ROOT / "packages/parity/examples/trl_script.py")
BACKENDS = ("plain", "jax", "xla", "torchax", TRL)  # the first is what the others are held to
# Neither TRL's head nor a copy of the embedding for each pass goes with trained rows of it.
RECIPE, CHANGES, ROWS = "functiongemma-fitness", {"dtype": "float32", "lora.train_control_rows": False}, 4
# Case of the toy, and rows of its embedding that are trained.
TOYS: dict[str, tuple[str, tuple[int, ...]]] = {
    "gemma3 toy": ("gemma3, two kv heads", (3, 5)),
    "gemma3 toy, no trained rows": ("gemma3, two kv heads", ()),
    "gemma4 toy, shared keys and values": ("gemma4, shared keys and values", (3, 5)),
    "gemma4 toy, keys are values": ("gemma4, keys are values", (3, 5)),
    "gemma4 toy, experts": ("gemma4, experts", (3, 5)),
}


def main() -> int:
    """Run what is asked for; 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="names of models: default, and " + ", ".join(TOYS))
    parser.add_argument("--python", nargs="*", default=[], metavar="NAME=PATH", help="interpreters of backends")
    options = parser.parse_args()
    pythons = {name: Path(path) for name, _, path in (entry.partition("=") for entry in options.python)}
    names = options.only or ["default", *TOYS]
    figures: dict[str, Any] = {}
    ratios: dict[str, float] = {}
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            found, shares, agree = one_model(name, Path(folder) / name.replace(" ", "-"), pythons)
            figures[name], failed = found, failed or not agree
            ratios |= shares
    if not options.only:
        allowed = {name: tolerance.float32 for name, tolerance in TOLERANCES.items()}
        libraries = ("jax", "torch", "transformers", "peft", "trl", "numpy")
        more = {"allowed": allowed, "rounding": ROUNDING["float32"], "rows": ROWS, "recipe": RECIPE}
        write_result("parity", libraries, figures, ratios, **more)
    return int(failed)


def one_model(name: str, folder: Path, pythons: dict[str, Path]) -> tuple[dict[str, Any], dict[str, float], bool]:
    """Figures of each backend on a model, the largest share of a tolerance that it takes, and whether all agree."""
    folder.mkdir(parents=True)
    trained_rows: tuple[int, ...] = ()
    if name == "default":
        prepare(load_recipe(RECIPE, CHANGES), folder / "work", rows=ROWS)
    else:
        case, trained_rows = TOYS[name]
        toy_work(folder, case, token_ids=trained_rows)
    reference: Evidence | None = None
    figures: dict[str, Any] = {}
    shares: dict[str, float] = {}
    agree = True
    for backend in BACKENDS:
        if backend == TRL and trained_rows:
            continue
        started = time.monotonic()
        try:
            evidence, seconds = run_backend(
                find_backend(backend, pythons, Path()), folder / "work", folder / Path(backend).stem, timeout=900
            )
        except UserError as error:
            print(f"{name}: {error}", flush=True)
            figures[backend], agree = {"failure": str(error), "seconds": round(time.monotonic() - started)}, False
            continue
        figures[backend] = {"seconds": round(seconds, 1), "versions": evidence.about.versions}
        if reference is None:
            reference = evidence
            continue
        comparison = compare(reference, evidence)
        finding, untested = explain(comparison, reference, evidence)
        print(f"{name}, {seconds:.0f} s: {describe(comparison, finding, untested)}", flush=True)
        figures[backend] |= as_json(comparison, finding)
        agree = agree and comparison.difference is None
        of = {key: getattr(TOLERANCES[key], comparison.dtype) for key in comparison.errors}
        shares[f"{name}: largest share of what is allowed, {backend} and {reference.about.backend}"] = round(
            max(error / of[key] for key, error in comparison.errors.items() if of[key]), 4
        )
    return figures, shares, agree


if __name__ == "__main__":
    sys.exit(main())
