"""`train-torchax`: the main job through torchax, on the command line."""

import dataclasses
from pathlib import Path
from typing import Annotated, NoReturn

import tyro

from portlab_spec import cli
from portlab_spec.recipe import Recipe
from portlab_spec.run.command_line import DEFAULT_RECIPE, parse_with_recipe
from portlab_torchax import TRAINER


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Fine-tune a model of transformers with one compiled JAX step, score it before and after, export and verify it.

    Every field of the recipe is an option; what is not given comes from the recipe. JAX chooses the device.
    """

    settings: Annotated[Recipe, tyro.conf.arg(name="")]
    recipe: str = DEFAULT_RECIPE
    """Recipe by name or path to a YAML file."""
    out: Path | None = None
    """Run folder; by default one under runs/ named after the recipe and its values."""
    json: bool = False
    """Print the report as JSON instead of a table."""


def parse(args: list[str]) -> Arguments:
    """Read the command line of `train-torchax`."""
    return parse_with_recipe(Arguments, args, TRAINER)


def main(args: list[str]) -> int:
    """Run the main job and print its outcome."""
    arguments = parse(args)
    # PyTorch and JAX are imported only now, so that --help and bad usage answer at once.
    from portlab_spec.run import display
    from portlab_torchax import main_job

    say = display.stage_printer(quiet=arguments.json)
    outcome = main_job.run(arguments.settings, arguments.out, say)
    if arguments.json:
        print(outcome.report.model_dump_json(indent=2))
    else:
        display.show(outcome)
    return 0


def entry() -> NoReturn:
    """Console script."""
    cli.run(TRAINER, main)
