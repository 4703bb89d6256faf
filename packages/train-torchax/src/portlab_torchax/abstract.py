"""The run without weights, for devices that are not here: what `plan-tpu --backend torchax` compiles.

The model is built by the same code on PyTorch's meta device, where tensors have a shape and a type alone; what the step
takes becomes abstract arrays in the places where a run puts its own.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from portlab_spec.assets import ModelFolder
from portlab_spec.models import GemmaConfig
from portlab_spec.packing import Batch, Plan, pack_batch
from portlab_spec.planning import AbstractStep, AbstractSteps, Question
from portlab_spec.report import versions
from portlab_torchax.functional import Values
from portlab_torchax.mesh import Placement
from portlab_torchax.session import LIBRARIES
from portlab_torchax.setup import Blueprint, draw_up, jit_step, opt_shardings
from portlab_torchax.step import TrainState


def draw_steps(question: Question) -> AbstractSteps:
    """The steps of a run; entry point `torchax` of `portlab.planner`.

    Raises:
        UserError: what training itself would refuse.
    """
    recipe = question.recipe
    drawn = draw_abstract(question)
    plan = drawn.plan(question.batches, accumulate=recipe.accumulate, max_shapes=recipe.max_shapes)
    return AbstractSteps(
        mesh=drawn.placement.shape,
        attention={kind.attention: "xla" for kind in drawn.config.layers},
        plan=plan,
        steps=_steps(drawn, question, plan),
        versions=versions(*LIBRARIES),
    )


def draw_abstract(question: Question) -> Blueprint:
    """The run's parts with a model that has no values."""

    def load(dtype: torch.dtype, attention: str) -> PreTrainedModel:
        return _empty_base(question.model, dtype, attention)

    config = GemmaConfig.from_dict(question.model)
    name = question.recipe.model
    with torch.device("meta"):
        return draw_up(
            question.recipe,
            config,
            ModelFolder(Path(name), name, None),
            question.token_ids,
            load,
            question.devices,
            question.device_memory,
        )


def _empty_base(raw: Mapping[str, Any], dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """transformers' model as `portlab_hf.model.load_base` reads it, its tensors left out."""
    config = CONFIG_MAPPING[raw["model_type"]].from_dict(dict(raw))
    base: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    base.config.use_cache = False
    return base


def _steps(drawn: Blueprint, question: Question, plan: Plan) -> Iterator[AbstractStep]:
    state, frozen = abstract_state(drawn), abstract_frozen(drawn)
    for number, layout in enumerate(plan.layouts):
        rows = question.batches[plan.choice.index(number)]
        batch = abstract_batch(drawn.placement, pack_batch(rows, layout))
        kinds = {"weights": frozen, "trained": state.trained, "optimizer": state.opt, "batch": batch}
        yield AbstractStep(layout, jit_step(drawn, state, layout), (state, frozen, batch), kinds)


def abstract_state(drawn: Blueprint) -> TrainState:
    """Shapes, types and places of `portlab_torchax.setup.initial_state`."""
    tensors = drawn.program.model.tensors()
    trained = {name: _array(drawn, name, tensors[name]) for name in drawn.trained}
    shapes = jax.eval_shape(drawn.optimizer.init, trained)
    opt = jax.tree.map(_placed, shapes, opt_shardings(drawn, shapes))
    step: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=drawn.placement.replicated)
    return TrainState(trained, opt, step)


def abstract_frozen(drawn: Blueprint) -> Values:
    """Shapes, types and places of the model's tensors that are not trained."""
    tensors = drawn.program.model.tensors()
    return {name: _array(drawn, name, tensor) for name, tensor in tensors.items() if name not in drawn.trained}


def abstract_batch(placement: Placement, batch: Batch) -> Batch:
    """Shapes, types and places of a packed batch."""
    found: Batch = jax.tree.map(lambda x: _placed(x, placement.rows(axis=1)), batch)
    return found


def _array(drawn: Blueprint, name: str, tensor: torch.Tensor) -> Any:
    place = drawn.placement
    sharding = place.sharding(drawn.specs[name]) if name in drawn.specs else place.replicated
    dtype = jax.dtypes.canonicalize_dtype(str(tensor.dtype).removeprefix("torch."))
    return jax.ShapeDtypeStruct(tuple(tensor.shape), dtype, sharding=sharding)


def _placed(x: Any, sharding: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype), sharding=sharding)
