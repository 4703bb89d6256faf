"""A run's parts, made from its recipe: the model as a function, its tensors on the mesh, the programs of its steps."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import torch
from torch import nn

from portlab_hf.adapter_files import start_from
from portlab_hf.experts import use_dense_experts
from portlab_hf.model import (
    add_adapter,
    base_of,
    decoder_layers,
    load_base,
    parameter_specs,
    train_weights_of,
    trained_parameters,
)
from portlab_hf.recompute import recompute_layers
from portlab_hf.token_rows import use_rows_alone
from portlab_spec.assets import ModelFolder
from portlab_spec.data.tokens import Row
from portlab_spec.mesh import Spec
from portlab_spec.models import AdapterLeaf, GemmaConfig, param_table, plan_adapter
from portlab_spec.models.flops import ModelSize, model_size
from portlab_spec.packing import Layout, Packing, Plan, plan
from portlab_spec.recipe import Recipe
from portlab_torchax import attention
from portlab_torchax.dropout import key_names, use_keys
from portlab_torchax.experts import use_sums
from portlab_torchax.functional import Functional, Values, plain_torch
from portlab_torchax.lora import use_small_transposes
from portlab_torchax.mesh import Placement
from portlab_torchax.optim import make_optimizer
from portlab_torchax.remat import checkpoint_of
from portlab_torchax.step import Program, StepMetrics, TrainState, make_step
from portlab_torchax.support import require_supported

# Attention here writes its mask and scores out, T x T for each packed row: longer rows cost more than they save.
MAX_ROW_LENGTH = 2048


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """What the programs of a run are made from; no weights, and the devices need not be here.

    Attributes:
        recipe: the run.
        config: the model.
        placement: the devices.
        program: the model as a function, and what of a step does not change.
        leaves: what is adapted; nothing in full fine-tuning.
        token_ids: rows of the embedding that are trained by themselves.
        specs: mesh axes of the model's tensors, by name; the others are replicated.
        trained: names of what is trained.
    """

    recipe: Recipe
    config: GemmaConfig
    placement: Placement
    program: Program
    leaves: tuple[AdapterLeaf, ...]
    token_ids: tuple[int, ...]
    specs: Mapping[str, Spec]
    trained: tuple[str, ...]

    @property
    def full(self) -> bool:
        """Are all weights trained?"""
        return self.recipe.method == "full"

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """The recipe's optimiser."""
        return make_optimizer(self.recipe.optimizer, self.recipe.steps, method=self.recipe.method)

    @functools.cached_property
    def size(self) -> ModelSize:
        """Weights that one token meets."""
        return model_size(self.config, self.leaves)

    def plan(self, batches: Sequence[Sequence[Row]], *, accumulate: int = 1, max_shapes: int = 1) -> Plan:
        """Layouts for some steps' rows, as the recipe and the devices want them."""
        recipe, accelerated = self.recipe, self.placement.device.platform != "cpu"
        longest = max(len(row.ids) for batch in batches for row in batch)
        packing = Packing(
            groups=self.placement.groups,
            accumulate=accumulate,
            window=self.config.window,
            share_prefix=recipe.share_prefix,
            pack=recipe.pack,
            max_row_length=max(MAX_ROW_LENGTH, -(-longest // 128) * 128),
        )
        chunk = recipe.chunk or (512 if accelerated else 128)
        return plan(batches, packing, max_shapes=max_shapes, min_block=128 if accelerated else 32, max_chunk=chunk)


@dataclasses.dataclass(frozen=True)
class Setup(Blueprint):
    """A run with its model loaded and placed.

    Attributes:
        model: the base on disk.
        frozen: the model's tensors that are not trained.
        start: those that are, before the first step; float32.
    """

    model: ModelFolder
    frozen: Values
    start: Values


Load = Callable[[torch.dtype, str], Any]  # from a type and the name of an attention to transformers' model


def draw_up(
    recipe: Recipe,
    config: GemmaConfig,
    model: ModelFolder,
    token_ids: tuple[int, ...],
    load: Load,
    devices: Sequence[Any] | None = None,
    memory: int | None = None,
) -> Blueprint:
    """Decide what is trained and where, and build the model; what can be wrong is found before weights are read.

    Args:
        recipe: the run.
        config: its model.
        model: where that is from.
        token_ids: rows of the embedding to train, ascending; none in full fine-tuning, which trains them all.
        load: makes transformers' model, with weights or without.
        devices: by default all that this process sees.
        memory: bytes of one of them, for devices that cannot be asked.

    Raises:
        UserError: what this trainer does not do; a target that matches nothing, a mesh that does not fit the devices,
            rows longer than the model knows positions for.
    """
    full = recipe.method == "full"
    leaves = () if full else plan_adapter(config, recipe.lora)
    require_supported(recipe, config, leaves, token_ids)
    devices = list(devices or jax.devices())
    wide = recipe.dtype == "float32" or (recipe.dtype == "auto" and devices[0].platform == "cpu")
    dtype = torch.float32 if wide else torch.bfloat16
    parameters = sum(math.prod(p.shape) * p.count for p in param_table(config))
    # Full fine-tuning holds a float32 master, its gradient, and with AdamW two moments.
    size = parameters * (16 if full else dtype.itemsize)
    placement = Placement.create(
        recipe.mesh, devices, weight_bytes=size, rows=recipe.batch_size // recipe.accumulate, memory=memory
    )
    with plain_torch():
        module = _build(recipe, config, model, token_ids, load, torch.float32 if full else dtype)
    if recipe.remat != "none":
        recompute_layers(base_of(module), checkpoint_of(recipe.remat), reentrant=False)
    placement.hold_rows(decoder_layers(base_of(module)))
    specs, trained = parameter_specs(module, config, placement.shape), tuple(trained_parameters(module))
    functional, head = Functional(module), Functional(base_of(module).lm_head)
    known = {id(tensor): name for name, tensor in functional.tensors().items()}
    head_names = {own: known[id(tensor)] for own, tensor in head.tensors().items()}
    program = Program(
        functional,
        head,
        head_names,
        _whole_width(placement, {own: specs[name] for own, name in head_names.items() if name in specs}),
        config,
        jnp.dtype(str(dtype).removeprefix("torch.")),
        z_loss=recipe.z_loss,
        seed=recipe.seed,
        keys=tuple(key_names(module)),
    )
    return Blueprint(recipe, config, placement, program, leaves, token_ids, specs, trained)


def _whole_width(placement: Placement, specs: Mapping[str, Spec]) -> dict[str, Any]:
    """Places of matrices (V, D) whose rows stay cut and whose columns do not; none on a single device."""
    if placement.mesh.size == 1:
        return {}
    return {name: placement.sharding((spec[0], None)) for name, spec in specs.items() if len(spec) == 2}


def _build(
    recipe: Recipe, config: GemmaConfig, model: ModelFolder, token_ids: tuple[int, ...], load: Load, dtype: torch.dtype
) -> nn.Module:
    """transformers' model with what the recipe trains in it."""
    base = load(dtype, attention.register())
    if config.experts:
        use_dense_experts(base)
    if recipe.method == "full":
        train_weights_of(base)
        module: nn.Module = base
        return module
    adapted = add_adapter(recipe, config, base, model, token_ids)
    if recipe.lora.start_from:
        start_from(adapted, recipe.lora, Path(recipe.lora.start_from))
    use_rows_alone(adapted)
    use_sums(adapted)
    use_small_transposes(adapted)
    use_keys(adapted)
    return adapted


def set_up(recipe: Recipe, model: ModelFolder, token_ids: tuple[int, ...]) -> Setup:
    """Draw a run up and place its weights.

    Raises:
        UserError: as `draw_up`.
    """

    def load(dtype: torch.dtype, name: str) -> Any:
        return load_base(model.path, dtype, attention=name)

    drawn = draw_up(recipe, GemmaConfig.load(model.path), model, token_ids, load)
    functional = drawn.program.model
    with plain_torch():
        tensors = functional.tensors()
        start = {name: tensors.pop(name).detach().clone() for name in drawn.trained}
        frozen = drawn.placement.put(tensors, drawn.specs)
        placed = drawn.placement.put(start, drawn.specs)
        functional.release()
    return Setup(**_fields(drawn), model=model, frozen=frozen, start=placed)


def _fields(drawn: Blueprint) -> dict[str, Any]:
    return {field.name: getattr(drawn, field.name) for field in dataclasses.fields(drawn)}


def initial_state(setup: Setup) -> TrainState:
    """Step 0 of a run: a pure function of the recipe, the base and `lora.start_from`."""
    shapes = jax.eval_shape(setup.optimizer.init, setup.start)
    places = opt_shardings(setup, shapes)
    opt = jax.jit(setup.optimizer.init, out_shardings=places)(setup.start)
    # Copies, since a step takes its state's memory.
    trained = {name: jnp.copy(value) for name, value in setup.start.items()}
    return TrainState(trained, opt, jax.device_put(jnp.zeros((), jnp.int32), setup.placement.replicated))


def opt_shardings(drawn: Blueprint, state: Any) -> Any:
    """Where the optimiser's state lies: moments as their leaf, what has another shape whole on every device.

    Args:
        drawn: the run.
        state: shapes of it.
    """
    shapes = dict(drawn.program.model.module.named_parameters())
    whole = drawn.placement.replicated

    def place(leaf: Any, name: str) -> Any:
        fits = tuple(leaf.shape) == tuple(shapes[name].shape) and name in drawn.specs
        return drawn.placement.sharding(drawn.specs[name]) if fits else whole

    names = {name: name for name in drawn.trained}
    return optax.tree_utils.tree_map_params(drawn.optimizer, place, state, names, transform_non_params=lambda _: whole)


def jit_step(drawn: Blueprint, state: TrainState, layout: Layout) -> Callable[..., tuple[TrainState, StepMetrics]]:
    """The step of a run for a layout, ready to compile; the state, which may be abstract, is donated.

    Its shardings are fixed on the way out as on the way in: left open, the compiler's choice may differ from the
    initial placement, and the second step would compile anew.
    """
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    step = make_step(drawn.program, drawn.optimizer, layout)
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
