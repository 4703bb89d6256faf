"""What two splits share: every pair of conversations that ask the same, or nearly the same.

`portlab_spec.data.split.check_leakage` refuses the first equal pair; this search finds them all.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, islice, product

import numpy as np

from portlab_spec.conversation import Conversation, Split
from portlab_spec.data.similarity import SimilarityIndex, check_threshold
from portlab_spec.data.split import asked


@dataclass(frozen=True)
class Leak:
    """Two conversations of different splits that ask the same, or nearly.

    Attributes:
        ids: of both.
        splits: of both, in the order of `ids`.
        similarity: of their normalised questions, see `portlab_spec.data.similarity`.
        exact: the questions agree after `normalise`.
    """

    ids: tuple[str, str]
    splits: tuple[Split, Split]
    similarity: float
    exact: bool


@dataclass(frozen=True)
class Leakage:
    """What `find_leakage` found.

    Attributes:
        exact_pairs: pairs in different splits whose questions agree after `normalise`.
        near_pairs: other pairs whose questions are alike.
        leaks: the pairs themselves, exact ones first, then the most similar; the list may have a limit, the counts
            have none.
        held_out: ids of all rows outside `train` that stand in a pair.
    """

    exact_pairs: int
    near_pairs: int
    leaks: tuple[Leak, ...]
    held_out: tuple[str, ...]

    def summary(self) -> str:
        """One line with the counts."""
        return (
            f"{self.exact_pairs} pairs ask the same in two splits, {self.near_pairs} nearly the same; "
            f"{len(self.held_out)} held-out rows are concerned"
        )


def find_leakage(conversations: Sequence[Conversation], *, threshold: float = 0.8, max_listed: int = 10_000) -> Leakage:
    """All pairs of conversations in different splits that ask the same or nearly the same.

    Args:
        conversations: all rows of the data set.
        threshold: least similarity of a pair, above 0.
        max_listed: list so many pairs of each kind at most; all are counted.

    Raises:
        UserError: the threshold is no similarity.
    """
    check_threshold(threshold)
    rows: dict[Split, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for conversation in conversations:
        rows[conversation.split][asked(conversation)].append(conversation.id)

    # The fewer questions search the more, so that there are fewer searches.
    ordered = sorted(rows, key=lambda split: (len(rows[split]), split))
    parts = [
        _leaks_between(fewer, rows[fewer], more, rows[more], threshold, max_listed)
        for fewer, more in combinations(ordered, 2)
    ]
    exact, near = ([leak for part in parts for leak in part.leaks if leak.exact is kind] for kind in (True, False))
    near.sort(key=lambda leak: -leak.similarity)
    concerned = set(chain.from_iterable(part.held_out for part in parts))
    return Leakage(
        exact_pairs=sum(part.exact_pairs for part in parts),
        near_pairs=sum(part.near_pairs for part in parts),
        leaks=(*exact[:max_listed], *near[:max_listed]),
        held_out=tuple(c.id for c in conversations if c.split != "train" and c.id in concerned),
    )


def _leaks_between(
    fewer: Split,
    searching: Mapping[str, list[str]],
    more: Split,
    searched: Mapping[str, list[str]],
    threshold: float,
    max_listed: int,
) -> Leakage:
    """The leaks between two splits, each given as the ids behind each question; `held_out` names rows of both."""
    questions = list(searched)
    askers = np.array([len(searched[question]) for question in questions])
    index = SimilarityIndex(questions)
    met = np.zeros(len(questions), bool)
    exact_pairs = near_pairs = 0
    exact: list[Leak] = []
    near: list[Leak] = []
    concerned: list[str] = []
    for question, ids in searching.items():
        positions, similarities = index.alike(question, threshold)
        if not len(positions):
            continue
        met[positions] = True
        concerned += ids
        same = searched.get(question, [])
        exact_pairs += len(ids) * len(same)
        near_pairs += len(ids) * (int(askers[positions].sum()) - len(same))
        for pair in islice(product(ids, same), max_listed - len(exact)):
            exact.append(Leak(pair, (fewer, more), 1.0, True))
        room = max_listed - len(near)
        for at, similarity in zip(positions[: room + 1], similarities, strict=False):
            others = searched[questions[at]] if questions[at] != question else []
            for pair in islice(product(ids, others), max_listed - len(near)):
                near.append(Leak(pair, (fewer, more), float(similarity), False))
    concerned += chain.from_iterable(searched[questions[at]] for at in np.flatnonzero(met))
    return Leakage(exact_pairs, near_pairs, (*exact, *near), tuple(concerned))
