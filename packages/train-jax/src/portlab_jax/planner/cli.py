"""`plan-tpu`: what a recipe needs, takes and costs on TPU slices, by the real compiler and without a TPU."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import tyro

from portlab_jax.planner.topology import prepare_environment
from portlab_spec import cli, prices
from portlab_spec.errors import UserError
from portlab_spec.files import write_text
from portlab_spec.hardware import Slice, parse_slice
from portlab_spec.planning import find_trainer
from portlab_spec.recipe import Recipe
from portlab_spec.run.command_line import DEFAULT_RECIPE, parse_with_recipe

Backend = Literal["jax", "torchax", "xla"]


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Compile a recipe's training step for TPU slices with the real TPU compiler: memory, FLOPs, traffic, time, cost.

    No TPU, no network and no weights are needed. Every field of the recipe is an option; what is not given comes from
    the recipe.
    """

    settings: Annotated[Recipe, tyro.conf.arg(name="")]
    recipe: str = DEFAULT_RECIPE
    """Recipe by name or path to a YAML file."""
    slice: tuple[str, ...] = ("v6e-8",)
    """Slices by their Cloud names, such as v5p-8 or v6e-8."""
    length: int | None = None
    """Plan for rows of so many tokens that share nothing, instead of the recipe's data."""
    supervised: int | None = None
    """Targets among these tokens; by default an eighth of them."""
    search: bool = False
    """Look for the best mesh, remat policy, share of the batch at a time and chunk of logits."""
    by: Literal["cost", "time"] = "cost"
    """What the search makes small."""
    tries: int = 4
    """Settings of a slice that the search compiles at most."""
    infer: tuple[Literal["prefill", "decode"], ...] = ()
    """Compile steps of inference instead of the training step."""
    sequences: int = 1
    """Sequences of an inference step."""
    context: int = 2048
    """Tokens of each of them."""
    provider: str = "google"
    """Whose prices count."""
    region: str | None = None
    """Region whose prices count; by default the cheapest."""
    pay: prices.Plan = "on_demand"
    """Way of paying."""
    prices: Path | None = None
    """Price list; by default the shipped one."""
    backend: Backend = "jax"
    """Trainer whose step is planned."""
    json: bool = False
    """Print JSON instead of tables."""
    html: Path | None = None
    """Also write a report with pictures to this file."""
    png: Path | None = None
    """Also write the picture to this file."""


def main(args: list[str]) -> int:
    """Plan and print; 1 if nothing fits."""
    arguments = parse_with_recipe(Arguments, args, "plan-tpu")
    check(arguments)
    parts = [parse_slice(name) for name in arguments.slice]
    prepare_environment()
    # JAX is imported only now, so that --help and bad usage answer at once.
    from portlab_jax.planner import display, runs

    wishes = runs.Wishes(
        recipe=arguments.settings,
        backend=arguments.backend,
        length=arguments.length,
        supervised=arguments.supervised,
        by=arguments.by,
        tries=arguments.tries,
    )
    if arguments.infer:
        steps = runs.plan_inference(wishes, parts, arguments.infer, arguments.sequences, arguments.context)
        if arguments.json:
            print(json.dumps([step.to_json() for step in steps], indent=2))
        else:
            display.show_inference(steps)
        return 0 if any(step.program.fits for step in steps) else 1
    priced = {part.name: price_of(arguments, part) for part in parts}
    planned = runs.plan_all(wishes, parts, priced, search=arguments.search)
    if arguments.json:
        print(json.dumps([plan.to_json() for plan in planned], indent=2))
    else:
        display.show(planned, searched=arguments.search)
    if arguments.html or arguments.png:
        from portlab_jax.planner import picture

        if arguments.png:
            picture.draw(planned, arguments.png)
        if arguments.html:
            write_text(arguments.html, picture.html(planned))
    return 0 if any(plan.fits for plan in planned) else 1


def check(arguments: Arguments) -> None:
    """Refuse what cannot be planned.

    Raises:
        UserError: a backend without plans, or not installed; no slice; counts below one.
    """
    if arguments.backend == "xla":
        raise UserError(
            "the step of xla cannot be planned: torch_xla traces its step on a device of its own and hands no program "
            "to the compiler beforehand: neither its memory nor its time can be planned",
            where="--backend",
            fix="Plan with the JAX trainer, whose model, batch and adapter are the same",
        )
    if arguments.backend != "jax":
        if arguments.search or arguments.infer:
            raise UserError(
                "--search and --infer are about train-jax's own model",
                where=f"--backend {arguments.backend}",
                fix="Leave them out, or the backend",
            )
        find_trainer(arguments.backend)
    if not arguments.slice:
        raise UserError("no slice is named", where="--slice", fix="Give one or more, such as v5p-8 v6e-8")
    for name in ("tries", "sequences", "context"):
        if getattr(arguments, name) < 1:
            raise UserError("must be 1 or more", where=f"--{name}")
    if arguments.infer and (arguments.html or arguments.png or arguments.search):
        raise UserError(
            "goes with none of --search, --html and --png", where="--infer", fix="Use --json, or plan training"
        )


def price_of(arguments: Arguments, part: Slice) -> prices.Price | None:
    """The price of a chip; None if none is known for it at all.

    Raises:
        UserError: it has prices, but none that meets the wishes.
    """
    records = prices.load_prices(arguments.prices)
    if not any(record.sku == part.chip.name for record in records):
        return None
    return prices.find_price(
        part.chip.name, provider=arguments.provider, region=arguments.region, plan=arguments.pay, prices=records
    )


def entry() -> NoReturn:
    """Console script."""
    cli.run("plan-tpu", main)
