"""Greedy decoding with a key/value cache of fixed shape: three programs, however long the questions and answers.

transformers' caches keep Python counters, and each value of them is another graph on XLA. Here the cache is a tensor
for each layer with a slot for every token there can be, and which slot is written is a tensor too. All prompts of a
tool-call set start with the same tokens, whose keys and values are computed once.

Shape letters: B rows, P prefix tokens, T prompt width, N new tokens, M = P + T + N slots, H key heads, d head size.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from portlab_hf.model import head_logits, text_model
from portlab_spec.data.tokens import common_prefix
from portlab_xla.setup import Setup

WIDTHS = 32  # prompt widths are multiples of it: one compilation serves many questions
LOOK_EVERY = 8  # steps between looks at whether every row has stopped


class SlotCache:
    """Keys and values of every layer, (B, H, M, d), in the interface through which transformers' layers write them."""

    def __init__(self, prefix: "SlotCache | None" = None, *, copies: int = 1, spare: int = 0) -> None:
        """An empty cache; with a prefix, one that begins with each of its rows `copies` times.

        Args:
            prefix: cache of what all rows start with.
            copies: rows here for each row of the prefix.
            spare: slots behind what is written first.
        """
        self._prefix, self._copies, self._spare = prefix, copies, spare
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.slot: torch.Tensor | None = None  # (1,): where to write; None writes behind the prefix

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values of some tokens, (B, H, n, d), and give all of the layer's."""
        if self.slot is not None:
            for cached, new in zip(self._layers[layer], (keys, values), strict=True):
                cached.index_copy_(2, self.slot, new)
        else:
            self._layers[layer] = self._begin(keys, layer, 0), self._begin(values, layer, 1)
        return self._layers[layer]

    def _begin(self, new: torch.Tensor, layer: int, which: int) -> torch.Tensor:
        parts = [new]
        if self._prefix is not None:
            parts.insert(0, self._prefix._layers[layer][which].repeat_interleave(self._copies, 0))
        if self._spare:
            parts.append(new.new_zeros(*new.shape[:2], self._spare, new.shape[3]))
        return torch.cat(parts, 2) if len(parts) > 1 else new


class Decoder:
    """Greedy decoding of a run's model as it stands."""

    def __init__(self, setup: Setup, stop_ids: Sequence[int], max_new_tokens: int) -> None:
        self._setup, self._stop, self._new = setup, tuple(stop_ids), max_new_tokens

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        batch_size: int = 32,
        advance: Callable[[float], None] = lambda done: None,
    ) -> list[list[int]]:
        """Continue every prompt.

        Args:
            prompts: token ids, BOS included.
            batch_size: rows decoded together, rounded up to a multiple of the device's groups.
            advance: told how many prompts are done.

        Returns:
            The generated ids of each prompt, up to and including the stop token, or max_new_tokens of them.
        """
        groups = self._setup.device.groups
        size = -(-min(batch_size, len(prompts)) // groups) * groups
        p = min(common_prefix(prompts), min(map(len, prompts)) - 1)
        width = -(-(max(map(len, prompts)) - p) // WIDTHS) * WIDTHS
        outputs: list[list[int]] = []
        with _inference(self._setup.adapted):
            prefix = self._prefix(prompts[0][:p]) if p else None
            for start in range(0, len(prompts), size):
                tails = [ids[p:] for ids in prompts[start : start + size]]
                generated = self._generate(prefix, p, tails, size, width)
                outputs += [self._cut(row) for row in generated[: len(tails)].tolist()]
                advance(len(outputs))
        return outputs

    def _cut(self, ids: list[int]) -> list[int]:
        end = next((i + 1 for i, token in enumerate(ids) if token in self._stop), len(ids))
        return ids[:end]

    def _prefix(self, ids: Sequence[int]) -> SlotCache:
        """Keys and values of the shared prefix, one row for each group of devices."""
        cache = SlotCache()
        positions = np.arange(len(ids))
        tensors = {"tokens": np.array(ids), "positions": positions}
        rows = self._rows({name: np.tile(array, (self._setup.device.groups, 1)) for name, array in tensors.items()})
        self._hidden(rows["tokens"], rows["positions"], rows["positions"], cache)
        self._setup.device.sync()
        return cache

    def _generate(
        self, prefix: SlotCache | None, p: int, tails: Sequence[Sequence[int]], size: int, width: int
    ) -> np.ndarray:
        """Generated ids (B, N) of up to B rows that go on from the prefix."""
        device = self._setup.device
        lengths = np.array([len(ids) for ids in tails] + [1] * (size - len(tails)))
        tokens = np.zeros((size, width), np.int64)
        for row, ids in enumerate(tails):
            tokens[row, : len(ids)] = ids
        # Position of each slot: padding of a prompt lies where no token looks.
        inside = np.where(np.arange(width) < lengths[:, None], p + np.arange(width), np.iinfo(np.int32).max)
        before = np.tile(np.arange(p), (size, 1))
        behind = p + lengths[:, None] + np.arange(self._new)
        rows = self._rows(
            {
                "tokens": tokens,
                "positions": np.tile(p + np.arange(width), (size, 1)),
                "slots": np.concatenate([before, inside, behind], 1),
                "last": lengths[:, None] - 1,
                "next": p + lengths[:, None],
                "done": np.arange(size)[:, None] >= len(tails),
            }
        )
        cache = SlotCache(prefix, copies=size // device.groups, spare=self._new)
        hidden = self._hidden(rows["tokens"], rows["positions"], rows["slots"], cache)
        hidden = hidden.gather(1, rows["last"][..., None].expand(-1, -1, hidden.shape[-1]))
        token, done = self._choose(hidden, rows["done"])
        chosen, position = [token], rows["next"]
        slot = torch.full((1,), p + width, device=device.where)
        device.sync()
        for number in range(1, self._new):
            if number % LOOK_EVERY == 0 and bool(done.all()):
                break
            cache.slot = slot
            hidden = self._hidden(token, position, rows["slots"], cache)
            token, done = self._choose(hidden, done)
            chosen.append(token)
            slot, position = slot + 1, position + 1
            device.sync()
        return torch.cat([ids.cpu() for ids in chosen], 1).numpy()

    def _choose(self, hidden: torch.Tensor, done: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest token of each row, (B, 1), and whether the row has stopped by now."""
        token = head_logits(self._setup.base, hidden).argmax(-1)
        for stop in self._stop:
            done = done | (token == stop)
        return self._setup.device.everywhere(token), self._setup.device.everywhere(done)

    def _hidden(
        self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, cache: SlotCache
    ) -> torch.Tensor:
        """Hidden states (B, n, D) of tokens that see every written slot at or before their own position."""
        past = positions[:, :, None] - slots[:, None]
        masks = {"full_attention": (past >= 0)[:, None]}
        if (window := self._setup.config.window) is not None:
            masks["sliding_attention"] = masks["full_attention"] & (past < window)[:, None]
        output = text_model(self._setup.base)(
            input_ids=tokens, position_ids=positions, attention_mask=masks, past_key_values=cache, use_cache=False
        )
        hidden: torch.Tensor = output.last_hidden_state
        return hidden

    def _rows(self, arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        tensors = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
        return self._setup.device.put_rows(tensors)


@contextmanager
def _inference(model: torch.nn.Module) -> Iterator[None]:
    """Without dropout and without gradients."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
