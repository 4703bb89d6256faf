"""Recipes: those that ship, overrides, and complaints that name the key."""

import pytest

from portlab_spec.errors import UserError
from portlab_spec.recipe import Lora, Mesh, Recipe, field_names, load_recipe, shipped_recipes


@pytest.fixture
def complaint(tmp_path):
    """The one line that a recipe of this text is refused with."""

    def load(text):
        (tmp_path / "r.yaml").write_text(text)
        with pytest.raises(UserError) as refused:
            load_recipe(str(tmp_path / "r.yaml"))
        assert "\n" not in str(refused.value)
        return str(refused.value)

    return load


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
    assert {"steps", "lora.rank", "optimizer.b2", "mesh.tp", "profile.steps"} <= set(field_names())


@pytest.mark.parametrize(("old", "new"), [("true", "block"), ("false", "none")])
def test_an_old_remat_switch_says_what_to_write(complaint, old, new):
    assert f"write remat: {new}" in complaint(f"remat: {old}")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("batch_size: 32\naccumulate: 3", "accumulate (3) must divide batch_size (32)"),
        ("steps: 9\noptimizer: {warmup_steps: 9}", "optimizer.warmup_steps (9) must be below steps (9)"),
        ("steps: 10\noptimizer: {schedule: wsd, warmup_steps: 6, decay_fraction: 0.5}", "5 steps of optimizer.decay_"),
        ("steps: 10\nprofile: {start: 9, steps: 3}", "lead past steps (10)"),
        ("patience: 2", "patience needs a monitored loss: set eval_every"),
        ("keep_best: true", "keep_best needs a monitored loss: set eval_every"),
        ("eval_every: 99", "eval_every (99) must not exceed steps (30)"),
        ("eval_every: 5\ntrain_splits: [train, validation]", "monitor_split 'validation' is trained on"),
        ("eval_every: 5\nmonitor_split: test\nkeep_best: true", "keep_best would choose by the test split"),
        ("eval_split: validation\ntrain_splits: [train, validation]", "eval_split 'validation' is trained on"),
        ("method: full\nlora: {quantize: nf4}", "lora.quantize nf4 would freeze"),
        ("method: full\nlora: {start_from: runs/a}", "remove lora.start_from"),
        ("lora: {targets: ['q_proj(']}", "not a regular expression"),
        ("lora: {rank_pattern: {'*': 4}}", "not a regular expression"),
        ("lora: {rank_pattern: {q_proj: 0}}", "lora.rank_pattern.q_proj"),
        ("lora: {alpha_pattern: {q_proj: .inf}}", "lora.alpha_pattern.q_proj"),
    ],
)
def test_an_impossible_combination_is_named(complaint, text, says):
    assert says in complaint(text)


def test_the_monitored_loss_may_be_of_the_test_split_if_nothing_is_chosen_by_it():
    assert Recipe(eval_every=5, monitor_split="test").monitor_split == "test"


def test_a_mesh_is_open_until_someone_sets_it():
    assert Mesh() == Mesh(data=None, fsdp=None, tp=None)


def test_two_faults_are_both_told(complaint):
    line = complaint("patience: 2\naccumulate: 3")
    assert "patience needs" in line
    assert "must divide" in line
