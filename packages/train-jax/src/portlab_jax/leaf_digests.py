"""Digests of trained leaves, by which a damaged checkpoint is found."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def leaf_digests(tree: Any) -> dict[str, str]:
    """sha256 of each leaf's C-order bytes in its own dtype, little-endian, by slash-joined path.

    On several processes, all of them have to call it: leaves that are spread over them are gathered.
    """
    paths = jax.tree.leaves_with_path(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]
    arrays = (_on_host(leaf) for _, leaf in paths)
    with ThreadPoolExecutor() as pool:  # hashing releases the interpreter's lock
        return dict(zip(names, pool.map(_sha256, arrays), strict=True))


def _sha256(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8)).hexdigest()


def _on_host(leaf: Any) -> np.ndarray:
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return np.asarray(leaf)
    if leaf.is_fully_replicated:
        return np.asarray(leaf.addressable_data(0))
    return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
