"""Arrays of an Orbax checkpoint item, read with TensorStore alone: no jax, no mesh, no devices.

Layout (orbax-checkpoint 0.12, `docs/guides/checkpoint/v1/checkpoint_format.ipynb`): `_METADATA` lists the key
path of every leaf and says whether the arrays are zarr v2 or v3 and whether they sit in one OCDBT database or
in a folder each. The name of an array is its key path joined with dots. Keys may themselves hold dots, so
names are derived from key paths and never taken apart.
"""

from pathlib import Path
from typing import Any

import numpy as np

from portlab_spec.errors import UserError
from portlab_spec.files import read_json

KeyPath = tuple[str, ...]


def read_item(item: Path) -> tuple[dict[KeyPath, np.ndarray], dict[KeyPath, str]]:
    """Read every array of an item.

    Returns:
        The arrays by key path, in the dtype and shape that were stored, and for each leaf that could not be
        read the reason.

    Raises:
        UserError: `_METADATA` is missing or broken.
    """
    import tensorstore  # 0.1 s that --help need not pay

    metadata = read_json(item / "_METADATA", "Orbax metadata")
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}})
    arrays: dict[KeyPath, np.ndarray] = {}
    faults: dict[KeyPath, str] = {}
    for path in _key_paths(metadata, item):
        try:
            store = tensorstore.open(_spec(item, path, metadata), context=context, open=True, read=True).result()
            arrays[path] = np.ascontiguousarray(store.read().result())
        except ValueError as error:  # the type of every TensorStore error: NOT_FOUND, DATA_LOSS, ...
            faults[path] = _first_line(error)
    return arrays, faults


def _key_paths(metadata: Any, item: Path) -> list[KeyPath]:
    try:
        leaves = metadata["tree_metadata"].values()
        return [tuple(str(part["key"]) for part in leaf["key_metadata"]) for leaf in leaves]
    except (AttributeError, KeyError, TypeError):
        raise UserError(
            "Orbax metadata lacks the tree of leaves",
            where=str(item / "_METADATA"),
            fix="Copy the step again",
        ) from None


def _spec(item: Path, path: KeyPath, metadata: dict[str, Any]) -> dict[str, Any]:
    name = ".".join(path)
    folder = {"driver": "file", "path": f"{item.resolve()}/"}
    if metadata.get("use_ocdbt", False):
        kvstore: dict[str, Any] = {"driver": "ocdbt", "base": folder, "path": f"{name}/"}
    else:
        kvstore = {"driver": "file", "path": f"{item.resolve()}/{name}/"}
    return {
        "driver": "zarr3" if metadata.get("use_zarr3", False) else "zarr",
        "kvstore": kvstore,
        # TensorStore's default reads a chunk that is missing as zeros, silently.
        "fill_missing_data_reads": False,
    }


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].split(" [source locations")[0][:300]
