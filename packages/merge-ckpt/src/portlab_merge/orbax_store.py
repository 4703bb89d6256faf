"""Arrays of an Orbax checkpoint item, read with TensorStore alone: no jax, no mesh, no devices.

Layout (orbax-checkpoint 0.12, `docs/guides/checkpoint/v1/checkpoint_format.ipynb`): `_METADATA` lists the key
path of every leaf and says whether the arrays are zarr v2 or v3 and whether they sit in one OCDBT database or
in a folder each. The name of an array is its key path joined with dots. Keys may themselves hold dots and slashes, so
names are derived from key paths and never taken apart.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from portlab_merge.location import Location, first_line
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
        paths = [tuple(str(part["key"]) for part in leaf["key_metadata"]) for leaf in leaves]
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

    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}})
    specs = {path: _spec(item, stored) for path, stored in item.stored.items() if wants(path)}
    faults: dict[KeyPath, str] = {}
    pending: dict[KeyPath, Any] = {
        path: tensorstore.open(spec, context=context, open=True, read=True) for path, spec in specs.items()
    }
    for finish in (lambda store: store.read(), np.ascontiguousarray):
        done: dict[KeyPath, Any] = {}
        for path, future in pending.items():
            try:
                done[path] = finish(future.result())
            except ValueError as error:  # the type of every TensorStore error: NOT_FOUND, DATA_LOSS, ...
                faults[path] = first_line(error)
        pending = done
    return pending, faults


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
