"""Where the tokens of rows stand in what a model is given, and which of them are looked at."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from portlab_spec.data.tokens import Row
from portlab_spec.errors import UserError
from portlab_spec.packing import Batch

PROBED = 64  # tokens of a row whose hidden states are kept
LOGITS = 2**24  # most values of the logits that are kept: all of a toy's, a few positions of a real vocabulary


def probe_columns(length: int) -> np.ndarray:
    """Tokens of a row that are looked at: all, or evenly many from the first to the last."""
    return np.unique(np.linspace(0, length - 1, min(length, PROBED)).round().astype(int))


def logit_rows(supervised: int, vocabulary: int) -> np.ndarray:
    """Which of so many supervised tokens have their logits kept, evenly many of them."""
    count = max(min(supervised, LOGITS // vocabulary), 1)
    return np.unique(np.linspace(0, supervised - 1, count).round().astype(int))


@dataclass(frozen=True)
class Place:
    """A row in a packed batch.

    Attributes:
        micro: its micro-batch.
        group: its group.
        index: (length,) flat index into the group's tokens, of each token of the row.
        ids: (length,) tokens that stand there.
        target: bool (length,), tokens that the batch has predicted.
    """

    micro: int
    group: int
    index: np.ndarray
    ids: np.ndarray
    target: np.ndarray


def find_places(batch: Batch, rows: Sequence[Row]) -> list[Place]:
    """Each row's path through the trees of a packed batch, as attention sees it.

    Raises:
        UserError: the batch does not hold a row.
    """
    paths: dict[tuple[int, ...], Place] = {}
    tokens, ends = np.asarray(batch.rows.tokens), np.asarray(batch.rows.ends)
    lengths = {len(row.ids) for row in rows}
    wanted = {row.ids for row in rows}
    width = tokens.shape[-1]
    for a, g, r in np.ndindex(*tokens.shape[:3]):
        targets = _targets(batch, a, g)
        for i in np.flatnonzero(ends[a, g, r] > 0):
            path = np.flatnonzero(ends[a, g, r, : i + 1] > i)
            ids = tokens[a, g, r, path]
            key = tuple(int(token) for token in ids)
            if len(path) in lengths and key in wanted and key not in paths:
                index = r * width + path
                target = np.array([False, *((int(s), int(t)) in targets for s, t in zip(index, ids[1:], strict=False))])
                paths[key] = Place(a, g, index, ids, target)
    for row in rows:
        if row.ids not in paths:
            raise UserError(f"the packed batch does not hold the row {row.id}", where="packing")
    return [paths[row.ids] for row in rows]


def _targets(batch: Batch, micro: int, group: int) -> set[tuple[int, int]]:
    """Pairs of a predicting token's index and the predicted id."""
    held = np.asarray(batch.weights[micro, group]) > 0
    slots, targets = np.asarray(batch.slots[micro, group])[held], np.asarray(batch.targets[micro, group])[held]
    return {(int(s), int(t)) for s, t in zip(slots, targets, strict=True)}


def token_tensors(places: Sequence[Place]) -> dict[str, np.ndarray]:
    """`ids`, `real` and `target` of rows that a packed batch holds, padded at the right."""
    width = max(len(place.ids) for place in places)
    shape = len(places), width
    found = {"ids": np.zeros(shape, np.int32), "real": np.zeros(shape, bool), "target": np.zeros(shape, bool)}
    for r, place in enumerate(places):
        n = len(place.ids)
        found["ids"][r, :n], found["real"][r, :n], found["target"][r, :n] = place.ids, True, place.target
    return found


def probed(by_micro: Sequence[Mapping[str, Any]], places: Sequence[Place]) -> dict[str, np.ndarray]:
    """The probed tokens' part of what a model computed for packed micro-batches.

    Args:
        by_micro: for each micro-batch, arrays (G, tokens, ...) under the names of the evidence.
        places: of the rows.
    """
    longest = max(places, key=lambda place: len(place.index))
    found = {}
    for name in by_micro[0]:
        if name.startswith("inner."):
            index = longest.index
            if not name.endswith((".key", ".value")):
                index = index[probe_columns(len(index))]
            found[name] = np.asarray(by_micro[longest.micro][name][longest.group])[index]
        else:
            parts = [
                np.asarray(by_micro[place.micro][name][place.group])[place.index[probe_columns(len(place.index))]]
                for place in places
            ]
            found[name] = np.concatenate(parts)
    return {name: x.astype(np.float32) for name, x in found.items()}


def scored_columns(target: np.ndarray) -> list[tuple[int, int]]:
    """(t, position) for every supervised token t of a row and the positions t-2, t-1 and t, none before the first."""
    return [(int(t), max(int(t) + shift, 0)) for t in np.flatnonzero(target) for shift in (-2, -1, 0)]


def scored(places: Sequence[Place], hidden: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Final hidden states (S, 3, D) where supervised tokens are scored, and the tokens (S,).

    Args:
        places: of the rows.
        hidden: (G, tokens, D) for each micro-batch.
    """
    states, tokens = [], []
    for place in places:
        for t, position in scored_columns(place.target):
            states.append(np.asarray(hidden[place.micro][place.group][place.index[position]]))
            tokens.append(int(place.ids[t]))
    return np.stack(states).reshape(-1, 3, states[0].shape[-1]), np.array(tokens).reshape(-1, 3)[:, 0]


def log_likelihood(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Logarithm of the likelihood of tokens (n,) under logits (n, V), in float64."""
    wide = logits.astype(np.float64)
    top = wide.max(-1, keepdims=True)
    partition = top[:, 0] + np.log(np.exp(wide - top).sum(-1))
    return np.asarray(wide[np.arange(len(tokens)), tokens] - partition)


def score(states: np.ndarray, tokens: np.ndarray, head: Any) -> dict[str, np.ndarray]:
    """`logits` and `log_likelihood` from hidden states (S, 3, D); `head` makes logits (3, V) of states (3, D)."""
    likely, kept, chosen = [], [], None
    for number, (three, token) in enumerate(zip(states, tokens, strict=True)):
        logits = np.asarray(head(three), np.float32)
        if chosen is None:
            chosen = set(logit_rows(len(states), logits.shape[-1]).tolist())
        likely.append(log_likelihood(logits, np.full(3, token)))
        if number in chosen:
            kept.append(logits[1])
    return {"logits": np.stack(kept), "log_likelihood": np.stack(likely)}
