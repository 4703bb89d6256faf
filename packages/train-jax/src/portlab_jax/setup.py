"""A run's parts, made from its recipe: mesh, weights, what is trained, how attention is computed."""

import dataclasses
import functools
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from portlab_jax.adapter_init import load_adapter
from portlab_jax.attention import choose
from portlab_jax.flops import ModelSize
from portlab_jax.lora import AdapterOptions, adapter_shardings, init_adapter
from portlab_jax.mesh import MeshPlan
from portlab_jax.model import Params
from portlab_jax.optim import make_optimizer
from portlab_jax.packing import Layout, Packing, Plan, plan
from portlab_jax.step import StepOptions, TrainState
from portlab_jax.weights import LoadReport, load_params
from portlab_spec.assets import ModelFolder
from portlab_spec.data.tokens import Row
from portlab_spec.errors import UserError
from portlab_spec.models import GemmaConfig, param_table, plan_adapter
from portlab_spec.recipe import Recipe

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Setup:
    """Everything a run is made of, loaded and placed.

    Attributes:
        recipe: the run.
        model: the base on disk.
        config: its configuration.
        frozen: weights that are not trained; in full fine-tuning, buffers alone.
        loaded: what became of the base's tensors.
        mesh: the devices.
        options: static facts of the step; attention is chosen for each layout.
    """

    recipe: Recipe
    model: ModelFolder
    config: GemmaConfig
    frozen: Params
    loaded: LoadReport
    mesh: MeshPlan
    options: StepOptions

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """The recipe's optimiser."""
        return make_optimizer(self.recipe.optimizer, self.recipe.steps, method=self.recipe.method)

    def for_layout(self, layout: Layout) -> StepOptions:
        """The step's options with attention as it is best, and right, for a layout."""
        attention = choose_attention(
            self.recipe.attention,
            self.config,
            self.options.dtype,
            plain=layout.plain,
            one_segment=layout.one_segment,
            row_length=layout.row_length,
        )
        return dataclasses.replace(self.options, attention=attention)

    def plan(self, batches: Sequence[Sequence[Row]], *, accumulate: int = 1, max_shapes: int = 1) -> Plan:
        """Layouts for some steps' rows, as the recipe and the devices want them."""
        recipe, accelerated = self.recipe, jax.devices()[0].platform != "cpu"
        packing = Packing(
            groups=self.mesh.groups,
            accumulate=accumulate,
            window=self.config.window,
            share_prefix=recipe.share_prefix,
            pack=recipe.pack,
        )
        # Tiles of an accelerator are 128 wide, and it is busy only with more logits at a time.
        sizes = {"min_block": 128, "max_chunk": 512} if accelerated else {}
        found = plan(batches, packing, max_shapes=max_shapes, **sizes)
        if accelerated and recipe.attention != "xla" and all(layout.plain for layout in found.layouts):
            # Kernels compute whole packed rows: no longer than the longest example needs.
            longest = max(len(row.ids) for batch in batches for row in batch)
            packing = dataclasses.replace(packing, max_row_length=-(-longest // 128) * 128)
            found = plan(batches, packing, max_shapes=max_shapes, **sizes)
        return found

    @functools.cached_property
    def size(self) -> ModelSize:
        """Weights that one token meets."""
        experts = self.config.experts
        linears = 0
        for param in param_table(self.config):
            if len(param.dims) < 2 or param.name.startswith("embed_tokens"):
                continue
            active = experts.top_k / experts.count if experts and param.name.startswith("experts.") else 1
            linears += int(math.prod(param.shape) * param.count * active)
        adapters = 0
        for leaf in self.options.adapter.leaves:
            active = experts.top_k if experts and leaf.experts else 1
            adapters += leaf.rank * (leaf.into.size + leaf.out.size) * len(leaf.index) * active
        return ModelSize(linears, adapters, self.config.vocab_size * self.config.hidden_size)


def choose_attention(
    requested: str, config: GemmaConfig, dtype: Any, *, plain: bool, one_segment: bool, row_length: int
) -> tuple[tuple[str, str], ...]:
    """The implementation for each kind of attention of a model, on the devices at hand; see `choose`.

    Raises:
        UserError: what was requested would not compute such rows here.
    """
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", None)
    chosen = {}
    for kind in dict.fromkeys(config.layers):
        choice = choose(
            requested,
            platform=device.platform,
            plain=plain,
            one_segment=one_segment,
            head_dim=kind.head_dim,
            dtype=jnp.dtype(dtype).name,
            row_length=row_length,
            compute_capability=float(capability) if capability else None,
        )
        log.info("attention of %s layers: %s (%s)", kind.attention, *choice)
        chosen[kind.attention] = choice.implementation
    return tuple(sorted(chosen.items()))


def set_up(recipe: Recipe, model: ModelFolder, token_ids: tuple[int, ...]) -> Setup:
    """Load a run's base and decide what is trained; everything that can be wrong is found before weights are read.

    Args:
        recipe: the run.
        model: its base.
        token_ids: rows of the embedding to train, ascending; none in full fine-tuning, which trains them all.

    Raises:
        UserError: a target that matches nothing, a mesh that does not fit the devices, an attention kernel that does
            not run on them, rows longer than the model knows positions for, a tensor that is missing or has another
            shape.
    """
    config = GemmaConfig.load(model.path)
    if recipe.max_length > config.max_position_embeddings:
        raise UserError(
            f"max_length {recipe.max_length} is more than the {config.max_position_embeddings} positions of the model",
            where="max_length",
            fix="Set it lower; too_long says what becomes of longer rows",
        )
    full = recipe.method == "full"
    leaves = () if full else plan_adapter(config, recipe.lora)
    accelerated = jax.devices()[0].platform != "cpu"
    wide = recipe.dtype == "float32" or (recipe.dtype == "auto" and not accelerated)
    dtype = jnp.dtype(jnp.float32 if wide else jnp.bfloat16)
    # A kernel that would not even take the simplest rows is refused before the run begins.
    choose_attention(recipe.attention, config, dtype, plain=True, one_segment=True, row_length=128)
    parameters = sum(math.prod(p.shape) * p.count for p in param_table(config))
    # Full fine-tuning holds a float32 master, its gradient, and with AdamW two moments.
    size = parameters * (16 if full else dtype.itemsize)
    mesh = MeshPlan.create(recipe.mesh, weight_bytes=size, rows=recipe.batch_size // recipe.accumulate)
    options = StepOptions(
        config,
        AdapterOptions(leaves, recipe.lora.dropout, () if full else token_ids),
        full=full,
        dtype=dtype,
        remat=recipe.remat,
        z_loss=recipe.z_loss,
    )
    frozen, loaded = load_params(
        model.path, config, dtype, mesh, kind=recipe.lora.quantize, keep=lambda param: param.buffer or not full
    )
    return Setup(recipe, model, config, frozen, loaded, mesh, options)


def initial_state(setup: Setup) -> TrainState:
    """Step 0 of a run: a pure function of the recipe, the base and `lora.start_from`. Call it under the run's mesh."""
    recipe, adapter = setup.recipe, setup.options.adapter
    key = jax.random.key(recipe.seed)
    if setup.options.full:
        wide = jnp.dtype(jnp.float32)
        trained, _ = load_params(setup.model.path, setup.config, wide, setup.mesh, keep=lambda param: not param.buffer)
    else:
        make = jax.jit(
            lambda key, embedding: init_adapter(adapter.leaves, key, embedding=embedding, token_ids=adapter.token_ids),
            out_shardings=adapter_shardings(adapter.leaves, setup.mesh, adapter.token_ids),
        )
        trained = make(key, setup.frozen["embed_tokens"])
        if recipe.lora.start_from:
            trained = load_adapter(Path(recipe.lora.start_from), adapter.leaves, adapter.token_ids, trained)
    opt = jax.jit(setup.optimizer.init)(trained)
    whole = setup.mesh.replicated
    step = jax.device_put(jnp.zeros((), jnp.int32), whole)
    return TrainState(trained, opt, step, jax.device_put(jax.random.key_data(key), whole))
