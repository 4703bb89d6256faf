"""What `plan-tpu --backend torchax` compiles is the step of a run, without its weights."""

import importlib.util
import json

import jax
import pytest
from eight_devices import on_eight_devices, run_on_eight_devices

from portlab_jax.planner.plan import compile_job
from portlab_jax.planner.program import Program
from portlab_jax.planner.records import Job
from portlab_spec.packing import pack_batch
from portlab_spec.planning import Question, find_trainer
from portlab_spec.recipe import Recipe
from portlab_torchax.setup import initial_state, jit_step

MESH = {"data": 2, "fsdp": 2, "tp": 2}
LORA = {"batch_size": 8}
RUNS = {
    "gemma3": ("gemma3, two kv heads", LORA),
    "gemma3, dropout": ("gemma3, two kv heads", LORA | {"lora": {"dropout": 0.1}}),
    "gemma4, keys are values": ("gemma4, keys are values", LORA),
    "gemma4, experts": ("gemma4, experts", LORA),
    "llama": ("llama", LORA),
    "qwen3": ("qwen3", LORA),
    "all weights, bfloat16": ("gemma3, two kv heads", LORA | {"method": "full", "dtype": "bfloat16"}),
    "bfloat16, adafactor": ("gemma3, two kv heads", LORA | {"dtype": "bfloat16", "optimizer": {"name": "adafactor"}}),
}

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is not installed"
)


def test_the_file_on_eight_devices():
    run_on_eight_devices(__file__, "-k", "on_a_mesh")


@pytest.mark.parametrize("case", RUNS)
def test_the_abstract_step_takes_what_a_run_gives_it(case, toy, make_rows):
    takes_what_a_run_gives_it(case, toy, make_rows)


@on_eight_devices
@pytest.mark.parametrize("case", RUNS)
def test_on_a_mesh_it_takes_it_in_the_same_places(case, toy, make_rows):
    takes_what_a_run_gives_it(case, toy, make_rows, mesh=MESH)


def takes_what_a_run_gives_it(case, toy, make_rows, **more):
    model, changes = RUNS[case]
    setup = toy(model, **changes, **more)
    rows = make_rows(8)
    config = json.loads((setup.model.path / "config.json").read_text())
    question = Question(setup.recipe, config, setup.token_ids, [rows], jax.devices(), 2**34)
    drawn = find_trainer("torchax").load()(question)
    (step,) = drawn.steps
    assert drawn.plan == setup.plan([rows], max_shapes=setup.recipe.max_shapes)
    assert drawn.mesh == setup.placement.shape
    batch = setup.placement.put_rows(pack_batch(rows, step.layout), axis=1)
    assert described(step.arguments) == described((initial_state(setup), setup.frozen, batch))


def described(tree):
    """Shape, type and place of every array, by path."""
    return {
        jax.tree_util.keystr(path): (leaf.shape, leaf.dtype, leaf.sharding.spec, leaf.sharding.mesh)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def test_the_abstract_step_is_the_program_of_a_run(toy, make_rows):
    setup = toy("gemma3, two kv heads", batch_size=8)
    rows = make_rows(8)
    config = json.loads((setup.model.path / "config.json").read_text())
    question = Question(setup.recipe, config, setup.token_ids, [rows], jax.devices(), 2**34)
    (step,) = find_trainer("torchax").load()(question).steps
    state, batch = initial_state(setup), setup.placement.put_rows(pack_batch(rows, step.layout), axis=1)
    run = jit_step(setup, state, step.layout).lower(state, setup.frozen, batch)
    assert step.function.lower(*step.arguments).as_text() == run.as_text()


@needs_compiler
def test_it_compiles_for_a_slice_from_a_config_alone(toy_folder, tmp_path):
    config = json.loads((toy_folder("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    settings = {"model": str(tmp_path), "batch_size": 8, "max_length": 128}
    settings["lora"] = {"rank": 4, "alpha": 8, "targets": ["q_proj"], "train_control_rows": False}
    recipe = Recipe.model_validate(settings).model_dump(mode="json")
    result = compile_job(Job("train", recipe, "v5e-8", "torchax", length=128))
    assert not result.error
    (shape,) = result.programs["shapes"]
    assert (shape["attention"], shape["analytic"]) == ({"full": "xla"}, None)
    program = Program.from_json(shape["program"])
    assert program.fits
    assert program.flops > 0
    assert {"torch", "torchax", "transformers", "libtpu"} <= set(result.versions)
