"""Recipes: those that ship, overrides, and complaints that name the key."""

import pytest

from portlab_spec.errors import UserError
from portlab_spec.recipe import Lora, Recipe, field_names, load_recipe, shipped_recipes


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_load_and_carry_their_name(name):
    assert load_recipe(name).name == name


def test_overrides_reach_nested_keys_and_leave_the_rest():
    recipe = load_recipe("functiongemma-fitness", {"lora.rank": 8, "steps": 12})
    assert (recipe.lora.rank, recipe.steps) == (8, 12)
    assert recipe.lora.targets == load_recipe("functiongemma-fitness").lora.targets


def test_a_file_and_its_resolved_dump_agree(tmp_path):
    (tmp_path / "r.yaml").write_text("steps: 7\nlora: {rank: 4}\n")
    recipe = load_recipe(str(tmp_path / "r.yaml"))
    assert Recipe.model_validate(recipe.model_dump(mode="json")) == recipe


def test_scaling():
    assert Lora(rank=16, alpha=32).scaling == 2
    assert Lora(rank=16, alpha=32, use_rslora=True).scaling == 8


def test_every_fault_is_named_in_one_line(tmp_path):
    (tmp_path / "r.yaml").write_text("stesp: 7\nlora: {rank: 0}\nseed: a\n")
    with pytest.raises(UserError) as refused:
        load_recipe(str(tmp_path / "r.yaml"))
    message = str(refused.value)
    assert "unknown key 'stesp' (did you mean 'steps'?)" in message
    assert "lora.rank" in message
    assert "seed" in message
    assert "\n" not in message


def test_field_names_are_dotted():
    assert {"steps", "lora.rank", "optimizer.b2", "mesh.tp"} <= set(field_names())
