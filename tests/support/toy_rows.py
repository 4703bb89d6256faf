"""Random rows for models of 96 tokens."""

import numpy as np

from portlab_spec.data.tokens import Row

VOCAB = 96


def tool_rows(n: int = 24, prefix: int = 40, seed: int = 0) -> list[Row]:
    """Rows of uneven lengths behind one common start, as of one set of tools."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(3, VOCAB, prefix).tolist()
    rows = []
    for i in range(n):
        question, answer = rng.integers(3, 12), rng.integers(2, 6)
        ids = shared + rng.integers(3, VOCAB, question + answer).tolist()
        loss = (False,) * (prefix + question) + (True,) * answer
        rows.append(Row(f"r{i}", tuple(ids), loss, stratum="ab"[i % 2]))
    return rows


def plain_rows(n: int = 24) -> list[Row]:
    """Rows that start with nothing in common."""
    return tool_rows(n, prefix=0)


def branching_rows(n: int = 4, prefix: int = 9, trained: tuple[int, ...] = (), seed: int = 0) -> list[Row]:
    """Rows of uneven lengths that part right behind a common start, in which ids `trained` occur.

    These stand in the common start, and in each row as inputs that are not supervised and as targets.
    """
    rng = np.random.default_rng(seed)
    shared = [*trained, *rng.integers(12, VOCAB, prefix)][:prefix]
    rows = []
    for i in range(n):
        question, answer = rng.integers(4, 9), rng.integers(3, 9)
        ids = rng.integers(12, VOCAB, question + answer)
        ids[0] = 12 + i
        ids[1 : 1 + len(trained)] = trained
        ids[question : question + len(trained)] = trained
        loss = (False,) * (prefix + question) + (True,) * answer
        rows.append(Row(f"r{i}", (*map(int, shared), *map(int, ids)), loss))
    return rows
