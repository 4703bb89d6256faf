"""The training loop: batches in, adapter out, a checkpoint every so often, resumable at any of them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from portlab_jax.checkpoint import Checkpoints, TrainLog, leaf_digests, run_metadata
from portlab_jax.lora import Adapter, AdapterOptions, init_adapter
from portlab_jax.loss import head_logits
from portlab_jax.mesh import MeshPlan
from portlab_jax.model import Params, Rows, hidden_states
from portlab_jax.packing import Batch, Layout, batch_order, pack_batch, plan_layout
from portlab_jax.step import StepMetrics, TrainState, make_optimizer, make_step
from portlab_spec.assets import ModelFolder
from portlab_spec.data.tokens import Row
from portlab_spec.errors import CheckFailed
from portlab_spec.models import GemmaConfig
from portlab_spec.progress import bar
from portlab_spec.recipe import Recipe

PROBE_TOP_K = 8


@dataclass(frozen=True)
class Setup:
    """Everything a run is made of, loaded and placed."""

    recipe: Recipe
    model: ModelFolder
    config: GemmaConfig
    params: Params
    mesh: MeshPlan
    options: AdapterOptions


@dataclass(frozen=True)
class Trained:
    """What training gave.

    Attributes:
        adapter: final leaves.
        log: losses and seconds of the whole run, resumed steps included.
        fresh_steps: steps taken in this process.
        fresh_seconds: and what they took, compilation and saving included.
        layout: the static shape of the batches.
        supervised_tokens: over the whole run.
    """

    adapter: Adapter
    log: TrainLog
    fresh_steps: int
    fresh_seconds: float
    layout: Layout
    supervised_tokens: int


def initial_state(setup: Setup) -> TrainState:
    """Step 0 of a run, replicated over the mesh: a pure function of the recipe and the base."""
    key = jax.random.key(setup.recipe.seed)
    adapter = init_adapter(
        setup.config,
        setup.recipe.lora,
        key,
        embedding=setup.params["embed_tokens"],
        token_ids=setup.options.token_ids,
    )
    transform = make_optimizer(setup.recipe.optimizer, setup.recipe.steps)
    state = TrainState(adapter, transform.init(adapter), jnp.zeros((), jnp.int32), jax.random.key_data(key))
    # Copies: the step donates its state, and a leaf may otherwise share memory with the base or another leaf.
    return jax.device_put(jax.tree.map(jnp.copy, state), setup.mesh.replicated)


def compiled_step(
    setup: Setup, layout: Layout
) -> Callable[[TrainState, Params, Batch], tuple[TrainState, StepMetrics]]:
    """The jitted step of a run; the state is donated.

    The state's sharding is fixed on the way out as on the way in: left open, the compiler's choice may differ from
    the initial placement, and the second step would compile anew.
    """
    recipe = setup.recipe
    step = make_step(setup.config, setup.options, recipe.optimizer, recipe.steps, layout, remat=recipe.remat)
    return jax.jit(step, donate_argnums=0, out_shardings=setup.mesh.replicated)


def train(setup: Setup, rows: Sequence[Row], checkpoints: Checkpoints) -> Trained:
    """Train, from the newest checkpoint if there is one.

    Raises:
        CheckFailed: the loss is not finite; names the step and its rows.
    """
    recipe = setup.recipe
    batches = list(batch_order(rows, recipe.batch_size, recipe.steps, recipe.seed))
    layout = plan_layout(batches, groups=setup.mesh.groups)
    state = initial_state(setup)
    log = TrainLog([], 0.0)
    if (latest := checkpoints.latest) is not None:
        state, log = checkpoints.restore(latest, state)
    losses, earlier = list(log.losses), log.seconds
    first = int(state.step)
    started = time.perf_counter()
    metadata = run_metadata(recipe, setup.model, setup.config, setup.options.token_ids)
    step = compiled_step(setup, layout)
    with bar("train", recipe.steps) as advance:
        for number in range(first, recipe.steps):
            batch = setup.mesh.put_rows(pack_batch(batches[number], layout))
            state, metrics = step(state, setup.params, batch)
            loss = float(metrics.loss)
            if not np.isfinite(loss):
                ids = ", ".join(row.id for row in batches[number])
                raise CheckFailed(
                    f"the loss of step {number + 1} is {loss}",
                    fix=f"Lower optimizer.learning_rate, or look at its rows: {ids}",
                )
            losses.append(loss)
            advance(number + 1, f"loss {loss:.4f}")
            if (number + 1) % recipe.save_every == 0 or number + 1 == recipe.steps:
                extra = {
                    "leaf_sha256": leaf_digests(state.adapter),
                    "probe": probe(setup, state.adapter, batches[0][0]),
                }
                log = TrainLog(list(losses), earlier + time.perf_counter() - started)
                checkpoints.save(state, log, metadata | extra)
    return Trained(
        state.adapter,
        log,
        recipe.steps - first,
        time.perf_counter() - started,
        layout,
        sum(sum(row.loss) for batch in batches for row in batch),
    )


def probe(setup: Setup, adapter: Adapter, row: Row) -> dict[str, Any]:
    """Golden logits of base plus adapter at the supervised positions of one row, for verification after export."""
    ids = jnp.array(row.ids, jnp.int32)
    positions = np.flatnonzero(row.loss) - 1
    logits = _probe_logits(setup.params, adapter, ids, jnp.array(positions), setup.config, setup.options)
    values, top = jax.lax.top_k(logits, min(PROBE_TOP_K, logits.shape[-1]))
    return {
        "token_ids": [int(i) for i in row.ids],
        "positions": positions.tolist(),
        "topk_ids": np.asarray(top).tolist(),
        "topk_logits": np.asarray(values, np.float32).round(6).tolist(),
    }


def _probe_forward(
    params: Params, adapter: Adapter, ids: jax.Array, positions: jax.Array, config: GemmaConfig, options: AdapterOptions
) -> jax.Array:
    none = jnp.zeros((0, 1), jnp.int32)
    hidden, _, _ = hidden_states(params, adapter, config, options, Rows(ids, none, none, none))
    return head_logits(hidden[positions], adapter.get("token_rows"), params["embed_tokens"], options.token_ids)


_probe_logits = jax.jit(_probe_forward, static_argnums=(4, 5))
