"""Run folders: their names, and which run may go on in which."""

import json
from pathlib import Path

import pytest

from portlab_spec.errors import UserError
from portlab_spec.files import sha256_json
from portlab_spec.recipe import Optimizer, Recipe, load_recipe
from portlab_spec.run.folder import run_folder, write_stamp

RECIPE = Recipe(name="mine")
DIGEST = sha256_json(RECIPE.model_dump(mode="json"))[:8]


@pytest.mark.parametrize(("backend", "name"), [("jax", f"mine-{DIGEST}"), ("xla", f"mine-xla-{DIGEST}")])
def test_the_default_is_named_after_recipe_backend_and_values(backend, name):
    assert run_folder(RECIPE, None, backend) == Path("runs") / name


def test_other_values_are_another_folder():
    assert run_folder(RECIPE.model_copy(update={"seed": 1}), None) != run_folder(RECIPE, None)


@pytest.mark.parametrize("backend", ["jax", "xla"])
def test_the_same_run_goes_on(tmp_path, backend):
    write_stamp(tmp_path, RECIPE, backend)
    (tmp_path / "before.json").write_text("{}")
    assert run_folder(RECIPE, tmp_path, backend) == tmp_path


def test_a_folder_of_an_earlier_version_goes_on(tmp_path):
    """Runs of train-jax are marked by the recipe alone."""
    (tmp_path / "recipe.json").write_text(json.dumps(RECIPE.model_dump(mode="json")))
    assert run_folder(RECIPE, tmp_path) == tmp_path


def test_a_run_of_train_jax_has_one_stamp(tmp_path):
    write_stamp(tmp_path, RECIPE)
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.json"]


@pytest.mark.parametrize("backend", ["jax", "xla"])
def test_the_stamp_is_a_recipe(tmp_path, backend):
    write_stamp(tmp_path, RECIPE, backend)
    assert load_recipe(str(tmp_path / "recipe.json")) == RECIPE


def test_an_empty_folder_becomes_a_run(tmp_path):
    assert run_folder(RECIPE, tmp_path) == tmp_path


def test_other_settings_are_named(tmp_path):
    write_stamp(tmp_path, RECIPE)
    other = RECIPE.model_copy(update={"seed": 7, "optimizer": Optimizer(b1=0.5)})
    with pytest.raises(UserError, match=r"holds a run with other settings \(optimizer\.b1, seed\)"):
        run_folder(other, tmp_path)


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(UserError, match="is not empty and holds no run"):
        run_folder(RECIPE, tmp_path)


@pytest.mark.parametrize(("of", "by"), [("jax", "xla"), ("xla", "jax"), ("torchax", "xla")])
def test_a_run_of_another_trainer_is_refused(tmp_path, of, by):
    write_stamp(tmp_path, RECIPE, of)
    with pytest.raises(UserError, match=f"holds a run of train-{of}. Choose another --out"):
        run_folder(RECIPE, tmp_path, by)


def test_a_kill_between_the_stamps_leaves_a_run_that_goes_on(tmp_path):
    write_stamp(tmp_path, RECIPE, "xla")
    (tmp_path / "recipe.json").unlink()
    assert run_folder(RECIPE, tmp_path, "xla") == tmp_path
    with pytest.raises(UserError, match="holds a run of train-xla"):
        run_folder(RECIPE, tmp_path)
