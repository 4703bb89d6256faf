"""Evidence of train-jax: `python -m portlab_jax.evidence WORK OUT`, see `portlab_spec.evidence`.

Training's own functions compute it: the packed batch, the gradients, the step, the decoder. Only the forward pass that
is looked into differs: its loop hands out what it computes as the state that layers return, so that the model itself
knows nothing of it.
"""

import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from portlab_jax.compiled import use_compilation_cache
from portlab_jax.decode import Decoder
from portlab_jax.loss import head_logits
from portlab_jax.main_job import LIBRARIES
from portlab_jax.model import Inputs, Loop, embed, norm, per_layer_inputs, rope
from portlab_jax.setup import Setup, abstract, initial_state, jit_step, set_up
from portlab_jax.step import PackedAttention, StepOptions, gradients
from portlab_spec.assets import ModelFolder
from portlab_spec.cli import run
from portlab_spec.evidence import About, Evidence, Work, find_places, read_work
from portlab_spec.evidence.places import probed, score, scored, token_tensors
from portlab_spec.models import AdapterLeaf, LayerKind, Stack
from portlab_spec.packing import Batch, Layout, pack_batch
from portlab_spec.report import versions
from portlab_spec.schedule import learning_rates

Array = jax.Array


class WatchedAttention(PackedAttention):
    """Training's attention, whose layers return what goes in and out of it as their state."""

    def __call__(self, kind: LayerKind, q: Array, kv: Any, state: Any, *, shared: bool) -> tuple[Array, Any, Any]:
        out, kv, _ = super().__call__(kind, q, kv, state, shared=shared)
        own = {} if shared else {"key": kv[0], "value": kv[1]}
        return out, kv, {"query": q, "attended": out.reshape(*out.shape[:2], -1), **own}


class WatchedLoop(Loop):
    """The model's loop, whose layers return their output as part of their state."""

    def _layer(
        self, stack: Stack, x: Array, w: dict[str, Array], xs: dict[str, Any], shared: Any
    ) -> tuple[Array, Any, Any]:
        x, kv, inner = super()._layer(stack, x, w, xs, shared)
        cos, sin = self.ropes[stack.kind.rope, stack.kind.head_dim]
        # Turned back: evidence has queries and keys as they are before RoPE.
        turned = {name: rope(inner[name], cos, -sin) for name in ("query", "key") if name in inner}
        return x, kv, {"output": x, **inner, **turned}


def watched(
    trained: Any, frozen: Any, batch: Batch, key: Array | None, options: StepOptions, stacks: tuple[Stack, ...]
) -> dict[str, Array]:
    """What a forward pass over one micro-batch computes, (G, tokens, ...), under the names of the evidence."""
    weights, config = options.weights(trained, frozen), options.config
    groups = batch.rows.tokens.shape[0]
    inputs = Inputs(batch.rows.tokens.reshape(groups, -1), batch.rows.positions.reshape(groups, -1))
    x = embed(weights, options.adapter, inputs.ids, options.dtype)
    per_layer = per_layer_inputs(weights, config, inputs.ids, x) if config.per_layer else None
    attend = WatchedAttention(batch, options)
    loop = WatchedLoop(weights, config, options.adapter, inputs.positions, attend, per_layer, key, options.remat)
    last, states = loop.run(x, {})
    found = {"hidden.embedding": x, "hidden.final": norm(last, weights.top("norm"), config)}
    for stack in stacks:
        for at, number in enumerate(stack.layers):
            state = {name: value[at] for name, value in states[stack.name].items()}
            found[f"hidden.layer.{number:02}"] = state.pop("output")
            found |= {f"inner.{number:02}.{name}": value for name, value in state.items()}
    return found


def named(tree: Any, leaves: tuple[AdapterLeaf, ...], prefix: str) -> dict[str, np.ndarray]:
    """An adapter, or its gradient, under the names of the evidence and in PEFT's orientation."""
    found = {}
    for leaf in leaves:
        a, b = (np.asarray(tree["lora"][leaf.key][half]) for half in "ab")
        for i, module in enumerate(leaf.modules("")):
            peft_a, peft_b = a[i].swapaxes(-1, -2), b[i].swapaxes(-1, -2)
            if leaf.experts:
                # PEFT holds a layer's experts side by side: A (E r, in), and B (out, r E) with the expert running last.
                peft_a = peft_a.reshape(-1, peft_a.shape[-1])
                peft_b = b[i].transpose(2, 1, 0).reshape(b.shape[-1], -1)
            found[f"{prefix}{module}.lora_A.weight"], found[f"{prefix}{module}.lora_B.weight"] = peft_a, peft_b
    if "token_rows" in tree:
        found[f"{prefix}embed_tokens.token_adapter.trainable_tokens_delta"] = np.asarray(tree["token_rows"])
    return found


def collect(work: Work) -> Evidence:
    """Run the work with train-jax.

    Raises:
        UserError: as `portlab_jax.setup.set_up`.
    """
    setup = set_up(work.recipe, ModelFolder(work.model, str(work.model), None), work.token_ids)
    with jax.set_mesh(setup.mesh.mesh):
        return _collect(work, setup)


def _collect(work: Work, setup: Setup) -> Evidence:
    recipe, leaves = work.recipe, setup.options.adapter.leaves
    state = initial_state(setup)
    plan = setup.plan(work.steps, accumulate=recipe.accumulate)
    tensors: dict[str, np.ndarray] = named(state.adapter, leaves, "adapter.0.")
    repeat, numbers = _look(work, setup, state, plan, tensors), []

    # Compiled once for each layout. Gradients have a program of their own: the step's keeps them to itself.
    @functools.cache
    def programs(layout: Layout) -> tuple[Callable[..., Any], Callable[..., Any]]:
        options = setup.for_layout(layout)
        slope = jax.jit(lambda a, f, b, key: gradients(a, f, b, options, layout.chunk, key)[2])
        return slope, jit_step(setup, abstract(state), layout)

    for number, rows in enumerate(work.steps, 1):
        layout = plan.layout(number - 1)
        packed = pack_batch(rows, layout)
        batch = setup.mesh.put_rows(packed, axis=1)
        dropout = setup.options.adapter.dropout
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step) if dropout else None
        slope, step = programs(layout)
        tensors |= named(slope(state.adapter, setup.frozen, batch, key), leaves, f"gradient.{number}.")
        state, metrics = step(state, setup.frozen, batch)
        tensors |= named(state.adapter, leaves, f"adapter.{number}.")
        numbers.append((float(metrics.loss), float(packed.weights.sum()), float(metrics.grad_norm)))
    for name, column in zip(("loss", "supervised", "grad_norm"), zip(*numbers, strict=True), strict=True):
        tensors[name] = np.array(column, np.float32)
    tensors["learning_rate"] = learning_rates(recipe.optimizer, recipe.steps)[: len(work.steps)]
    options = setup.options
    decoder = Decoder(setup.config, options.adapter, work.stop_ids, work.new_tokens, setup.mesh, dtype=options.dtype)
    answers = decoder(options.weights(state.adapter, setup.frozen), work.prompts) if work.prompts else []
    device = jax.devices()[0]
    about = About(
        backend="jax",
        dtype=setup.options.dtype.name,
        versions=versions(*LIBRARIES),
        device=f"{device.platform} {device.device_kind} x {jax.device_count()}",
        recipe=recipe,
        model=work.model,
        rows=work.given,
        repeat=repeat,
        generated=tuple(tuple(ids) for ids in answers),
    )
    return Evidence(about, tensors)


def _look(work: Work, setup: Setup, state: Any, plan: Any, tensors: dict[str, np.ndarray]) -> float:
    """Add what the first step's forward pass computes; how far two passes are apart, see `About.repeat`."""
    layout = plan.layout(0)
    options, stacks = setup.for_layout(layout), setup.config.stacks
    packed = pack_batch(work.steps[0], layout)
    places = find_places(packed, work.steps[0])
    batch = setup.mesh.put_rows(packed, axis=1)
    forward = jax.jit(lambda a, f, b, k: watched(a, f, b, k, options, stacks))

    def passes(seed: int) -> list[Mapping[str, Any]]:
        key = jax.random.key(seed) if options.adapter.dropout else None
        return [
            jax.device_get(forward(state.adapter, setup.frozen, jax.tree.map(lambda x, i=i: x[i], batch), key))
            for i in range(layout.accumulate)
        ]

    seen, again = passes(0), passes(1)
    first, second = (probed(found, places)["hidden.final"] for found in (seen, again))
    tensors |= token_tensors(places) | probed(seen, places)
    states, tokens = scored(places, [found["hidden.final"] for found in seen])
    weights, of_loss = options.weights(state.adapter, setup.frozen), options.loss(layout.chunk)
    head = jax.jit(lambda h, rows, table: head_logits(h, rows, table, of_loss))
    tensors |= score(states, tokens, lambda h: head(jnp.asarray(h), weights.token_rows, weights.embedding))
    return float(np.abs(first - second).max() / np.sqrt(np.square(first).mean()))


def main(argv: list[str]) -> int:
    """Write the evidence of train-jax."""
    work, out = argv
    use_compilation_cache()
    collect(read_work(Path(work))).save(Path(out))
    return 0


if __name__ == "__main__":
    run("portlab_jax.evidence", main, sys.argv[1:])
