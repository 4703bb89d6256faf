"""The reference of recipes, written from the models that check them: docs/recipe-reference.md.

python docs/scripts/recipe_reference.py > docs/recipe-reference.md
"""

import types
from collections.abc import Iterator
from typing import Any, Literal, TypeAliasType, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from portlab_spec.recipe import Recipe

_HEAD = """# Recipe reference

Every key of a recipe, written from the models that check it: what a value may be, what it is when the key is left out.
[Recipes](recipes.md) says how the keys play together. On the command line `lora.rank` is `--lora.rank`.
"""
_LIMITS = {Ge: ("at least", "ge"), Gt: ("above", "gt"), Le: ("at most", "le"), Lt: ("below", "lt")}


def recipe_reference() -> str:
    """The page, Markdown."""
    return "\n".join([_HEAD, *_section("Recipe", Recipe, "")])


def _section(title: str, model: type[BaseModel], prefix: str) -> Iterator[str]:
    parts = {name: field for name, field in model.model_fields.items() if _is_part(field)}
    yield f"## {title}\n"
    yield f"{model.__doc__}\n"
    yield "| key | value | default | meaning |"
    yield "|---|---|---|---|"
    for name, field in model.model_fields.items():
        if name not in parts:
            limits = ", ".join(_limits(field))
            value = f"{_type(field.annotation)}{', ' if limits else ''}{limits}"
            yield f"| `{prefix}{name}` | {value} | {_default(field.default)} | {field.description} |"
    yield ""
    for name, field in parts.items():
        part = field.annotation
        assert isinstance(part, type)
        yield from _section(f"{title} / {name}", part, f"{prefix}{name}.")


def _is_part(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def _limits(field: FieldInfo) -> Iterator[str]:
    for limit in field.metadata:
        if type(limit) in _LIMITS:
            words, attribute = _LIMITS[type(limit)]
            yield f"{words} {getattr(limit, attribute)}"
        elif isinstance(limit, MinLen):
            yield "not empty"


def _type(annotation: Any) -> str:
    """What a value may be, in YAML's terms."""
    if isinstance(annotation, TypeAliasType):
        return _type(annotation.__value__)
    origin, args = get_origin(annotation), get_args(annotation)
    if hasattr(annotation, "__metadata__"):  # Annotated
        return _type(args[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in args)
    if origin in (Union, types.UnionType):
        return " or ".join(_type(arg) for arg in args)
    if origin is tuple:
        return f"list of {_type(args[0])}"
    if origin is dict:
        return f"map of {_type(args[0])} to {_type(args[1])}"
    return {int: "whole number", float: "number", bool: "`true`, `false`", str: "text", type(None): "null"}[annotation]


def _default(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple | dict):
        return ", ".join(f"`{item}`" for item in value) or "none"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


if __name__ == "__main__":
    print(recipe_reference(), end="")
