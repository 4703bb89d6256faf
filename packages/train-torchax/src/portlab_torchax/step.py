"""One training step as a pure function: forward, loss, gradients, clip, update."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from torch import nn

from portlab_hf.masks import attention_masks, for_model
from portlab_hf.model import base_of, text_model
from portlab_spec.models import GemmaConfig
from portlab_spec.packing import Batch, Layout
from portlab_torchax.functional import Functional, Values
from portlab_torchax.loss import LossSums, pick_slots, supervised_loss

Array = jax.Array


class TrainState(NamedTuple):
    """What a step changes; saved as it is.

    Attributes:
        trained: adapter, or all weights in full fine-tuning, by the model's names; float32.
        opt: optax state.
        step: int32 scalar, steps taken.
    """

    trained: Values
    opt: optax.OptState
    step: Array


class StepMetrics(NamedTuple):
    """Scalars of one step, float32.

    Attributes:
        loss: mean over the supervised tokens, z-loss included.
        grad_norm: global norm of the gradients before clipping.
        accuracy: share of the supervised tokens that are the model's first choice.
        leaf_norms: gradient norm of each trained leaf, by name.
    """

    loss: Array
    grad_norm: Array
    accuracy: Array
    leaf_norms: dict[str, Array]


@dataclass(frozen=True)
class Program:
    """What of a run's programs does not change.

    Attributes:
        model: transformers' model, with PEFT's adapter in it or without.
        head: of it.
        head_names: of the head's tensors, by their names within it.
        head_places: where those of them lie that every device needs whole, by name within the head.
        config: of the model.
        dtype: of activations, and of weights where they are used.
        z_loss: weight of the squared log-partition.
        seed: of what is drawn in a step.
        keys: buffers that hold the keys of dropout.
    """

    model: Functional
    head: Functional
    head_names: Mapping[str, str]
    head_places: Mapping[str, Any]
    config: GemmaConfig
    dtype: Any
    z_loss: float = 0.0
    seed: int = 0
    keys: tuple[str, ...] = ()

    def hidden_states(
        self, values: Values, tokens: Array, positions: Array, ends: Array, *, training: bool = False
    ) -> Array:
        """Last hidden states (rows, T, D) of packed rows (rows, T); see `portlab_spec.packing.Rows`."""

        def forward(model: nn.Module, tokens: Any, positions: Any, ends: Any) -> Any:
            base = base_of(model)
            masks = for_model(base, attention_masks(ends, positions, self.config.window))
            output = text_model(base)(input_ids=tokens, position_ids=positions, attention_mask=masks, use_cache=False)
            return output.last_hidden_state

        found: Array = self.model(values, forward, tokens, positions, ends, training=training)
        return found

    def logits(self, values: Values, hidden: Array) -> Array:
        """Logits (..., V) in float32 of hidden states (..., D)."""
        return self.head_logits({own: values[name] for own, name in self.head_names.items()}, hidden)

    def head_logits(self, values: Values, hidden: Array) -> Array:
        """The same, from the head's tensors by their names within it."""
        logits: Array = self.head(values, lambda head, hidden: head(hidden), hidden).astype(jnp.float32)
        cap = self.config.final_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def supervised_hidden(self, values: Values, batch: Batch, *, training: bool = False) -> Array:
        """Last hidden states (G, S, D) at the supervised slots of one micro-batch."""
        groups, length = batch.rows.tokens.shape[0], batch.rows.tokens.shape[-1]
        rows = (x.reshape(-1, length) for x in batch.rows)
        hidden = self.hidden_states(values, *rows, training=training)
        return pick_slots(hidden.reshape(groups, -1, hidden.shape[-1]), batch.slots)

    def batch_sums(
        self, trained: Values, frozen: Values, batch: Batch, chunk: int, key: Array | None = None
    ) -> LossSums:
        """Sums of the losses over the supervised tokens of one micro-batch; with a key as in training."""
        values = self.values(trained, frozen, key)
        hidden = self.supervised_hidden(values, batch, training=key is not None)
        own = {name: values[full] for name, full in self.head_names.items() if full in trained}
        # Gathered once here: in the loop over chunks it would be for each of them.
        other = {name: frozen[full] for name, full in self.head_names.items() if full not in trained}
        other |= {
            name: jax.lax.with_sharding_constraint(other[name], place)
            for name, place in self.head_places.items()
            if name in other
        }
        return supervised_loss(
            lambda own, hidden: self.head_logits(other | own, hidden),
            own,
            hidden,
            batch.targets,
            batch.weights,
            chunk=chunk,
            z_loss=self.z_loss,
        )

    def values(self, trained: Values, frozen: Values, key: Array | None = None) -> Values:
        """All of the model's tensors: those that are trained, in the type they are computed with, and the others."""
        return frozen | {name: self._cast(name, value) for name, value in trained.items()} | self._keys(key)

    def _cast(self, name: str, value: Array) -> Array:
        # PEFT computes with its adapters in float32, whatever the base's type.
        return value if ".lora_" in name or "trainable_tokens" in name else value.astype(self.dtype)

    def _keys(self, key: Array | None) -> Values:
        if key is None or not self.keys:
            return {}
        drawn = jax.random.key_data(jax.random.split(key, len(self.keys)))
        return dict(zip(self.keys, drawn, strict=True))

    def gradients(
        self, trained: Values, frozen: Values, batch: Batch, chunk: int, key: Array
    ) -> tuple[LossSums, Array, Values]:
        """Loss sums, number of supervised tokens and gradient of the mean loss of a step.

        Args:
            trained: what is differentiated.
            frozen: the rest of the model's tensors.
            batch: micro-batches on the leading axis, run one after the other; their sums add up, and the mean is taken
                once over the supervised tokens of all of them.
            chunk: supervised slots of a group whose logits are in memory at once.
            key: of the step.
        """
        total = jnp.maximum(jnp.sum(batch.weights), 1.0)

        def one(micro: Batch, number: Array) -> tuple[LossSums, Values]:
            def mean(trained: Values) -> tuple[Array, LossSums]:
                sums = self.batch_sums(trained, frozen, micro, chunk, jax.random.fold_in(key, number))
                return sums.loss / total, sums

            (_, sums), grads = jax.value_and_grad(mean, has_aux=True)(trained)
            return sums, grads

        count = batch.weights.shape[0]
        if count == 1:
            sums, grads = one(jax.tree.map(lambda x: x[0], batch), jnp.int32(0))
            return sums, total, grads

        def add(so_far: Any, xs: tuple[Batch, Array]) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, so_far, one(*xs)), None

        nothing = LossSums(*(jnp.zeros((), jnp.float32) for _ in LossSums._fields))
        start = (nothing, jax.tree.map(jnp.zeros_like, trained))
        (sums, grads), _ = jax.lax.scan(add, start, (batch, jnp.arange(count)))
        return sums, total, grads


def make_step(
    program: Program, transform: optax.GradientTransformation, layout: Layout
) -> Callable[[TrainState, Values, Batch], tuple[TrainState, StepMetrics]]:
    """The step as a function to jit with the state donated."""

    def step(state: TrainState, frozen: Values, batch: Batch) -> tuple[TrainState, StepMetrics]:
        # A function of seed and number alone, so that a resumed run draws the same.
        key = jax.random.fold_in(jax.random.key(program.seed), state.step)
        sums, total, grads = program.gradients(state.trained, frozen, batch, layout.chunk, key)
        updates, opt = transform.update(grads, state.opt, state.trained)
        trained = optax.apply_updates(state.trained, updates)
        norms = {name: jnp.sqrt(jnp.sum(leaf * leaf)) for name, leaf in grads.items()}
        metrics = StepMetrics(sums.loss / total, optax.tree.norm(grads), sums.correct / total, norms)
        return TrainState(trained, opt, state.step + 1), metrics

    return step


def make_evaluation(program: Program, layout: Layout) -> Callable[[Values, Values, Batch], tuple[Array, Array]]:
    """A function from (trained, frozen, batch of one micro-batch) to the sum of cross-entropies and the token count."""

    def evaluate(trained: Values, frozen: Values, batch: Batch) -> tuple[Array, Array]:
        micro = jax.tree.map(lambda x: x[0], batch)
        return program.batch_sums(trained, frozen, micro, layout.chunk).nll, jnp.sum(batch.weights)

    return evaluate
