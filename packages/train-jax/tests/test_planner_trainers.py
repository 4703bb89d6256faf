"""Steps of other trainers: whom the planner asks, what it asks, and what becomes of the answer. Nothing is compiled."""

import json
from importlib.metadata import EntryPoint

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from canned_plans import TOO_LARGE, CannedCompiler, canned_program
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from portlab_jax.planner import cli
from portlab_jax.planner.training import compile_offered
from portlab_jax.planner.workload import find_workload
from portlab_spec import planning
from portlab_spec.errors import UserError
from portlab_spec.hardware import parse_slice
from portlab_spec.packing import Packing, plan
from portlab_spec.planning import GROUP, AbstractStep, AbstractSteps, find_trainer
from portlab_spec.recipe import Recipe

QWEN = {
    "model_type": "qwen3",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
asked = []


def draw_steps(question):
    """A trainer that is none, with one weight."""
    asked.append(question)
    packing = Packing(groups=2, window=None)
    found = plan(question.batches, packing)
    place = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("fsdp",)), PartitionSpec("fsdp"))
    weight = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=place)
    steps = (AbstractStep(layout, "the step", (weight,), {"weights": weight}) for layout in found.layouts)
    return AbstractSteps({"fsdp": 2}, {"full": "its own"}, found, steps, {"torch": "2.9.1"})


@pytest.fixture
def installed(monkeypatch):
    """Installs a trainer named `other` beside the planner."""
    entry = EntryPoint("other", f"{__name__}:draw_steps", GROUP)

    def find(group, name):
        return [entry] if (group, name) == (GROUP, "other") else []

    monkeypatch.setattr(planning, "entry_points", find)


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    settings = {"model": str(tmp_path), "batch_size": 4, "max_length": 64, "steps": 7}
    return Recipe.model_validate(settings | {"lora": {"train_control_rows": False}})


def test_a_trainer_that_is_not_installed_is_named_with_its_remedy(installed):
    with pytest.raises(UserError, match=r"train-torchax is not installed .*pip install packages/hf packages/train-tor"):
        find_trainer("torchax")


def test_the_trainer_of_that_name_is_found(installed):
    assert find_trainer("other").name == "other"


def test_it_is_asked_for_the_steps_of_the_recipes_rows(recipe):
    asked.clear()
    compiled_by(recipe)
    (question,) = asked
    assert question.model == QWEN
    assert [len(row.ids) for row in question.batches[0]] == [64] * 4
    assert (question.recipe, question.devices, question.token_ids) == (recipe, ["a device"], ())
    assert question.device_memory == parse_slice("v5e-8").device_memory


def test_what_it_hands_over_is_compiled(recipe):
    programs, compiled = compiled_by(recipe)
    ((function, (weight,)),) = compiled
    assert (function, weight.shape) == ("the step", (8, 4))
    (shape,) = programs.shapes
    assert (shape.steps, shape.attention, shape.analytic) == (7, {"full": "its own"}, None)
    assert (programs.mesh, programs.arguments, programs.rows) == ({"fsdp": 2}, {"weights": 128}, 4)
    assert (programs.tokens, programs.versions) == (256.0, {"torch": "2.9.1"})


def compiled_by(recipe):
    compiled = []

    def compiler(function, *args):
        compiled.append((function, args))
        return canned_program()

    work = find_workload(recipe, length=64, gemma_only=False)
    return compile_offered(draw_steps, recipe, work, parse_slice("v5e-8"), ["a device"], compiler), compiled


def test_rows_of_another_family_need_its_tokenizer(recipe):
    with pytest.raises(UserError, match=r"tokenizer.json is missing, and qwen3 splits text in its own way"):
        find_workload(recipe, gemma_only=False)


class TestTheCommand:
    @pytest.fixture(autouse=True)
    def found(self, monkeypatch):
        monkeypatch.setattr(cli, "prepare_environment", lambda: None)
        monkeypatch.setattr(cli, "find_trainer", lambda backend: None)

    def test_the_compiling_process_is_told_whose_step_it_is(self, monkeypatch, capsys):
        jobs = []
        canned = CannedCompiler(lambda recipe: canned_program())
        monkeypatch.setattr("portlab_jax.planner.plan.compile_job", lambda job: jobs.append(job) or canned(job))
        assert cli.main(["--slice", "v5e-8", "--backend", "torchax"]) == 0
        assert [job.backend for job in jobs] == ["torchax"]

    def test_no_advice_is_taken_from_the_model_of_another_trainer(self, monkeypatch, capsys):
        compiler = CannedCompiler(lambda recipe: canned_program(**TOO_LARGE)).install(monkeypatch)
        assert cli.main(["--slice", "v5e-8", "--backend", "torchax"]) == 1
        assert compiler.ranked == []
        assert "DOES NOT FIT" in capsys.readouterr().out
