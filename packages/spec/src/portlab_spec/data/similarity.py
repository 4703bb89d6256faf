"""Which texts are nearly the same: Jaccard similarity of their sets of character trigrams, exact and in bulk."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from portlab_spec.errors import UserError

_SHINGLE = 3  # characters; questions are short, and one changed character changes three shingles


class SimilarityIndex:
    """Texts by the trigrams that occur in them.

    The similarity of two texts is the number of trigrams that both hold over the number that either holds; a text of
    fewer than three characters is its own trigram. No pair is skipped or sampled: for m texts against an index of n,
    the cost is that of counting at most m n t trigrams, t of them in a text.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        postings: dict[str, list[int]] = defaultdict(list)
        sizes = np.zeros(len(texts), np.int64)
        for i, text in enumerate(texts):
            shingles = _shingles(text)
            sizes[i] = len(shingles)
            for shingle in shingles:
                postings[shingle].append(i)
        self._sizes = sizes
        self._postings = {shingle: np.array(found, np.intp) for shingle, found in postings.items()}

    def alike(self, text: str, threshold: float) -> tuple[np.ndarray, np.ndarray]:
        """Positions, ascending, and similarities of the indexed texts that reach the threshold."""
        shingles = _shingles(text)
        found = [self._postings[shingle] for shingle in shingles if shingle in self._postings]
        if not found:
            return np.zeros(0, np.intp), np.zeros(0)
        shared = np.bincount(np.concatenate(found), minlength=len(self._sizes))
        similarity = shared / (len(shingles) + self._sizes - shared)
        positions = np.flatnonzero(similarity >= threshold)
        return positions, similarity[positions]


def similar_groups(texts: Sequence[str], threshold: float) -> list[int]:
    """For each text the position of the first text of its group; a group is what chains of similar pairs connect."""
    index = SimilarityIndex(texts)
    group = np.arange(len(texts))
    for i, text in enumerate(texts):
        met = np.unique(group[index.alike(text, threshold)[0]])
        if len(met) > 1:
            group[np.isin(group, met)] = met[0]
        group[i] = met[0]
    return group.tolist()


def check_threshold(threshold: float) -> None:
    """Refuse what is no similarity.

    Raises:
        UserError: not above 0 and at most 1.
    """
    if not 0 < threshold <= 1:
        raise UserError(f"a similarity of {threshold} is not above 0 and at most 1", fix="0.8 is a good start")


def _shingles(text: str) -> set[str]:
    return {text[i : i + _SHINGLE] for i in range(max(len(text) - _SHINGLE + 1, 1))}
