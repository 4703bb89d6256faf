"""What a trainer offers to a planner: its step for devices that are not here, ready to be compiled.

Packages do not import each other. A trainer whose step is a jitted JAX function names a `DrawSteps` as an entry point
of the group `portlab.planner`, under the backend's name,

    [project.entry-points."portlab.planner"]
    torchax = "portlab_torchax.abstract:draw_steps"

and `plan-tpu --backend torchax` compiles what it returns. Functions, arrays and devices are JAX's, which is not
imported here: they are `Any`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from portlab_spec.data.tokens import Row
from portlab_spec.errors import UserError
from portlab_spec.packing import Layout, Plan
from portlab_spec.recipe import Recipe

GROUP = "portlab.planner"


@dataclass(frozen=True)
class Question:
    """A run on devices that are not here.

    Attributes:
        recipe: the run.
        model: the parsed `config.json` of its model; there are no weights.
        token_ids: rows of the embedding to train.
        batches: rows of each step; a single one stands for all.
        devices: of the topology, as JAX describes them.
        device_memory: bytes of one.
    """

    recipe: Recipe
    model: Mapping[str, Any]
    token_ids: tuple[int, ...]
    batches: Sequence[Sequence[Row]]
    devices: Sequence[Any]
    device_memory: int


@dataclass(frozen=True)
class AbstractStep:
    """One shape of the step.

    Attributes:
        layout: of its batches.
        function: jitted.
        arguments: of the function: trees of `jax.ShapeDtypeStruct` with shardings.
        kinds: the same arrays by what they are: weights, trained, optimizer, batch.
    """

    layout: Layout
    function: Any
    arguments: tuple[Any, ...]
    kinds: Mapping[str, Any]


@dataclass(frozen=True)
class AbstractSteps:
    """A run's steps.

    Attributes:
        mesh: size of each axis.
        attention: implementation for each kind of layer.
        plan: which step has which layout.
        steps: one for each of the plan's layouts, in their order; each is made when it is asked for.
        versions: of what the step was traced with, by distribution.
    """

    mesh: Mapping[str, int]
    attention: Mapping[str, str]
    plan: Plan
    steps: Iterator[AbstractStep]
    versions: Mapping[str, str]


# Raises UserError where training itself would refuse the recipe.
DrawSteps = Callable[[Question], AbstractSteps]


def find_trainer(backend: str) -> EntryPoint:
    """Who offers the steps of a backend; its `load` gives a `DrawSteps`.

    Raises:
        UserError: it is not installed.
    """
    found = entry_points(group=GROUP, name=backend)
    if not found:
        raise UserError(
            f"train-{backend} is not installed beside the planner",
            where=f"--backend {backend}",
            fix=f"pip install packages/hf packages/train-{backend}",
        )
    return next(iter(found))
