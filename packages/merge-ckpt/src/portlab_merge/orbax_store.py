"""Arrays of an Orbax checkpoint item, read with TensorStore alone: no jax, no mesh, no devices.

Layout (orbax-checkpoint 0.12, `docs/guides/checkpoint/v1/checkpoint_format.ipynb`): `_METADATA` lists the key
path of every leaf and says whether the arrays are zarr v2 or v3 and whether they sit in one OCDBT database or
in a folder each. The name of an array is its key path joined with dots. Keys may themselves hold dots and slashes, so
names are derived from key paths and never taken apart.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from portlab_merge.location import CONTEXT, Location, first_line
from portlab_spec.errors import UserError

TREE = "_METADATA"
KeyPath = tuple[str, ...]


@dataclass(frozen=True)
class Item:
    """A tree of arrays on disk.

    Attributes:
        location: its folder.
        stored: key path of every leaf as stored, by its path without flax's trailing "value".
        use_ocdbt: arrays lie in one database rather than a folder each.
        use_zarr3: arrays are zarr v3 rather than v2.
    """

    location: Location
    stored: dict[KeyPath, KeyPath]
    use_ocdbt: bool
    use_zarr3: bool


def open_item(location: Location) -> Item:
    """Read what an item holds, no array yet.

    Raises:
        UserError: `_METADATA` is missing or broken.
    """
    metadata = location.child(TREE).read_json("Orbax metadata")
    try:
        # An empty container has an entry and no array.
        leaves = [m for m in metadata["tree_metadata"].values() if not m["value_metadata"].get("skip_deserialize")]
        # An array that was saved without a tree has no keys, and no name.
        paths = [tuple(str(part["key"]) for part in leaf["key_metadata"]) or ("",) for leaf in leaves]
        flags = bool(metadata.get("use_ocdbt", False)), bool(metadata.get("use_zarr3", False))
    except (AttributeError, KeyError, TypeError):
        where = str(location.child(TREE))
        raise UserError("Orbax metadata lacks the tree of leaves", where=where, fix="Copy the step again") from None
    return Item(location, {_without_value(path): path for path in paths}, *flags)


def read_arrays(
    item: Item, wants: Callable[[KeyPath], bool] = lambda path: True
) -> tuple[dict[KeyPath, np.ndarray], dict[KeyPath, str]]:
    """Read the arrays that are wanted, all at once: a bucket answers each only after a while.

    Returns:
        The arrays by key path, in the dtype and shape that were stored, and for each leaf that could not be
        read the reason.
    """
    import tensorstore  # 0.1 s that --help need not pay

    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}, **CONTEXT})
    specs = {path: _spec(item, stored) for path, stored in item.stored.items() if wants(path)}
    faults: dict[KeyPath, str] = {}

    def of_each(step: Callable[[Any], Any], values: dict[KeyPath, Any]) -> dict[KeyPath, Any]:
        done: dict[KeyPath, Any] = {}
        for path, value in values.items():
            try:
                done[path] = step(value)
            except ValueError as error:  # the type of every TensorStore error: NOT_FOUND, DATA_LOSS, ...
                faults[path] = first_line(error)
        return done

    opening = of_each(lambda spec: tensorstore.open(spec, context=context, open=True, read=True), specs)
    reading = of_each(lambda future: _start_reading(future.result()), opening)
    return of_each(lambda future: np.ascontiguousarray(future.result()), reading), faults


def _start_reading(store: Any) -> Any:
    """Read a whole array, unless damaged metadata gives it a size at which TensorStore would end the process.

    Raises:
        ValueError: the array or one of its chunks is larger than the machine's memory.
    """
    layout = store.chunk_layout
    for shape in (store.shape, layout.read_chunk.shape or (), layout.write_chunk.shape or ()):
        size = math.prod(shape) * store.dtype.numpy_dtype.itemsize
        if size > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
            raise ValueError(f"its metadata speaks of {size} bytes, more than this machine's memory")
    return store.read()


def _without_value(path: KeyPath) -> KeyPath:
    """A flax nnx variable saves its array under a key "value" of its own."""
    return path[:-1] if len(path) > 1 and path[-1] == "value" else path


def _spec(item: Item, path: KeyPath) -> dict[str, Any]:
    name, folder = ".".join(path), item.location.kvstore()
    if item.use_ocdbt:
        kvstore: dict[str, Any] = {"driver": "ocdbt", "base": folder, "path": f"{name}/"}
    else:
        kvstore = {**folder, "path": f"{folder['path']}{name}/"}
    return {
        "driver": "zarr3" if item.use_zarr3 else "zarr",
        "kvstore": kvstore,
        # TensorStore's default reads a chunk that is missing as zeros, silently.
        "fill_missing_data_reads": False,
    }
