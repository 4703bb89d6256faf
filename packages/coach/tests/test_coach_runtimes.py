"""Who runs a model folder: the first that is installed and knows the model, or who is asked for."""

import sys

import pytest

from fitnesscoach.backends import runtimes
from fitnesscoach.cli import main
from portlab_spec.decoding import GROUP, find_decoder
from portlab_spec.errors import UserError
from portlab_spec.models import UnsupportedModel


def jax(folder):
    return f"jax runs {folder}"


def jax_without_qwen(folder):
    raise UnsupportedModel("there are no layers of qwen3", where="model", fix="Use another trainer")


def damaged(folder):
    raise UserError("a tensor is missing", where=folder)


def transformers(folder):
    return f"transformers runs {folder}"


@pytest.fixture
def installed(monkeypatch):
    def install(**loaders):
        monkeypatch.setattr(runtimes, "find_loader", loaders.get)

    return install


def test_jax_comes_first(installed):
    installed(jax=jax, transformers=transformers)
    assert runtimes.load_decoder("model") == "jax runs model"
    assert runtimes.load_decoder("model", "transformers") == "transformers runs model"


def test_what_is_installed_is_used(installed):
    installed(transformers=transformers)
    assert runtimes.load_decoder("model") == "transformers runs model"


def test_a_family_that_one_does_not_know_goes_to_the_other(installed):
    installed(jax=jax_without_qwen, transformers=transformers)
    assert runtimes.load_decoder("model") == "transformers runs model"


def test_a_damaged_folder_does_not(installed):
    installed(jax=damaged, transformers=transformers)
    with pytest.raises(UserError, match="a tensor is missing"):
        runtimes.load_decoder("model")


@pytest.mark.parametrize(
    ("there", "asked", "message"),
    [
        (
            {},
            None,
            r"nothing that runs .* Install fitnesscoach\[jax\] or fitnesscoach\[transformers\], or serve it and",
        ),
        (
            {"jax": jax},
            "transformers",
            r"--runtime transformers is not installed\. Install fitnesscoach\[transformers\],",
        ),
        ({"transformers": transformers}, "jax", r"--runtime jax is not installed\. Install fitnesscoach\[jax\],"),
        ({"jax": jax_without_qwen, "transformers": transformers}, "jax", "qwen3. Pass --runtime transformers$"),
        ({"jax": jax_without_qwen}, None, r"qwen3. Install fitnesscoach\[transformers\]$"),
    ],
    ids=["neither", "no transformers", "no jax", "jax refuses", "jax alone refuses"],
)
def test_what_cannot_be_run_is_one_line(installed, there, asked, message):
    installed(**there)
    with pytest.raises(UserError, match=f"^model: .*{message}") as refused:
        runtimes.load_decoder("model", asked)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("runtime", runtimes.RUNTIMES)
def test_a_runtime_whose_framework_is_missing_is_not_installed(monkeypatch, runtime):
    for name in ("fitnesscoach.backends.torch_decoder", "portlab_jax.streaming"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it fails
    assert runtimes.find_loader(runtime) is None


def test_who_names_itself_is_found(monkeypatch):
    monkeypatch.setattr("portlab_spec.decoding.entry_points", lambda group, name: [f"{name} of {group}"])
    assert find_decoder("jax") == f"jax of {GROUP}"


def test_an_incomplete_folder_is_one_line(tmp_path):
    with pytest.raises(UserError, match=f"{tmp_path}: holds no config.json"):
        main(["ask", "x", "--model", str(tmp_path)])
