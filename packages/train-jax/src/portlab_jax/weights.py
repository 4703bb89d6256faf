"""Base weights between safetensors and device arrays, one tensor at a time, never whole in host memory."""

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from portlab_jax.mesh import MeshPlan
from portlab_jax.model import Params
from portlab_jax.quantize import Kind, is_quantized, quantize, require_qwix
from portlab_spec.errors import UserError
from portlab_spec.models import GemmaConfig, Param, find_prefix, param_table
from portlab_spec.safetensors_file import TensorView, open_tensors


@dataclass(frozen=True)
class LoadReport:
    """What became of the tensors of a model folder.

    Attributes:
        prefix: what the text model's names start with.
        mapped: tensors that were loaded.
        unmapped: tensors that are no part of the text model, counted by the start of their name.
        bytes: of the mapped tensors on disk.
    """

    prefix: str
    mapped: int
    unmapped: dict[str, int]
    bytes: int

    def describe(self) -> str:
        """One line."""
        rest = ", ".join(f"{count} {name}" for name, count in self.unmapped.items())
        left = f"; left out: {rest}" if rest else ""
        return f"{self.mapped} tensors of {self.prefix}* loaded, {self.bytes / 1e9:.2f} GB{left}"


def survey(folder: Path, config: GemmaConfig, tensors: Mapping[str, TensorView] | None = None) -> LoadReport:
    """Check a folder's tensors against the configuration, by their headers alone.

    Raises:
        UserError: a tensor is missing or has another shape than the configuration says, or a tensor inside the text
            model is not known.
    """
    tensors = open_tensors(folder) if tensors is None else tensors
    prefix = find_prefix(tensors, str(folder))
    wanted = {name: p.shape for p in param_table(config) for name in p.tensor_names(prefix)}
    for name, shape in wanted.items():
        if name not in tensors:
            raise UserError(f"the tensor {name} is missing", where=str(folder), fix="Restore the model's safetensors")
        if tensors[name].shape != shape:
            raise UserError(
                f"{name} has shape {tensors[name].shape}, config.json says {shape}",
                where=str(folder),
                fix="config.json and the safetensors must belong together",
            )
    unmapped: Counter[str] = Counter()
    for name in tensors.keys() - wanted.keys():
        if name.startswith(f"{prefix}layers."):
            _check_redundant(name, prefix, config, folder)
            unmapped["keys and values of layers that share them"] += 1
        else:
            unmapped[_part_of(name)] += 1
    size = sum(math.prod(shape) * tensors[name].dtype.itemsize for name, shape in wanted.items())
    return LoadReport(prefix, len(wanted), dict(sorted(unmapped.items())), size)


def _check_redundant(name: str, prefix: str, config: GemmaConfig, folder: Path) -> None:
    """Layers that share keys and values need none; some releases ship them all the same, others do not."""
    layer, _, rest = name.removeprefix(f"{prefix}layers.").partition(".")
    known = layer.isdigit() and int(layer) < config.num_hidden_layers
    if not (known and config.layers[int(layer)].shares_kv and rest.split(".")[1] in ("k_proj", "v_proj", "k_norm")):
        raise UserError(
            f"the tensor {name} has no place in this model",
            where=str(folder),
            fix="config.json and the safetensors must belong together",
        )


def _part_of(name: str) -> str:
    parts = name.removeprefix("model.").split(".")
    return parts[0]


def load_params(
    folder: Path,
    config: GemmaConfig,
    dtype: Any,
    mesh: MeshPlan,
    *,
    kind: Kind = "none",
    keep: Callable[[Param], bool] = lambda param: True,
) -> tuple[Params, LoadReport]:
    """Load the base of a model folder straight into sharded device arrays.

    Each device's part of a stack is read from the memory-mapped files into a buffer of that part's size: a layer's
    tensor is touched only where a device of this process needs it.

    Args:
        folder: Hugging Face model folder.
        config: its configuration.
        dtype: type of the device arrays.
        mesh: where the arrays go.
        kind: how linear layers are held; the others keep `dtype`.
        keep: which parameters to load.

    Returns:
        {"embed_tokens": (V, D), "norm": (D,), ..., "layers": {stack: {name: (n, ...)}}}, and a report.

    Raises:
        UserError: as `survey`; weights are to be quantised, and qwix is missing.
    """
    if kind != "none":
        require_qwix()
    tensors = open_tensors(folder)
    report = survey(folder, config, tensors)

    def read(param: Param, index: Any) -> np.ndarray:
        views = [tensors[name] for name in param.tensor_names(report.prefix)]
        layers = range(param.count)[index[0]] if param.stack else range(1)
        part = index[1:] if param.stack else index
        shape = [len(range(size)[s]) for size, s in zip(param.shape, part, strict=True)]
        buffer = _aligned((len(layers), *shape), dtype)
        for row, i in enumerate(layers):
            buffer[row] = views[i].numpy()[part]
            # Pages of the file count as this process's memory as long as they are mapped.
            views[i].release()
        return buffer if param.stack else buffer[0]

    def load(param: Param, shape: tuple[int, ...], sharding: NamedSharding) -> Any:
        array = jax.make_array_from_callback(shape, sharding, lambda index: read(param, index))
        # One parameter at a time: the next buffer is allocated when this one has gone.
        return jax.block_until_ready(quantize(array, kind) if is_quantized(param, kind) else array)

    return _build(filter(keep, param_table(config)), mesh, load), report


def _build(
    table: Iterable[Param], mesh: MeshPlan, make: Callable[[Param, tuple[int, ...], NamedSharding], Any]
) -> Params:
    """The tree of parameters, each made from its entry, its shape and its sharding with the layers stacked."""
    params: Params = {"layers": {}}
    for param in table:
        shape = (param.count, *param.shape) if param.stack else param.shape
        place = params["layers"].setdefault(param.stack, {}) if param.stack else params
        place[param.name] = make(param, shape, mesh.sharding(param.dims, lead=1 if param.stack else 0))
    return params


def _aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An empty array that a CPU device takes over as it is; one that is not aligned to 64 bytes it would copy."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def abstract_params(
    config: GemmaConfig, dtype: Any, mesh: MeshPlan, *, keep: Callable[[Param], bool] = lambda param: True
) -> Params:
    """Shapes, types and shardings of the base, for compiling without weights."""
    return _build(
        filter(keep, param_table(config)),
        mesh,
        lambda _, shape, sharding: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding),
    )


def random_params(config: GemmaConfig, dtype: Any, mesh: MeshPlan, key: jax.Array) -> Params:
    """Random weights of a model, drawn on the devices: for benchmarks and compile checks without a download."""
    numbers = {param.key: number for number, param in enumerate(param_table(config))}

    def draw(param: Param, shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
        if param.init in ("one", "norm"):
            neutral = 1 if param.init == "one" or config.norm_offset == 0 else 0
            return jax.device_put(np.full(shape, neutral, dtype), sharding)
        scale = 0.02 if len(param.shape) < 2 else param.shape[-1] ** -0.5
        return _normal(shape, dtype, scale, sharding)(key, numbers[param.key])

    return _build(param_table(config), mesh, draw)


@functools.cache
def _normal(shape: tuple[int, ...], dtype: Any, scale: float, sharding: NamedSharding) -> Callable[..., jax.Array]:
    """Draws from a key and a number; compiled once for all parameters of a shape."""

    def values(key: jax.Array, number: int) -> jax.Array:
        return (jax.random.normal(jax.random.fold_in(key, number), shape, jnp.float32) * scale).astype(dtype)

    return jax.jit(values, out_shardings=sharding)
