"""Evidence of train-torchax: `python -m portlab_torchax.evidence WORK OUT`, see `portlab_spec.evidence`.

Training's own functions compute it; what a forward pass computes is seen through hooks on transformers' modules.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from torch import nn

from portlab_hf.evidence import adapter_names
from portlab_hf.masks import attention_masks, for_model
from portlab_hf.model import base_of, text_model
from portlab_hf.watch import watch
from portlab_spec.assets import ModelFolder
from portlab_spec.cli import run
from portlab_spec.evidence import About, Evidence, Work, find_places, read_work
from portlab_spec.evidence.places import probed, score, scored, token_tensors
from portlab_spec.packing import Batch, Layout, Plan, pack_batch
from portlab_spec.report import versions
from portlab_spec.schedule import learning_rates
from portlab_torchax.decode import Decoder
from portlab_torchax.functional import Values
from portlab_torchax.main_job import quieten
from portlab_torchax.session import LIBRARIES
from portlab_torchax.setup import Setup, initial_state, jit_step, set_up

Array = jax.Array


def collect(work: Work) -> Evidence:
    """Run the work with train-torchax.

    Raises:
        UserError: as `portlab_torchax.setup.set_up`.
    """
    recipe = work.recipe
    setup = set_up(recipe, ModelFolder(work.model, str(work.model), None), work.token_ids)
    names, program = adapter_names(setup.program.model.module), setup.program
    state, plan = initial_state(setup), setup.plan(work.steps, accumulate=recipe.accumulate)

    def named(tree: Values, prefix: str) -> dict[str, np.ndarray]:
        return {prefix + names[name]: np.asarray(value) for name, value in tree.items()}

    # Compiled once for each layout. Gradients have a program of their own: the step's keeps them to itself.
    @functools.cache
    def programs(layout: Layout) -> tuple[Callable[..., Any], Callable[..., Any]]:
        slope = jax.jit(lambda t, f, b, key: program.gradients(t, f, b, layout.chunk, key)[2])
        return slope, jit_step(setup, state, layout)

    tensors = named(state.trained, "adapter.0.")
    repeat, numbers = look(work, setup, state.trained, plan, tensors), []
    for number, rows in enumerate(work.steps, 1):
        layout = plan.layout(number - 1)
        packed = pack_batch(rows, layout)
        batch = setup.placement.put_rows(packed, axis=1)
        slope, step = programs(layout)
        key = jax.random.fold_in(jax.random.key(program.seed), state.step)
        tensors |= named(slope(state.trained, setup.frozen, batch, key), f"gradient.{number}.")
        state, metrics = step(state, setup.frozen, batch)
        tensors |= named(state.trained, f"adapter.{number}.")
        numbers.append((float(metrics.loss), float(packed.weights.sum()), float(metrics.grad_norm)))
    for name, column in zip(("loss", "supervised", "grad_norm"), zip(*numbers, strict=True), strict=True):
        tensors[name] = np.array(column, np.float32)
    tensors["learning_rate"] = learning_rates(recipe.optimizer, recipe.steps)[: len(work.steps)]
    decoder = Decoder(program, setup.placement.groups, setup.placement.put_rows, work.new_tokens)
    values = program.values(state.trained, setup.frozen)
    answers = decoder(values, work.prompts, work.stop_ids) if work.prompts else []
    device = setup.placement.device
    about = About(
        backend="torchax",
        dtype=jnp.dtype(program.dtype).name,
        versions=versions(*LIBRARIES),
        device=f"{device.platform} {device.device_kind} x {setup.placement.mesh.size}",
        recipe=recipe,
        model=work.model,
        rows=work.given,
        repeat=repeat,
        generated=tuple(tuple(ids) for ids in answers),
    )
    return Evidence(about, tensors)


def look(work: Work, setup: Setup, trained: Values, plan: Plan, tensors: dict[str, np.ndarray]) -> float:
    """Add what the first step's forward pass computes; how far two passes are apart, see `About.repeat`."""
    layout, program = plan.layout(0), setup.program
    packed = pack_batch(work.steps[0], layout)
    places = find_places(packed, work.steps[0])
    batch = setup.placement.put_rows(packed, axis=1)

    def seen_by(model: nn.Module, tokens: Any, positions: Any, ends: Any) -> Any:
        base = base_of(model)
        masks = for_model(base, attention_masks(ends, positions, program.config.window))
        with watch(base) as seen:
            text_model(base)(input_ids=tokens, position_ids=positions, attention_mask=masks, use_cache=False)
        return dict(seen)

    @jax.jit
    def forward(trained: Values, frozen: Values, batch: Batch, key: Array) -> dict[str, Array]:
        groups, length = batch.rows.tokens.shape[0], batch.rows.tokens.shape[-1]
        rows = (x.reshape(-1, length) for x in batch.rows)
        found = program.model(program.values(trained, frozen, key), seen_by, *rows, training=True)
        return {name: x.reshape(groups, -1, *x.shape[2:]) for name, x in found.items()}

    def passes(seed: int) -> list[dict[str, np.ndarray]]:
        micro = (jax.tree.map(lambda x, i=i: x[i], batch) for i in range(layout.accumulate))
        return [jax.device_get(forward(trained, setup.frozen, part, jax.random.key(seed))) for part in micro]

    seen, again = passes(0), passes(1)
    first, second = (probed(found, places)["hidden.final"] for found in (seen, again))
    tensors |= token_tensors(places) | probed(seen, places)
    states, tokens = scored(places, [found["hidden.final"] for found in seen])
    head = jax.jit(lambda t, f, hidden: program.logits(program.values(t, f), hidden))
    tensors |= score(states, tokens, lambda hidden: head(trained, setup.frozen, jnp.asarray(hidden)))
    return float(np.abs(first - second).max() / np.sqrt(np.square(first).mean()))


def main(argv: list[str]) -> int:
    """Write the evidence of train-torchax."""
    work, out = argv
    quieten()
    collect(read_work(Path(work))).save(Path(out))
    return 0


if __name__ == "__main__":
    run("portlab_torchax.evidence", main, sys.argv[1:])
