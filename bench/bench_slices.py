"""The shipped recipes' steps, compiled for TPU slices by the TPU compiler: memory, FLOPs, traffic, collectives.

    nox -s bench_slices                        all of them; bench/results/bench_slices.json
    nox -s bench_slices -- --only gemma3-270m  one of them (nothing is written)

Compiled programs are remembered in the user cache: a second run only reads them; PORTLAB_CACHE moves it. The figures
of compile time and memory are those of the run that compiled.
"""

import argparse
import time
from dataclasses import asdict
from typing import Any, NamedTuple

from portlab_jax.planner import display
from portlab_jax.planner.cli import Arguments, price_of
from portlab_jax.planner.plan import Planned, plan
from portlab_jax.planner.runs import Wishes
from portlab_spec.errors import CheckFailed
from portlab_spec.hardware import parse_slice
from portlab_spec.recipe import load_recipe
from result_file import write_result


class Case(NamedTuple):
    """A recipe on some slices; `length` plans for made-up rows of so many tokens that share nothing."""

    recipe: str
    slices: tuple[str, ...]
    overrides: dict[str, Any]
    length: int | None = None
    supervised: int | None = None


EIGHT = ("v5e-8", "v6e-8", "v5p-8", "tpu7x-8")
LONG = {"share_prefix": False, "pack": False}
CASES = {
    "gemma4-31b": Case("gemma4-31b-lora", ("v5p-8", "v6e-8", "v6e-16", "v5e-8", "tpu7x-8"), LONG, 2048, 256),
    "gemma4-31b-fitness": Case("gemma4-31b-lora", ("v6e-8",), {}),
    "gemma3-270m": Case("functiongemma-fitness", EIGHT, {}),
    "gemma3-1b": Case("gemma3-1b-dolly", EIGHT, LONG, 1024, 256),
}


def main() -> None:
    """Compile every case and write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CASES)
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    ratios: dict[str, float] = {}
    plans: list[Planned] = []
    for name, case in CASES.items():
        if args.only not in (None, name):
            continue
        for part in map(parse_slice, case.slices):
            recipe = load_recipe(case.recipe, case.overrides)
            wishes = Wishes(recipe, length=case.length, supervised=case.supervised)
            started = time.perf_counter()
            planned = plan(wishes.job(part), part, price_of(Arguments(recipe), part))
            if planned.result.error and not planned.shapes:
                raise CheckFailed(planned.result.error, where=f"{name} on {part.name}", fix="The compiler said so")
            plans.append(planned)
            figures[f"{name} on {part.name}"] = figures_of(planned, time.perf_counter() - started)
            for raw, (_, program) in zip(planned.result.programs["shapes"], planned.shapes, strict=True):
                if not program.memory:
                    continue  # refused: the compiler says how much it would need, and has counted nothing
                counted = sum(raw["analytic"]["flops"].values())
                ratios[f"{name} on {part.name}: FLOPs, compiled / analytic"] = round(program.flops / counted, 4)
    display.show(plans, searched=False)
    for what, value in ratios.items():
        print(f"{what}: {value:.3f}")
    if args.only is None:
        distributions = ("portlab-train-jax", "jax", "jaxlib", "libtpu")
        path = write_result("bench_slices", distributions, figures, ratios, evidence="compiled")
        print(f"wrote {path}")


def figures_of(planned: Planned, seconds: float) -> dict[str, Any]:
    """What a table shows of a plan."""
    programs = planned.result.programs
    return {
        "mesh": programs["mesh"],
        "fits": planned.fits,
        "hbm_needed": planned.needed,
        "hbm_usable": planned.usable,
        "arguments": programs["arguments"],
        "shapes": [
            {key: value for key, value in shape.items() if key != "program"}
            | {"program": {key: value for key, value in shape["program"].items() if key != "largest"}}
            for shape in programs["shapes"]
        ],
        "modelled": planned.estimate and asdict(planned.estimate),
        "price": planned.price and planned.price.model_dump(mode="json"),
        "wall_seconds": round(seconds, 1),
        "compiled_now": planned.result.compiled,
    }


if __name__ == "__main__":
    main()
