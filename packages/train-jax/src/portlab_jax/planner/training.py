"""The training step of a recipe, compiled for a slice: the very program that a trainer would run there.

Of train-jax it is drawn here; other trainers hand theirs over (portlab_spec.planning).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from portlab_jax.planner.analytic import Analytic, analyse
from portlab_jax.planner.program import Compile, Program
from portlab_jax.planner.workload import Workload, read_model
from portlab_jax.setup import Blueprint, abstract_frozen, abstract_state, device_bytes, draw_up, jit_step
from portlab_spec.data.tokens import Row
from portlab_spec.hardware import Slice
from portlab_spec.packing import BatchOrder, Plan, pack_batch
from portlab_spec.planning import DrawSteps, Question
from portlab_spec.recipe import Recipe


@dataclass(frozen=True)
class StepProgram:
    """One shape of the step.

    Attributes:
        steps: of the run, that have this shape.
        positions: token positions that all devices compute in a step, padding included.
        slots: supervised slots that all devices compute in a step, padding included.
        attention: implementation for each kind of layer.
        analytic: what the analytic model counts, to hold the program against; None of another trainer's step.
        program: as compiled.
    """

    steps: int
    positions: int
    slots: int
    attention: dict[str, str]
    analytic: Analytic | None
    program: Program


@dataclass(frozen=True)
class TrainingPrograms:
    """A recipe's step for a slice.

    Attributes:
        mesh: size of each axis.
        arguments: bytes of a device's arguments by kind: weights, trained, optimizer, batch.
        rows, tokens: examples of a step, and their tokens, counted before anything is shared.
        shapes: of the step, each of which is compiled once.
        versions: of what traced it, beside the compiler's.
    """

    mesh: dict[str, int]
    arguments: dict[str, int]
    rows: int
    tokens: float
    shapes: tuple[StepProgram, ...]
    versions: Mapping[str, str] = field(default_factory=dict)


def draw(recipe: Recipe, work: Workload, part: Slice, devices: Sequence[Any]) -> Blueprint:
    """Decide on a mesh and what is trained, as training on the slice would."""
    return draw_up(recipe, work.config, work.token_ids, devices, part.device_memory)


def compile_training(
    recipe: Recipe, work: Workload, part: Slice, devices: Sequence[Any], compiler: Compile
) -> TrainingPrograms:
    """Compile every shape of the step that a run would compile.

    Args:
        recipe: the run.
        work: its rows.
        part: the slice.
        devices: of the slice.
        compiler: takes a jitted function and its abstract arguments.

    Raises:
        UserError: what training itself would refuse.
    """
    drawn = draw(recipe, work, part, devices)
    batches = batches_of(recipe, work)
    with jax.set_mesh(drawn.mesh.mesh):
        plan = drawn.plan(batches, accumulate=recipe.accumulate, max_shapes=recipe.max_shapes)
        state, frozen = abstract_state(drawn), abstract_frozen(drawn)
        shapes, arguments = [], {}
        for number, layout in enumerate(plan.layouts):
            at = plan.choice.index(number)
            batch = drawn.mesh.abstract_rows(pack_batch(batches[at], layout), axis=1)
            program = compiler(jit_step(drawn, state, layout), state, frozen, batch)
            shapes.append(
                StepProgram(
                    steps=steps_of(plan, number, recipe.steps),
                    positions=layout.tokens_per_step,
                    slots=layout.slots * layout.packing.parts,
                    attention=dict(drawn.for_layout(layout).attention),
                    analytic=analyse(drawn, layout),
                    program=program,
                )
            )
            kinds = {"weights": frozen, "trained": state.adapter, "optimizer": state.opt, "batch": batch}
            arguments = {kind: device_bytes(tree) for kind, tree in kinds.items()}
    mesh = dict(drawn.mesh.mesh.shape)
    return TrainingPrograms(mesh, arguments, recipe.batch_size, tokens_of(batches), tuple(shapes))


def compile_offered(
    draw_steps: DrawSteps, recipe: Recipe, work: Workload, part: Slice, devices: Sequence[Any], compiler: Compile
) -> TrainingPrograms:
    """Compile every shape of another trainer's step.

    Args:
        draw_steps: the trainer's.
        recipe, work, part, devices, compiler: as in `compile_training`.

    Raises:
        UserError: what training itself would refuse.
    """
    batches = batches_of(recipe, work)
    drawn = draw_steps(Question(recipe, read_model(recipe.model), work.token_ids, batches, devices, part.device_memory))
    shapes, arguments = [], {}
    for number, step in enumerate(drawn.steps):
        program = compiler(step.function, *step.arguments)
        shapes.append(
            StepProgram(
                steps=steps_of(drawn.plan, number, recipe.steps),
                positions=step.layout.tokens_per_step,
                slots=step.layout.slots * step.layout.packing.parts,
                attention=dict(drawn.attention),
                analytic=None,
                program=program,
            )
        )
        arguments = {kind: device_bytes(tree) for kind, tree in step.kinds.items()}
    return TrainingPrograms(
        dict(drawn.mesh), arguments, recipe.batch_size, tokens_of(batches), tuple(shapes), dict(drawn.versions)
    )


def batches_of(recipe: Recipe, work: Workload) -> Sequence[Sequence[Row]]:
    """The batches of a run in order; of made-up rows, one stands for all."""
    if work.assumed:
        return [work.rows]
    return BatchOrder(work.rows, recipe.batch_size, recipe.steps, recipe.seed, group_by_prefix=recipe.group_by_prefix)


def steps_of(plan: Plan, number: int, steps: int) -> int:
    """How many of a run's steps have a layout; a single planned batch stands for all of them."""
    return round(Counter(plan.choice)[number] / len(plan.choice) * steps)


def tokens_of(batches: Sequence[Sequence[Row]]) -> float:
    """Mean number of tokens of a step's rows as they stand."""
    return sum(len(row.ids) for batch in batches for row in batch) / len(batches)
