"""docs/recipe-reference.md is what the models say, and says something of every key."""

from pathlib import Path

import pytest
from recipe_reference import recipe_reference

from portlab_spec.recipe import Lora, Mesh, Optimizer, Profile, Recipe

PAGE = Path(__file__).parents[3] / "docs" / "recipe-reference.md"


def test_the_page_is_what_the_models_say():
    assert PAGE.read_text() == recipe_reference(), "python docs/scripts/recipe_reference.py > docs/recipe-reference.md"


def test_every_key_is_there_once_with_a_meaning():
    parts = {"lora.": Lora, "optimizer.": Optimizer, "mesh.": Mesh, "profile.": Profile}
    keys = [name for name in Recipe.model_fields if f"{name}." not in parts]
    keys += [prefix + name for prefix, part in parts.items() for name in part.model_fields]
    rows = [line.strip("| ").split(" | ") for line in recipe_reference().splitlines() if line.startswith("| `")]
    assert sorted(row[0].strip("`") for row in rows) == sorted(keys)
    assert all(len(row) == 4 and len(row[3]) > 8 and "None" not in row[1] for row in rows)


@pytest.mark.parametrize(
    "line",
    [
        "| `lora.dropout` | number, at least 0, below 1 | `0` | dropout on the adapter's input while training |",
        "| `profile.steps` | whole number, at least 0 | `0` | traced steps; 0 traces nothing |",
        "| `revision` | text or null | null | Hugging Face revision of the model |",
    ],
)
def test_types_limits_and_defaults(line):
    assert line in recipe_reference().splitlines()
