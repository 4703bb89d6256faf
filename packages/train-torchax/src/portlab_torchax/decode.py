"""Greedy decoding as two programs: the prefix that all prompts share, and everything that follows it in one loop.

transformers' static cache is an object with counters of its own, which JAX can neither trace nor carry through a loop.
Here keys and values are arrays with a slot for every token there can be, and the cache that transformers' layers write
to is a thin view of them that exists while a step is traced.

Shape letters: B rows, P prefix tokens, T prompt width, N new tokens, M = P + T + N slots, H key heads, d head size.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn
from torchax import interop

from portlab_hf.masks import for_model
from portlab_hf.model import base_of, text_model
from portlab_spec.data.tokens import common_prefix
from portlab_torchax.functional import Values
from portlab_torchax.step import Program

Array = jax.Array
# Keys and values by the layer's number, as text: names in a pytree are sorted.
Layers = dict[str, tuple[Array, ...]]

WIDTHS = 32  # prompt widths are multiples of it: one compilation serves many questions


class SlotCache:
    """Keys and values of every layer, (B, H, M, d), in the interface through which transformers' layers write them.

    Attributes:
        layers: what was there before, and is written to.
        slot: where new keys go; None puts them behind what was there.
    """

    def __init__(self, layers: Mapping[str, Any], slot: Any) -> None:
        self.layers, self.slot = dict(layers), slot

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values of some tokens, (B, H, n, d), and give all of the layer's."""
        name = str(layer)
        if self.slot is not None:
            write = interop.torch_view(_write)
            self.layers[name] = tuple(
                write(old, new, self.slot) for old, new in zip(self.layers[name], (keys, values), strict=True)
            )
        elif name in self.layers:
            self.layers[name] = tuple(
                torch.cat(pair, 2) for pair in zip(self.layers[name], (keys, values), strict=True)
            )
        else:
            self.layers[name] = (keys, values)
        return self.layers[name]

    def get_seq_length(self, *_: Any) -> int:
        """Positions are given, so that nobody needs it; transformers asks all the same."""
        return 0


def _write(cached: Array, new: Array, slot: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(cached, new, slot, axis=2)


class Decoder:
    """Greedy decoding of a model.

    Attributes:
        tokens_per_second: generated in the latest call, without compilation of its first batch.
        compilations: programs compiled so far.
    """

    def __init__(self, program: Program, groups: int, put_rows: Callable[[Any], Any], max_new_tokens: int) -> None:
        """Make one.

        Args:
            program: the model.
            groups: rows decoded together are a multiple of it.
            put_rows: places arrays whose first dimension is rows.
            max_new_tokens: longest answer.
        """
        self._program, self._groups, self._put, self._new = program, groups, put_rows, max_new_tokens
        self._prefix = jax.jit(self._prefix_layers)
        self._generate = jax.jit(self._generated, static_argnames=("prefix_length", "stop_ids"))
        self._seen: set[tuple[Any, ...]] = set()
        self.tokens_per_second = 0.0

    @property
    def compilations(self) -> int:
        """Programs compiled so far."""
        return len(self._seen)

    def __call__(
        self,
        values: Values,
        prompts: Sequence[Sequence[int]],
        stop_ids: Sequence[int],
        *,
        batch_size: int = 32,
        advance: Callable[[float], None] = lambda done: None,
    ) -> list[list[int]]:
        """Continue every prompt.

        Args:
            values: the model's tensors.
            prompts: token ids, BOS included.
            stop_ids: end an answer.
            batch_size: rows decoded together, rounded up to a multiple of the groups.
            advance: told how many prompts are done.

        Returns:
            The generated ids of each prompt, up to and including the stop token, or max_new_tokens of them.
        """
        size = -(-min(batch_size, len(prompts)) // self._groups) * self._groups
        p = min(common_prefix(prompts), min(map(len, prompts)) - 1)
        width = -(-(max(map(len, prompts)) - p) // WIDTHS) * WIDTHS
        prefix: Layers = self._prefix(values, jnp.asarray([prompts[0][:p]], jnp.int32)) if p else {}
        outputs: list[list[int]] = []
        warm_tokens, warm_seconds = 0, 0.0
        for start in range(0, len(prompts), size):
            tails = [ids[p:] for ids in prompts[start : start + size]]
            tokens, lengths, live = _pad(tails, size, width)
            key = (size, width, p, tuple(stop_ids))
            fresh, began = key not in self._seen, time.perf_counter()
            self._seen.add(key)
            rows = self._put((tokens, lengths, live))
            generated = np.asarray(self._generate(values, prefix, *rows, prefix_length=p, stop_ids=tuple(stop_ids)))
            answers = [_cut(row, stop_ids) for row in generated[: len(tails)].tolist()]
            if not fresh:
                warm_tokens += sum(map(len, answers))
                warm_seconds += time.perf_counter() - began
            outputs += answers
            advance(len(outputs))
        if warm_seconds:
            self.tokens_per_second = warm_tokens / warm_seconds
        return outputs

    def _prefix_layers(self, values: Values, tokens: Array) -> Layers:
        positions = jnp.arange(tokens.shape[1])[None]
        _, layers = self._forward(values, tokens, positions, positions, {}, None)
        return layers

    def _generated(
        self,
        values: Values,
        prefix: Layers,
        tokens: Array,
        lengths: Array,
        live: Array,
        *,
        prefix_length: int,
        stop_ids: tuple[int, ...],
    ) -> Array:
        """Generated ids (B, N) of rows (B, T) that go on from the prefix; unused places hold the last stop token."""
        (size, width), p, new = tokens.shape, prefix_length, self._new
        # Position of each slot: padding of a prompt lies where no token looks.
        beyond = jnp.iinfo(jnp.int32).max
        inside = jnp.where(jnp.arange(width) < lengths[:, None], p + jnp.arange(width), beyond)
        before = jnp.broadcast_to(jnp.arange(p), (size, p))
        behind = p + lengths[:, None] + jnp.arange(new)
        slots = jnp.concatenate([before, inside, behind], 1)
        layers = {name: tuple(jnp.broadcast_to(x, (size, *x.shape[1:])) for x in pair) for name, pair in prefix.items()}
        positions = jnp.broadcast_to(p + jnp.arange(width), (size, width))
        hidden, layers = self._forward(values, tokens, positions, slots[:, : p + width], layers, None)
        room = ((0, 0), (0, 0), (0, new), (0, 0))
        layers = {name: tuple(jnp.pad(x, room) for x in pair) for name, pair in layers.items()}
        hidden = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)
        token, stopped = self._choose(values, hidden, ~live, stop_ids)
        out = jnp.full((size, new), stop_ids[-1], jnp.int32).at[:, 0].set(token[:, 0])

        def going(carry: tuple[Any, ...]) -> Array:
            number, _, _, stopped, _ = carry
            return (number < new) & ~stopped.all()

        def one(carry: tuple[Any, ...]) -> tuple[Any, ...]:
            number, token, layers, stopped, out = carry
            position = (p + lengths + number - 1)[:, None]
            hidden, layers = self._forward(values, token, position, slots, layers, p + width + number - 1)
            chosen, after = self._choose(values, hidden, stopped, stop_ids)
            out = out.at[:, number].set(jnp.where(stopped, out[:, number], chosen[:, 0]))
            return number + 1, chosen, layers, after, out

        *_, out = jax.lax.while_loop(going, one, (jnp.int32(1), token, layers, stopped, out))
        return out

    def _choose(self, values: Values, hidden: Array, stopped: Array, stop_ids: tuple[int, ...]) -> tuple[Array, Array]:
        """The likeliest token of each row, (B, 1), and whether the row has stopped by now, (B,)."""
        token = jnp.argmax(self._program.logits(values, hidden), -1).astype(jnp.int32)
        return token, stopped | jnp.isin(token[:, 0], jnp.asarray(stop_ids))

    def _forward(
        self, values: Values, tokens: Array, positions: Array, slots: Array, layers: Layers, slot: Array | None
    ) -> tuple[Array, Layers]:
        """Hidden states (B, n, D) of tokens that see every written slot at or before their own position."""
        past = positions[:, :, None] - slots[:, None]
        masks = {"full_attention": (past >= 0)[:, None]}
        if (window := self._program.config.window) is not None:
            masks["sliding_attention"] = masks["full_attention"] & (past < window)[:, None]

        def forward(model: nn.Module, tokens: Any, positions: Any, masks: Any, layers: Any, slot: Any) -> Any:
            base, cache = base_of(model), SlotCache(layers, slot)
            output = text_model(base)(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=for_model(base, masks),
                past_key_values=cache,
                use_cache=False,
            )
            return output.last_hidden_state, cache.layers

        found: tuple[Array, Layers] = self._program.model(values, forward, tokens, positions, masks, layers, slot)
        return found


def _pad(tails: Sequence[Sequence[int]], size: int, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens (B, T), lengths (B,) and which rows are prompts; the rest fill the batch up."""
    tokens = np.zeros((size, width), np.int32)
    for row, ids in enumerate(tails):
        tokens[row, : len(ids)] = ids
    lengths = np.array([len(ids) for ids in tails] + [1] * (size - len(tails)), np.int32)
    return tokens, lengths, np.arange(size) < len(tails)


def _cut(ids: list[int], stop_ids: Sequence[int]) -> list[int]:
    end = next((i + 1 for i, token in enumerate(ids) if token in stop_ids), len(ids))
    return ids[:end]
