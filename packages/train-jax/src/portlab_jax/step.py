"""The training step: loss, gradients of what is trained, optimiser. One pure function, compiled once per layout."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from portlab_jax.attention import attend
from portlab_jax.lora import Adapter, AdapterOptions
from portlab_jax.loss import LossOptions, LossSums, supervised_loss
from portlab_jax.mesh import partition, shard
from portlab_jax.model import Inputs, Params, Weights, empty_kv, hidden_states, repeat_heads, with_adapter
from portlab_jax.remat import Remat
from portlab_spec.models import GemmaConfig, LayerKind
from portlab_spec.packing import Batch, Layout

Array = jax.Array


@dataclass(frozen=True)
class StepOptions:
    """What is fixed when a step is compiled, layout apart.

    Attributes:
        config: the model.
        adapter: what LoRA adapts; no leaves in full fine-tuning.
        full: train all weights instead of adapters.
        dtype: of the activations.
        remat: what the backward pass recomputes.
        attention: implementation for each kind of attention, "sliding" and "full".
        z_loss: weight of the squared log-partition.
    """

    config: GemmaConfig
    adapter: AdapterOptions
    full: bool = False
    dtype: Any = jnp.float32
    remat: Remat = "none"
    attention: tuple[tuple[str, str], ...] = (("sliding", "xla"), ("full", "xla"))
    z_loss: float = 0.0

    def loss(self, chunk: int) -> LossOptions:
        """Options of the loss for a layout's chunk."""
        return LossOptions(
            token_ids=self.adapter.token_ids,
            chunk=chunk,
            softcap=self.config.final_softcap,
            z_loss=self.z_loss,
            train_embedding=self.full,
        )

    def weights(self, trained: Any, frozen: Params) -> Weights:
        """The model's weights from what a step trains and what it does not."""
        return Weights(frozen, trained, {}, None) if self.full else with_adapter(frozen, trained, self.adapter)


class TrainState(NamedTuple):
    """What a step changes; saved as it is.

    Attributes:
        adapter: adapter leaves, or all weights in full fine-tuning; float32.
        opt: optax state.
        step: int32 scalar, steps taken.
        key: PRNG key data of the run; a step folds its number in.
    """

    adapter: Any
    opt: optax.OptState
    step: Array
    key: Array


class StepMetrics(NamedTuple):
    """Scalars of one step, float32.

    Attributes:
        loss: mean over the supervised tokens, z-loss included.
        grad_norm: global norm of the gradients before clipping.
        accuracy: share of the supervised tokens that are the model's first choice.
        leaf_norms: gradient norm of each trained leaf, by path.
    """

    loss: Array
    grad_norm: Array
    accuracy: Array
    leaf_norms: dict[str, Array]


class PackedAttention:
    """Attention of a batch's packed rows."""

    def __init__(self, batch: Batch, options: StepOptions) -> None:
        self.rows, self.blocks, self.scale = batch.rows, batch.blocks, options.config.attention_scale
        self.implementation = dict(options.attention)

    def empty(self, kind: LayerKind, x: Array) -> Any:
        """See `portlab_jax.model.Attend`."""
        return empty_kv(kind, x)

    def __call__(self, kind: LayerKind, q: Array, kv: Any, state: Any, *, shared: bool) -> tuple[Array, Any, Any]:
        """See `portlab_jax.model.Attend`."""
        by_row = self.rows.tokens.shape

        def in_rows(x: Array) -> Array:
            return x.reshape(*by_row, *x.shape[2:])

        k, v = repeat_heads(kv, q.shape[2])
        out = attend(
            in_rows(q),
            in_rows(k),
            in_rows(v),
            self.rows,
            self.blocks,
            window=kind.window,
            scale=self.scale,
            implementation=self.implementation[kind.attention],
        )
        # Said again: a reshape may lose the sharding of a dimension of length 1.
        return shard(out.reshape(q.shape), "group", None, "heads", None), kv, None


def supervised_hidden(weights: Weights, batch: Batch, options: StepOptions, dropout_key: Array | None = None) -> Array:
    """Final hidden states (G, S, D) at the supervised slots of one micro-batch."""
    groups = batch.rows.tokens.shape[0]
    inputs = Inputs(batch.rows.tokens.reshape(groups, -1), batch.rows.positions.reshape(groups, -1))
    hidden, _ = hidden_states(
        weights,
        options.config,
        options.adapter,
        inputs,
        PackedAttention(batch, options),
        dropout_key=dropout_key,
        remat=options.remat,
        dtype=options.dtype,
    )
    return pick_slots(hidden, batch.slots)


def pick_slots(hidden: Array, slots: Array) -> Array:
    """Hidden states (G, S, D) at slots (G, S) of (G, N, D), each group's by itself.

    Written as one gather over all groups, its gradient would be a scatter that every device computes whole.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return _pick(hidden, slots)
    rows, index = (partition(("group", *(None,) * (x.ndim - 1)), x.shape) for x in (hidden, slots))
    picked = jax.shard_map(_pick, in_specs=(rows, index), out_specs=rows, check_vma=False)
    return picked(shard(hidden, "group", None, None), shard(slots, "group", None))


def _pick(hidden: Array, slots: Array) -> Array:
    return jax.vmap(lambda rows, index: rows[index])(hidden, slots)


def batch_sums(
    trained: Any, frozen: Params, batch: Batch, options: StepOptions, chunk: int, dropout_key: Array | None = None
) -> LossSums:
    """Sums of the losses over the supervised tokens of one micro-batch."""
    weights = options.weights(trained, frozen)
    picked = supervised_hidden(weights, batch, options, dropout_key)
    return supervised_loss(
        picked, weights.token_rows, weights.embedding, batch.targets, batch.weights, options.loss(chunk)
    )


def gradients(
    trained: Any, frozen: Params, batch: Batch, options: StepOptions, chunk: int, dropout_key: Array | None = None
) -> tuple[LossSums, Array, Any]:
    """Loss sums, number of supervised tokens and gradient of the mean loss of a step.

    Args:
        trained: what is differentiated.
        frozen: the rest of the weights.
        batch: micro-batches on the leading axis, run one after the other; their sums add up, and the mean is taken
            once over the supervised tokens of all of them.
        options: static facts.
        chunk: supervised positions whose logits are in memory at once.
        dropout_key: key of the step, None without dropout.
    """
    total = jnp.maximum(jnp.sum(batch.weights), 1.0)

    def one(micro: Batch, number: Array) -> tuple[LossSums, Any]:
        key = None if dropout_key is None else jax.random.fold_in(dropout_key, number)

        def mean(trained: Any) -> tuple[Array, LossSums]:
            sums = batch_sums(trained, frozen, micro, options, chunk, key)
            return sums.loss / total, sums

        (_, sums), grads = jax.value_and_grad(mean, has_aux=True)(trained)
        return sums, grads

    count = batch.weights.shape[0]
    if count == 1:
        sums, grads = one(jax.tree.map(lambda x: x[0], batch), jnp.int32(0))
        return sums, total, grads

    def add(so_far: Any, xs: tuple[Batch, Array]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, so_far, one(*xs)), None

    nothing = (LossSums(*(jnp.zeros((), jnp.float32) for _ in LossSums._fields)), jax.tree.map(jnp.zeros_like, trained))
    (sums, grads), _ = jax.lax.scan(add, nothing, (batch, jnp.arange(count)))
    return sums, total, grads


def make_step(
    options: StepOptions, transform: optax.GradientTransformation, layout: Layout
) -> Callable[[TrainState, Params, Batch], tuple[TrainState, StepMetrics]]:
    """The step as a function to jit with the state donated."""

    def step(state: TrainState, frozen: Params, batch: Batch) -> tuple[TrainState, StepMetrics]:
        key = None
        if options.adapter.dropout > 0:
            key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        sums, total, grads = gradients(state.adapter, frozen, batch, options, layout.chunk, key)
        updates, opt = transform.update(grads, state.opt, state.adapter)
        trained = optax.apply_updates(state.adapter, updates)
        norms = {
            jax.tree_util.keystr(path, simple=True, separator="/"): jnp.sqrt(jnp.sum(leaf * leaf))
            for path, leaf in jax.tree_util.tree_leaves_with_path(grads)
        }
        metrics = StepMetrics(sums.loss / total, optax.tree.norm(grads), sums.correct / total, norms)
        return TrainState(trained, opt, state.step + 1, state.key), metrics

    return step


def make_evaluation(options: StepOptions, layout: Layout) -> Callable[[Any, Params, Batch], tuple[Array, Array]]:
    """A function from (trained, frozen, batch of one micro-batch) to the sum of cross-entropies and the token count."""

    def evaluate(trained: Adapter, frozen: Params, batch: Batch) -> tuple[Array, Array]:
        micro = jax.tree.map(lambda x: x[0], batch)
        return batch_sums(trained, frozen, micro, options, layout.chunk).nll, jnp.sum(batch.weights)

    return evaluate
