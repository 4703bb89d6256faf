"""Every kind of recipe value on the command line: optional, list, map, switch, choice."""

import pytest

from portlab_jax.cli import parse
from portlab_spec import cli
from portlab_spec.errors import UserError
from portlab_spec.recipe import load_recipe


def settings(*args):
    return parse(list(args)).settings


def test_nothing_given_is_the_recipe():
    assert settings("--recipe", "gemma4-31b-lora") == load_recipe("gemma4-31b-lora")


@pytest.mark.parametrize(
    ("args", "key", "value"),
    [
        (["--mesh.tp", "4"], "mesh.tp", 4),
        (["--mesh.data", "None"], "mesh.data", None),
        (["--lora.start-from", "runs/a"], "lora.start_from", "runs/a"),
        (
            ["--lora.targets", "q_proj", r".*layers\.[0-3]\..*v_proj"],
            "lora.targets",
            ("q_proj", r".*layers\.[0-3]\..*v_proj"),
        ),
        (["--lora.rank-pattern", "q_proj", "4", "v_proj", "8"], "lora.rank_pattern", {"q_proj": 4, "v_proj": 8}),
        (["--trackers", "tensorboard", "trackio"], "trackers", ("tensorboard", "trackio")),
        (["--no-share-prefix"], "share_prefix", False),
        (["--lora.use-rslora"], "lora.use_rslora", True),
        (["--remat", "offload"], "remat", "offload"),
        (["--optimizer.schedule", "wsd"], "optimizer.schedule", "wsd"),
        (["--profile.steps", "2"], "profile.steps", 2),
        (["--lora.quantize", "nf4"], "lora.quantize", "nf4"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_an_option_sets_its_key_alone(args, key, value):
    section, _, leaf = key.rpartition(".")
    dumps = [recipe.model_dump() for recipe in (settings(*args), load_recipe("functiongemma-fitness"))]
    found, _ = [(dump[section] if section else dump).pop(leaf) for dump in dumps]
    assert found == value
    assert dumps[0] == dumps[1]


def test_a_list_may_be_emptied(tmp_path):
    (tmp_path / "r.yaml").write_text("trackers: [tensorboard]")
    assert settings("--recipe", str(tmp_path / "r.yaml"), "--trackers").trackers == ()


def test_an_impossible_combination_names_the_command_line():
    with pytest.raises(UserError, match=r"command line: accumulate \(3\) must divide batch_size \(32\)"):
        settings("--accumulate", "3")


def test_a_choice_that_is_none_of_them_is_bad_usage(capsys):
    with pytest.raises(SystemExit) as end:
        cli.run("train-jax", lambda args: parse(args) and 0, ["--remat", "True"])
    assert end.value.code == 2
    assert "block" in capsys.readouterr().err
