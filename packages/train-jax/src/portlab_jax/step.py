"""The training step: loss, gradients of the adapter, AdamW. One pure function, jitted once."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from portlab_jax.lora import Adapter, AdapterOptions
from portlab_jax.loss import supervised_loss
from portlab_jax.model import Params, Rows, hidden_states
from portlab_jax.packing import Batch, Layout
from portlab_spec.models import GemmaConfig
from portlab_spec.recipe import Optimizer

Array = jax.Array


class TrainState(NamedTuple):
    """What a step changes; saved as it is.

    Attributes:
        adapter: trained leaves, float32.
        opt: optax state.
        step: int32 scalar, steps taken.
        key: PRNG key data of the run; a step folds its number in.
    """

    adapter: Adapter
    opt: optax.OptState
    step: Array
    key: Array


class StepMetrics(NamedTuple):
    """Scalars of one step, float32."""

    loss: Array
    grad_norm: Array
    learning_rate: Array


def learning_rate_schedule(optimizer: Optimizer, steps: int) -> optax.Schedule:
    """Linear warm-up to the peak, then the recipe's decay to `final_fraction` of it at the last step."""
    peak, final = optimizer.learning_rate, optimizer.learning_rate * optimizer.final_fraction
    warmup = optimizer.warmup_steps
    decay_steps = max(steps - warmup - 1, 1)
    after: optax.Schedule
    if optimizer.schedule == "constant":
        after = optax.constant_schedule(peak)
    elif optimizer.schedule == "linear":
        after = optax.linear_schedule(peak, final, decay_steps)
    else:
        after = optax.cosine_decay_schedule(peak, decay_steps, alpha=optimizer.final_fraction)
    # Warm-up starts above zero: a first step with rate 0 would be computed for nothing.
    ramp = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    return optax.join_schedules([ramp, after], [warmup])


def make_optimizer(optimizer: Optimizer, steps: int) -> optax.GradientTransformation:
    """AdamW behind a global-norm clip."""
    return optax.chain(
        optax.clip_by_global_norm(optimizer.clip_norm),
        optax.adamw(
            learning_rate_schedule(optimizer, steps),
            b1=optimizer.b1,
            b2=optimizer.b2,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
        ),
    )


def batch_loss(
    adapter: Adapter,
    params: Params,
    batch: Batch,
    config: GemmaConfig,
    options: AdapterOptions,
    chunk: int,
    *,
    dropout_key: Array | None = None,
    remat: bool = False,
) -> Array:
    """Mean cross-entropy over all supervised tokens of the batch, float32 scalar."""

    def group_sum(group: Batch, key: Array | None) -> Array:
        rows = Rows(group.prefix, group.tokens, group.segments, group.positions)
        _, out, _ = hidden_states(params, adapter, config, options, rows, dropout_key=key, remat=remat)
        picked = out.reshape(-1, out.shape[-1])[group.slots]
        return supervised_loss(
            picked,
            adapter.get("token_rows"),
            params["embed_tokens"],
            group.targets,
            group.weights,
            options.token_ids,
            chunk,
        )

    groups = batch.tokens.shape[0]
    keys = None if dropout_key is None else jax.random.split(dropout_key, groups)
    sums = jax.vmap(group_sum, in_axes=(0, None if keys is None else 0))(batch, keys)
    return jnp.sum(sums) / jnp.maximum(jnp.sum(batch.weights), 1.0)


def make_step(
    config: GemmaConfig,
    options: AdapterOptions,
    optimizer: Optimizer,
    steps: int,
    layout: Layout,
    *,
    remat: bool = False,
) -> Callable[[TrainState, Params, Batch], tuple[TrainState, StepMetrics]]:
    """The step as a function to jit with the state donated."""
    transform = make_optimizer(optimizer, steps)
    schedule = learning_rate_schedule(optimizer, steps)

    def step(state: TrainState, params: Params, batch: Batch) -> tuple[TrainState, StepMetrics]:
        key = None
        if options.dropout > 0:
            key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        loss, grads = jax.value_and_grad(batch_loss)(
            state.adapter, params, batch, config, options, layout.chunk, dropout_key=key, remat=remat
        )
        updates, opt = transform.update(grads, state.opt, state.adapter)
        adapter = optax.apply_updates(state.adapter, updates)
        metrics = StepMetrics(loss, optax.tree.norm(grads), jnp.asarray(schedule(state.step), jnp.float32))
        return TrainState(adapter, opt, state.step + 1, state.key), metrics

    return step
