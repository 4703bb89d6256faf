"""A run's parts, made from its recipe: mesh, weights, what is trained, how attention is computed."""

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from portlab_jax.adapter_init import load_adapter
from portlab_jax.attention import choose
from portlab_jax.lora import AdapterOptions, adapter_shardings, init_adapter
from portlab_jax.mesh import MeshPlan
from portlab_jax.model import Params, require_gemma
from portlab_jax.optim import make_optimizer
from portlab_jax.step import StepMetrics, StepOptions, TrainState, make_step
from portlab_jax.weights import LoadReport, abstract_params, load_params
from portlab_spec.assets import ModelFolder
from portlab_spec.data.tokens import Row
from portlab_spec.errors import UserError
from portlab_spec.models import GemmaConfig, param_table, plan_adapter
from portlab_spec.models.flops import ModelSize, model_size
from portlab_spec.packing import Layout, Packing, Plan, plan
from portlab_spec.recipe import Recipe

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """What the programs of a run are made from; no weights, and the devices need not be here.

    Attributes:
        recipe: the run.
        config: the model.
        mesh: the devices.
        options: static facts of the step; attention is chosen for each layout.
    """

    recipe: Recipe
    config: GemmaConfig
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
            device=self.mesh.device,
        )
        return dataclasses.replace(self.options, attention=attention)

    def plan(self, batches: Sequence[Sequence[Row]], *, accumulate: int = 1, max_shapes: int = 1) -> Plan:
        """Layouts for some steps' rows, as the recipe and the devices want them."""
        recipe, accelerated = self.recipe, self.mesh.device.platform != "cpu"
        packing = Packing(
            groups=self.mesh.groups,
            accumulate=accumulate,
            window=self.config.window,
            share_prefix=recipe.share_prefix,
            pack=recipe.pack,
        )
        # Tiles of an accelerator are 128 wide, and it is busy only with more logits at a time.
        sizes = {"min_block": 128, "max_chunk": 512} if accelerated else {}
        if recipe.chunk is not None:
            sizes["max_chunk"] = recipe.chunk
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
        return model_size(self.config, self.options.adapter.leaves)


@dataclasses.dataclass(frozen=True)
class Setup(Blueprint):
    """A run with its base loaded and placed.

    Attributes:
        model: the base on disk.
        frozen: weights that are not trained; in full fine-tuning, buffers alone.
        loaded: what became of the base's tensors.
    """

    model: ModelFolder
    frozen: Params
    loaded: LoadReport


def choose_attention(
    requested: str, config: GemmaConfig, dtype: Any, *, plain: bool, one_segment: bool, row_length: int, device: Any
) -> tuple[tuple[str, str], ...]:
    """The implementation for each kind of attention of a model on a device; see `choose`.

    Raises:
        UserError: what was requested would not compute such rows here.
    """
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


def draw_up(
    recipe: Recipe,
    config: GemmaConfig,
    token_ids: tuple[int, ...],
    devices: Sequence[Any] | None = None,
    memory: int | None = None,
) -> Blueprint:
    """Decide what is trained and where; everything that can be wrong with that is found here.

    Args:
        recipe: the run.
        config: its model.
        token_ids: rows of the embedding to train, ascending; none in full fine-tuning, which trains them all.
        devices: by default all that this process sees.
        memory: bytes of one of them, for devices that cannot be asked.

    Raises:
        UserError: a target that matches nothing, a mesh that does not fit the devices, an attention kernel that does
            not run on them, rows longer than the model knows positions for; a model that is no Gemma.
    """
    require_gemma(config)
    if recipe.max_length > config.max_position_embeddings:
        raise UserError(
            f"max_length {recipe.max_length} is more than the {config.max_position_embeddings} positions of the model",
            where="max_length",
            fix="Set it lower; too_long says what becomes of longer rows",
        )
    full = recipe.method == "full"
    leaves = () if full else plan_adapter(config, recipe.lora)
    devices = list(devices or jax.devices())
    wide = recipe.dtype == "float32" or (recipe.dtype == "auto" and devices[0].platform == "cpu")
    dtype = jnp.dtype(jnp.float32 if wide else jnp.bfloat16)
    # A kernel that would not even take the simplest rows is refused before the run begins.
    choose_attention(recipe.attention, config, dtype, plain=True, one_segment=True, row_length=128, device=devices[0])
    parameters = sum(math.prod(p.shape) * p.count for p in param_table(config))
    # Full fine-tuning holds a float32 master, its gradient, and with AdamW two moments.
    size = parameters * (16 if full else dtype.itemsize)
    rows = recipe.batch_size // recipe.accumulate
    mesh = MeshPlan.create(recipe.mesh, devices, weight_bytes=size, rows=rows, memory=memory)
    options = StepOptions(
        config,
        AdapterOptions(leaves, recipe.lora.dropout, () if full else token_ids),
        full=full,
        dtype=dtype,
        remat=recipe.remat,
        z_loss=recipe.z_loss,
    )
    return Blueprint(recipe, config, mesh, options)


def set_up(recipe: Recipe, model: ModelFolder, token_ids: tuple[int, ...]) -> Setup:
    """Draw a run up and load its base; whatever can be wrong is found before weights are read.

    Raises:
        UserError: as `draw_up`; a tensor that is missing or has another shape.
    """
    drawn = draw_up(recipe, GemmaConfig.load(model.path), token_ids)
    full = drawn.options.full
    frozen, loaded = load_params(
        model.path,
        drawn.config,
        drawn.options.dtype,
        drawn.mesh,
        kind=recipe.lora.quantize,
        keep=lambda param: param.buffer or not full,
    )
    return Setup(recipe, drawn.config, drawn.mesh, drawn.options, model, frozen, loaded)


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


def abstract_state(drawn: Blueprint) -> TrainState:
    """Shapes, types and shardings of step 0, without weights. Call it under the run's mesh."""
    adapter = drawn.options.adapter
    if drawn.options.full:
        wide = jnp.dtype(jnp.float32)
        trained = abstract_params(drawn.config, wide, drawn.mesh, keep=lambda param: not param.buffer)
    else:
        shapes = jax.eval_shape(
            lambda: init_adapter(
                adapter.leaves,
                jax.random.key(0),
                embedding=jnp.zeros((drawn.config.vocab_size, drawn.config.hidden_size)),
                token_ids=adapter.token_ids,
            )
        )
        trained = _placed(shapes, adapter_shardings(adapter.leaves, drawn.mesh, adapter.token_ids))
    whole = drawn.mesh.replicated
    opt = jax.eval_shape(drawn.optimizer.init, trained)
    # Moments lie as the leaves they belong to, which their types say; counters are whole everywhere.
    opt = jax.tree.map(lambda x: x if x.ndim else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), opt)
    key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    return TrainState(trained, opt, *_placed((jax.ShapeDtypeStruct((), jnp.int32), key), (whole, whole)))


def abstract_frozen(drawn: Blueprint) -> Params:
    """Shapes, types and shardings of the weights that are not trained."""
    full = drawn.options.full
    return abstract_params(drawn.config, drawn.options.dtype, drawn.mesh, keep=lambda param: param.buffer or not full)


def abstract(tree: Any) -> Any:
    """The types of arrays and where they lie, without what they hold."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def _placed(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, shardings)


def jit_step(drawn: Blueprint, state: TrainState, layout: Layout) -> Callable[..., tuple[TrainState, StepMetrics]]:
    """The step of a run for a layout, ready to compile; the state, which may be abstract, is donated.

    Its shardings are fixed on the way out as on the way in: left open, the compiler's choice may differ from the
    initial placement, and the second step would compile anew.
    """
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    step = make_step(drawn.for_layout(layout), drawn.optimizer, layout)
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))


def device_bytes(tree: Any) -> int:
    """Bytes of one device's part of abstract arrays."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        shape = leaf.sharding.shard_shape(leaf.shape) if leaf.sharding is not None else leaf.shape
        total += math.prod(shape) * leaf.dtype.itemsize
    return total
