"""vLLM-TPU without a TPU, to try the image: JAX on the CPU, and plain JAX in place of the one kernel that Gemma needs.

On PYTHONPATH, Python imports this before all else, in every process of the server. Four things of tpu-inference 0.32
need a TPU, and are replaced once their modules are imported: the kernel of ragged paged attention, the order of devices
by their place in the slice, how much memory a device has, and options of the TPU compiler. All else is what runs on a
TPU: vLLM's server, the loading of weights, the models in JAX and through torchax, adapters, sampling. It is slow, and
says nothing of speed, of memory or of the kernel.
"""

import importlib.abc
import importlib.util
import sys
from types import ModuleType

KERNEL = "tpu_inference.kernels.ragged_paged_attention.v3.kernel"
UTILS = "tpu_inference.utils"
OPTIONS = "tpu_inference.models.common.compiler_options"
DEVICE_BYTES = 4 << 30


def plain_attention(kernel: ModuleType):
    """A function in place of `ragged_paged_attention`, with its arguments; `kernel` is the module that holds it.

    Queries q_thd (tokens of all sequences, one after another), keys and values k_tgd, v_tgd; h / g heads share one. The
    cache's pages hold keys and values of a head one after the other. Returns the outputs, as q_thd, and the cache.
    """
    import jax
    import jax.numpy as jnp

    def attention(
        q, k, v, cache, lengths, pages, starts, distribution, *, sm_scale=1.0, sliding_window=None, soft_cap=None,
        use_causal_mask=True, update_kv_cache=True, q_scale=None, k_scale=None, v_scale=None, **_tuning,
    ):  # fmt: skip
        if (q_scale, k_scale, v_scale) != (None, None, None):
            raise NotImplementedError("a quantised cache is not computed without a TPU")
        tokens, heads, dim = q.shape
        groups, page_size, sequences = k.shape[1], cache.shape[1], lengths.shape[0]
        pages = pages.reshape(sequences, -1)
        token = jnp.arange(tokens)
        sequence = jnp.minimum(jnp.searchsorted(starts[1:], token, side="right"), sequences - 1)
        is_real = token < starts[distribution[-1]]
        position = lengths[sequence] - starts[sequence + 1] + token  # of a token in its sequence
        if update_kv_cache:
            page = jnp.where(is_real, pages[sequence, position // page_size], cache.shape[0])
            cache = cache.at[page, position % page_size].set(kernel.merge_kv(k, v).astype(cache.dtype), mode="drop")
        held = cache[pages].reshape(sequences, -1, cache.shape[-3] * cache.shape[-2], cache.shape[-1])
        keys, values = (held[:, :, i : 2 * groups : 2, :dim].astype(jnp.float32) for i in (0, 1))
        q_tghd = q.reshape(tokens, groups, heads // groups, dim).astype(jnp.float32)
        scores = jnp.einsum("tghd,skgd->tghsk", q_tghd, keys) * sm_scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        place = jnp.arange(keys.shape[1])
        seen = place < lengths[sequence][:, None]
        if use_causal_mask:
            seen &= place <= position[:, None]
            if sliding_window is not None:
                seen &= place > position[:, None] - sliding_window
        own = jnp.arange(sequences) == sequence[:, None]
        mask_tsk = own[:, :, None] & seen[:, None, :]
        scores = jnp.where(mask_tsk[:, None, None], scores, jnp.finfo(jnp.float32).min)
        weights = jax.nn.softmax(scores.reshape(*scores.shape[:3], -1), axis=-1).reshape(scores.shape)
        out = jnp.einsum("tghsk,skgd->tghd", weights, values).reshape(q.shape)
        return jnp.where(is_real[:, None, None], out, 0).astype(q.dtype), cache

    return attention


def replace_kernel(module: ModuleType) -> None:
    """Attention without Pallas."""
    module.ragged_paged_attention = plain_attention(module)


def replace_device_facts(module: ModuleType) -> None:
    """A mesh in the order of the devices, and a memory for each."""
    import jax
    import numpy as np

    def mesh(shape, names, *, devices=None):
        return jax.sharding.Mesh(np.array(devices or jax.devices()).reshape(shape), names)

    module.make_optimized_mesh = mesh
    module.hbm_usage_bytes = lambda devices: [(0, DEVICE_BYTES) for _ in devices]


def replace_compiler_options(module: ModuleType) -> None:
    """None of the TPU compiler's."""
    module.get_step_fn_compiler_options = module.get_sampling_compiler_options = dict


REPLACE = {KERNEL: replace_kernel, UTILS: replace_device_facts, OPTIONS: replace_compiler_options}


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of REPLACE as they are, and has them changed once they are loaded."""

    def find_spec(self, name, path=None, target=None):
        """The module's own spec, with a loader that also replaces."""
        if name not in REPLACE:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        load = spec.loader.exec_module

        def load_and_replace(module: ModuleType) -> None:
            load(module)
            REPLACE[name](module)

        spec.loader.exec_module = load_and_replace
        return spec


sys.meta_path.insert(0, Finder())
