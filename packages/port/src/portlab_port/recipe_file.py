"""The recipe as YAML."""

import yaml

from portlab_port.build import Ported
from portlab_port.port import nested
from portlab_port.settings import GpuRecipe
from portlab_spec.recipe import Recipe, field_names


def recipe_text(ported: Ported, gpu: GpuRecipe) -> str:
    """What was decided, in the order of a recipe's keys; keys that are left out have a recipe's defaults."""
    dumped = ported.recipe.model_dump(mode="json")
    fields = {}
    for name in _order(ported.written):
        value = dumped
        for part in name.split("."):
            value = value[part]
        fields[name] = value
    body = yaml.dump(
        nested(fields), Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=120, allow_unicode=True
    )
    text = f"# Ported from {' '.join(gpu.source.split())} ({gpu.style}).\n{body}"
    if Recipe.model_validate(yaml.safe_load(text)) != ported.recipe:
        raise AssertionError("the recipe's text does not say what the recipe says")
    return text


def _order(written: tuple[str, ...]) -> list[str]:
    place = {name: number for number, name in enumerate(field_names())}
    return sorted(written, key=lambda name: place[name])


class _Dumper(yaml.SafeDumper):
    """Lists of words in one line."""


def _words(dumper: _Dumper, value: list[object]) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True)


_Dumper.add_representer(list, _words)
