"""Prefill and decode steps of the model, compiled for a slice, for models of time to first token and per token.

These are our own model's steps, with one compilation for one batch and context, not those of a serving engine, whose
kernels, paged cache and scheduler differ. Their FLOPs and bytes are what the mathematics needs; that is what a
roofline wants.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from portlab_jax.decode import Slots, empty_caches, first_choice, run_rows
from portlab_jax.lora import AdapterOptions
from portlab_jax.mesh import MeshPlan
from portlab_jax.model import Inputs, Params, hidden_states, with_adapter
from portlab_jax.planner.program import Compile, Program
from portlab_jax.planner.workload import made_up
from portlab_jax.setup import choose_attention, device_bytes
from portlab_jax.step import PackedAttention, StepOptions, pick_slots
from portlab_jax.weights import abstract_params
from portlab_spec.hardware import Slice
from portlab_spec.models import GemmaConfig, LayerKind
from portlab_spec.packing import Packing, pack_batch, plan
from portlab_spec.recipe import Recipe

Array = jax.Array


@dataclass(frozen=True)
class InferenceProgram:
    """A step of inference.

    Attributes:
        mesh: size of each axis.
        batch: sequences.
        context: tokens of each.
        arguments: bytes of a device's arguments by kind: weights, cache.
        program: as compiled.
    """

    mesh: dict[str, int]
    batch: int
    context: int
    arguments: dict[str, int]
    program: Program


class PromptAttention(PackedAttention):
    """Attention of whole prompts, whose keys and values are kept."""

    def __call__(self, kind: LayerKind, q: Array, kv: Any, state: Any, *, shared: bool) -> tuple[Array, Any, Any]:
        """See `portlab_jax.model.Attend`; the new state is the layer's own keys and values."""
        out, shares, _ = super().__call__(kind, q, kv, state, shared=shared)
        return out, shares, None if shared else kv


def compile_prefill(
    recipe: Recipe,
    config: GemmaConfig,
    part: Slice,
    devices: Sequence[Any],
    compiler: Compile,
    *,
    batch: int,
    context: int,
) -> InferenceProgram:
    """Compile the step that reads prompts and yields their caches and first tokens.

    Args:
        recipe: names the mesh, the attention kernel and the type; weights are served without an adapter.
        config: the model.
        part: the slice.
        devices: of the slice.
        compiler: takes a jitted function and its abstract arguments.
        batch: prompts.
        context: tokens of each.
    """
    mesh = _mesh(recipe, part, devices, batch)
    # Logits are taken one token early, so that a prompt is a training row; that changes no count.
    rows = made_up(recipe.model_copy(update={"batch_size": batch, "max_length": context}), config, context, 1).rows
    packing = Packing(
        groups=mesh.groups, window=config.window, share_prefix=False, max_row_length=-(-context // 128) * 128
    )
    layout = plan([[*rows]], packing, min_block=128, max_chunk=512).layout(0)
    attention = choose_attention(
        recipe.attention,
        config,
        jnp.bfloat16,
        plain=layout.plain,
        one_segment=layout.one_segment,
        row_length=layout.row_length,
        device=mesh.device,
    )
    options = StepOptions(config, AdapterOptions(), dtype=jnp.dtype(jnp.bfloat16), attention=attention)

    def prefill(params: Params, arrays: Any) -> tuple[Array, Any]:
        arrays = jax.tree.map(lambda x: x[0], arrays)
        weights = with_adapter(params, {}, options.adapter)
        groups = arrays.rows.tokens.shape[0]
        inputs = Inputs(arrays.rows.tokens.reshape(groups, -1), arrays.rows.positions.reshape(groups, -1))
        attend = PromptAttention(arrays, options)
        hidden, caches = hidden_states(weights, config, options.adapter, inputs, attend, dtype=options.dtype)
        last = pick_slots(hidden, arrays.slots)
        return first_choice(weights, config, options.adapter, last), caches

    with jax.set_mesh(mesh.mesh):
        params = abstract_params(config, jnp.bfloat16, mesh)
        arrays = mesh.abstract_rows(pack_batch(rows, layout), axis=1)
        program = compiler(jax.jit(prefill), params, arrays)
    kinds = {"weights": device_bytes(params), "batch": device_bytes(arrays)}
    return InferenceProgram(dict(mesh.mesh.shape), batch, context, kinds, program)


def compile_decode(
    recipe: Recipe,
    config: GemmaConfig,
    part: Slice,
    devices: Sequence[Any],
    compiler: Compile,
    *,
    batch: int,
    context: int,
) -> InferenceProgram:
    """Compile the step that yields one more token for sequences whose cache holds `context` tokens.

    Arguments as for `compile_prefill`. Every layer's cache has room for the whole context, sliding ones too.
    """
    mesh = _mesh(recipe, part, devices, batch)
    dtype = jnp.dtype(jnp.bfloat16)

    def decode(params: Params, slots: Slots, caches: Any, tokens: Array, at: Array) -> tuple[Array, Any]:
        weights = with_adapter(params, {}, AdapterOptions())
        hidden, caches = run_rows(weights, config, AdapterOptions(), dtype, None, 0, slots, caches, tokens, at)
        return first_choice(weights, config, AdapterOptions(), hidden), caches

    with jax.set_mesh(mesh.mesh):
        params = abstract_params(config, dtype, mesh)
        caches = jax.eval_shape(lambda: empty_caches(config, batch, context, dtype))

        def rows(shape: tuple[int, ...], kind: Any) -> Any:
            return jax.ShapeDtypeStruct(shape, kind, sharding=mesh.row_sharding(shape, 0))

        slots = Slots(rows((batch, context), jnp.int32), rows((batch, context), jnp.bool_))
        at = jax.ShapeDtypeStruct((), jnp.int32, sharding=mesh.replicated)
        function = jax.jit(decode, donate_argnums=2)
        program = compiler(function, params, slots, caches, rows((batch, 1), jnp.int32), at)
    kinds = {"weights": device_bytes(params), "cache": device_bytes(caches)}
    return InferenceProgram(dict(mesh.mesh.shape), batch, context, kinds, program)


def _mesh(recipe: Recipe, part: Slice, devices: Sequence[Any], batch: int) -> MeshPlan:
    """Serving cuts heads first: every device works on every token, which is what latency asks for."""
    sizes = recipe.mesh
    if sizes.tp is None and sizes.fsdp is None and sizes.data is None:
        sizes = sizes.model_copy(update={"data": 1, "fsdp": 1, "tp": part.devices})
    return MeshPlan.create(sizes, devices, rows=batch, memory=part.device_memory)
