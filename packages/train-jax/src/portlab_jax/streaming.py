"""Greedy decoding of one conversation, token by token, in the process of an application (`portlab_spec.decoding`).

Its prompts grow by turns and all start alike. The keys and values of a prompt are computed a chunk at a time and kept,
so that the next prompt pays only for the chunks that differ. Caches come in few sizes, each with two programs: one
reads a chunk, one makes a token. Slot i of a cache belongs to position i, so that what a token must not see, of a
padded chunk or of an answer that another prompt has replaced, lies at positions after its own.

Chunks begin at the same places whatever was kept, and never hold parts of an answer: ids depend on the prompt alone.

Shape letters: M cache slots, C tokens of a chunk, T tokens of a call; one row.
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from portlab_jax.compiled import Compiled, use_compilation_cache
from portlab_jax.decode import attend_cached, empty_caches, first_choice
from portlab_jax.lora import AdapterOptions
from portlab_jax.mesh import MeshPlan, device_memory, shard
from portlab_jax.model import KV, Inputs, Params, empty_kv, hidden_states, require_gemma, with_adapter
from portlab_jax.weights import load_params
from portlab_spec.data.tokens import common_prefix
from portlab_spec.models import GemmaConfig, LayerKind, Section, Stack, param_table
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


class ChunkAttention:
    """Attention of a chunk (1, T) in slots at..at+T to what a cache holds before them, and to itself.

    A layer's state is its cached keys and values (1, M, K, d), which are only read. The new state is the chunk's own
    (1, T, K, d): a loop over layers that handed on whole caches would copy them several times.
    """

    def __init__(self, at: Array, tokens: int, slots: int, scale: float) -> None:
        index = jnp.arange(slots, dtype=jnp.int32)
        self.positions, self.scale, self._slots = at + jnp.arange(tokens, dtype=jnp.int32), scale, slots
        keys = jnp.concatenate([index, self.positions])
        # What a cache holds from `at` on is of another prompt.
        exists = jnp.concatenate([index < at, jnp.ones(tokens, bool)])
        self._distance = jnp.where(exists, self.positions[:, None] - keys, -1)

    def empty(self, kind: LayerKind, x: Array) -> tuple[KV, KV]:
        """See `portlab_jax.model.Attend`."""
        cached = shard(jnp.zeros((1, self._slots, kind.kv_heads, kind.head_dim), x.dtype), "group", None, "kv_heads")
        return (cached, cached), empty_kv(kind, x)

    def __call__(self, kind: LayerKind, q: Array, kv: Any, state: Any, *, shared: bool) -> tuple[Array, Any, Any]:
        """See `portlab_jax.model.Attend`; the new state is the chunk's own keys and values."""
        cached, own = kv if shared else (state, kv)
        seen = self._distance >= 0
        if kind.window is not None:
            seen &= self._distance < kind.window
        out = attend_cached(q, cached, own, shard(seen[None], "group"), self.scale)
        return out, (cached, own), None if shared else own


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
        self.step = Compiled(jax.jit(self._step, donate_argnums=1), "making a token", expected=sizes)
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
        # A copy, which the steps may write in.
        caches = jax.tree.map(jnp.copy, self._read_ids(prompt[:last], cache_slots(len(prompt) + limit)))
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
        slots = next(iter(caches.values()))[0].shape[2]
        attention = ChunkAttention(at, tokens.shape[1], slots, self._config.attention_scale)
        inputs = Inputs(tokens, attention.positions[None])
        weights = with_adapter(params, {}, _NO_ADAPTER)
        hidden, new = hidden_states(weights, self._config, _NO_ADAPTER, inputs, attention, state=caches)

        def write(cache: Array, own: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(cache, own, at, axis=2)

        return hidden, {name: jax.tree.map(write, cache, new[name]) for name, cache in caches.items()}


def cache_slots(tokens: int) -> int:
    """Slots of the smallest cache that holds some tokens."""
    return SLOTS * 2 ** max(math.ceil(math.log2(tokens / SLOTS)), 0)


@dataclasses.dataclass(frozen=True)
class LayerByLayer(GemmaConfig):
    """A model whose layers are not stacked.

    XLA for CPUs copies the layer that a loop takes out of a stack, which is half of a token's time. Without the loop it
    compiles three times as long, once (both of Gemma 3 270M on two cores). Accelerators keep the loop.
    """

    @functools.cached_property
    def sections(self) -> tuple[Section, ...]:
        """One for each layer."""
        stacks = [Stack(f"{kind.name}_{i}", kind, (i,), 1) for i, kind in enumerate(self.layers)]
        return tuple(Section((stack,), repeats=1) for stack in stacks)

    @staticmethod
    def of(config: GemmaConfig) -> "LayerByLayer":
        """The same model."""
        return LayerByLayer(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)})


def load(folder: Path) -> StreamingDecoder:
    """Load a model folder; entry point `jax` of `portlab.decoder`.

    Raises:
        UnsupportedModel: its layers are not written here.
        UserError: a file is missing or does not fit the others.
    """
    config = GemmaConfig.load(folder)
    require_gemma(config)
    use_compilation_cache()
    on_cpu = jax.devices()[0].platform == "cpu"
    config = LayerByLayer.of(config) if on_cpu else config
    dtype = jnp.dtype(jnp.float32 if on_cpu else jnp.bfloat16)
    mesh = choose_mesh(sum(math.prod(p.shape) * p.count for p in param_table(config)) * dtype.itemsize)
    params, _ = load_params(folder, config, dtype, mesh)
    return StreamingDecoder(config, params, mesh)


def choose_mesh(weight_bytes: int) -> MeshPlan:
    """As few devices as hold the weights in half of their memory, each with some of the heads."""
    devices = jax.local_devices()
    memory = device_memory(devices[0]) or math.inf
    ways = next((n for n in range(1, len(devices)) if weight_bytes / n <= memory / 2), len(devices))
    return MeshPlan.create(Mesh(data=1, fsdp=1, tp=ways), devices[:ways])
