"""Frozen base weights: from safetensors to device arrays, one tensor at a time."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from portlab_jax.mesh import MeshPlan
from portlab_jax.model import Params
from portlab_spec.errors import UserError
from portlab_spec.models import GemmaConfig, param_table
from portlab_spec.safetensors_file import open_tensors


def load_params(folder: Path, config: GemmaConfig, dtype: jnp.dtype, mesh: MeshPlan) -> Params:
    """Load the base of a model folder.

    Per-layer tensors are stacked on axis 0 in a buffer of one parameter's size; the whole model is never held
    twice in host memory.

    Args:
        folder: Hugging Face model folder.
        config: its configuration.
        dtype: type of the device arrays.
        mesh: where the arrays go.

    Returns:
        {"embed_tokens": (V, D), "norm": (D,), "layers": {table name: (L, ...)}}.

    Raises:
        UserError: a tensor is missing or has another shape than the configuration says.
    """
    tensors = open_tensors(folder)
    params: Params = {"layers": {}}

    def read(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name not in tensors:
            raise UserError(f"the tensor {name} is missing", where=str(folder), fix="Restore the model's safetensors")
        array = tensors[name].numpy()
        if array.shape != shape:
            raise UserError(
                f"{name} has shape {array.shape}, config.json says {shape}",
                where=str(folder),
                fix="config.json and the safetensors must belong together",
            )
        return array

    for param in param_table(config):
        if param.per_layer:
            buffer = np.empty((config.num_hidden_layers, *param.shape), dtype)
            for i in range(config.num_hidden_layers):
                buffer[i] = read(param.hf.format(i=i), param.shape)
            params["layers"][param.name] = mesh.put(buffer, (None, *param.axes), param.name)
        else:
            # A device array may alias the host buffer, so it gets one of its own.
            params[param.name] = mesh.put(read(param.hf, param.shape).astype(dtype), param.axes, param.name)
    return jax.block_until_ready(params)
