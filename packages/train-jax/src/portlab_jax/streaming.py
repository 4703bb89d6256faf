"""Greedy decoding of one conversation, token by token, in the process of an application (`portlab_spec.decoding`).

Its prompts grow by turns and all start alike. The keys and values of a prompt are computed a chunk at a time and kept,
so that the next prompt pays only for the chunks that differ. Caches come in few sizes, each with two programs: one
reads a chunk, one makes a token. Slot i of a cache belongs to position i, so that what a token must not see, of a
padded chunk or of an answer that another prompt has replaced, lies at positions after its own.

Chunks begin at the same places whatever was kept, and never hold parts of an answer: ids depend on the prompt alone.

Shape letters: M cache slots, C tokens of a chunk, T tokens of a call; one row.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from portlab_jax.compiled import Compiled, use_compilation_cache
from portlab_jax.decode import Slots, empty_caches, first_choice, run_rows
from portlab_jax.lora import AdapterOptions
from portlab_jax.mesh import MeshPlan, device_memory, shard
from portlab_jax.model import KV, Params, with_adapter
from portlab_jax.setup import require_gemma
from portlab_jax.weights import load_params
from portlab_spec.data.tokens import common_prefix
from portlab_spec.models import GemmaConfig, param_table
from portlab_spec.recipe import Mesh

Array = jax.Array
Caches = dict[str, KV]

CHUNK = 64  # tokens of a prompt that are computed together
SLOTS = 512  # of the smallest cache; each further size is twice the one before
_NO_ADAPTER = AdapterOptions()


class Kept(NamedTuple):
    """Whole chunks of the latest prompt.

    Attributes:
        ids: theirs, a multiple of C.
        caches: with them in.
    """

    ids: list[int]
    caches: Caches


class StreamingDecoder:
    """A model in memory, see `portlab_spec.decoding.Decoder`.

    Attributes:
        positions: tokens that prompt and answer may have together.
        read: the program that takes a chunk of prompt, compiled for each size of cache; it counts.
        step: the program that makes a token, likewise.
    """

    def __init__(self, config: GemmaConfig, params: Params, mesh: MeshPlan) -> None:
        self.positions = config.max_position_embeddings
        self._config, self._params, self._mesh = config, params, mesh
        sizes = math.ceil(math.log2(max(self.positions / SLOTS, 1))) + 1
        self.read = Compiled(jax.jit(self._read), "reading a prompt", expected=sizes)
        self.step = Compiled(jax.jit(self._step), "making a token", expected=sizes)
        self._kept: dict[int, Kept] = {}

    def prepare(self, length: int, limit: int) -> None:
        """See `Decoder`."""
        slots = cache_slots(length + limit)
        with jax.set_mesh(self._mesh.mesh):
            if slots not in self._kept:
                dtype = self._params["embed_tokens"].dtype
                self._kept[slots] = Kept([], empty_caches(self._config, 1, slots, dtype))
            caches = self._kept[slots].caches
            self.read.prepare(self._params, caches, *self._place([0] * CHUNK, 0))
            self.step.prepare(self._params, caches, *self._place([0], 0))

    def decode(self, prompt: Sequence[int], stop_ids: Collection[int], limit: int) -> Iterator[int]:
        """See `Decoder`."""
        self.prepare(len(prompt), limit)
        token, last = prompt[-1], len(prompt) - 1
        caches = self._read_ids(prompt[:last], cache_slots(len(prompt) + limit))
        step = self.step.prepare(self._params, caches, *self._place([token], last))
        for position in range(last, last + limit):
            with jax.set_mesh(self._mesh.mesh):
                made, caches = step(self._params, caches, *self._place([token], position))
            token = int(made)
            yield token
            if token in stop_ids:
                return

    def _read_ids(self, ids: Sequence[int], slots: int) -> Caches:
        """A cache with the ids in. Chunks that the latest prompt shares with them are not computed again."""
        kept, caches = self._kept[slots]
        whole = len(ids) // CHUNK * CHUNK
        with jax.set_mesh(self._mesh.mesh):
            for start in range(common_prefix([ids, kept]) // CHUNK * CHUNK, len(ids), CHUNK):
                chunk = [*ids[start : start + CHUNK]]
                chunk += [0] * (CHUNK - len(chunk))
                caches = self.read(self._params, caches, *self._place(chunk, start))
                if start + CHUNK == whole:
                    self._kept[slots] = Kept([*ids[:whole]], caches)
        return caches

    def _place(self, ids: Sequence[int], at: int) -> tuple[Array, Array]:
        """Tokens (1, T) and the slot of the first, on every device."""
        tokens, slot = np.array([ids], np.int32), np.array(at, np.int32)
        return jax.device_put((tokens, slot), self._mesh.replicated)

    # ------------------------------------------------------------------------------------------- programs

    def _read(self, params: Params, caches: Caches, tokens: Array, at: Array) -> Caches:
        return self._run(params, caches, tokens, at)[1]

    def _step(self, params: Params, caches: Caches, tokens: Array, at: Array) -> tuple[Array, Caches]:
        hidden, caches = self._run(params, caches, tokens, at)
        return first_choice(with_adapter(params, {}, _NO_ADAPTER), self._config, _NO_ADAPTER, hidden)[0, 0], caches

    def _run(self, params: Params, caches: Caches, tokens: Array, at: Array) -> tuple[Array, Caches]:
        """Hidden states (1, T, D) of tokens in slots at..at+T, and the caches with them in."""
        count = next(iter(caches.values()))[0].shape[2]
        index = shard(jnp.arange(count, dtype=jnp.int32)[None], "group")
        slots = Slots(index, index >= 0)
        weights = with_adapter(params, {}, _NO_ADAPTER)
        return run_rows(weights, self._config, _NO_ADAPTER, None, None, 0, slots, caches, tokens, at)


def cache_slots(tokens: int) -> int:
    """Slots of the smallest cache that holds some tokens."""
    return SLOTS * 2 ** max(math.ceil(math.log2(tokens / SLOTS)), 0)


def load(folder: Path) -> StreamingDecoder:
    """Load a model folder; entry point `jax` of `portlab.decoder`.

    Raises:
        UnsupportedModel: its layers are not written here.
        UserError: a file is missing or does not fit the others.
    """
    config = GemmaConfig.load(folder)
    require_gemma(config)
    use_compilation_cache()
    dtype = jnp.dtype(jnp.float32 if jax.devices()[0].platform == "cpu" else jnp.bfloat16)
    mesh = choose_mesh(sum(math.prod(p.shape) * p.count for p in param_table(config)) * dtype.itemsize)
    params, _ = load_params(folder, config, dtype, mesh)
    return StreamingDecoder(config, params, mesh)


def choose_mesh(weight_bytes: int) -> MeshPlan:
    """As few devices as hold the weights in half of their memory, each with some of the heads."""
    devices = jax.local_devices()
    memory = device_memory(devices[0]) or math.inf
    ways = next((n for n in range(1, len(devices)) if weight_bytes / n <= memory / 2), len(devices))
    return MeshPlan.create(Mesh(data=1, fsdp=1, tp=ways), devices[:ways])
