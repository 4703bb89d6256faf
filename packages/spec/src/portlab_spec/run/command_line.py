"""Command lines on which every field of a recipe is an option."""

import inspect

import tyro
from pydantic import ValidationError

from portlab_spec.recipe import invalid, load_recipe, shipped_recipes

DEFAULT_RECIPE = "functiongemma-fitness"


def parse_with_recipe[T](kind: type[T], args: list[str], prog: str) -> T:
    """Read a command line whose options override the recipe that `--recipe` names.

    Args:
        kind: dataclass with the fields `settings`, a recipe, and `recipe`, its name; its docstring is the help.
        args: behind the program's name.
        prog: the program's name.

    Raises:
        UserError: no such recipe, or an impossible combination of values.
        SystemExit: bad usage (2) or `--help` (0), from tyro.
    """
    name = DEFAULT_RECIPE
    for i, arg in enumerate(args):
        if arg == "--recipe" and i + 1 < len(args):
            name = args[i + 1]
        elif arg.startswith("--recipe="):
            name = arg.partition("=")[2]
    default = kind(settings=load_recipe(name), recipe=name)  # type: ignore[call-arg]
    description = f"{inspect.cleandoc(kind.__doc__ or '')}\n\nShipped recipes: {', '.join(shipped_recipes())}."
    try:
        return tyro.cli(kind, args=args, default=default, prog=prog, description=description)
    except ValidationError as error:
        raise invalid(error, "command line") from None
