"""The folder of a foreign case: what another package saved, and what its own model computes from it.

    CASE/base/        the base as a Hugging Face folder, f32
    CASE/run/         the checkpoints, written by the package's own checkpoint manager
    CASE/tokens.json  token ids, [B, T]
    CASE/logits.npy   f32 [B, T, V]: the package's model with the adapter on
    CASE/case.json    rank, alpha, whether a user has to pass alpha, versions
    CASE/tree.json    key path, shape and dtype of every leaf of the saved item

Needs numpy, safetensors and tensorstore, which every package's environment has.
"""

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore
from safetensors.numpy import save_file

TOKENS = [[2, 17, 93, 5, 61, 44, 8, 120, 77, 3, 29, 110], [2, 99, 14, 14, 70, 31, 86, 6, 52, 101, 47, 9]]


def write_base(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
    """Write config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    # safetensors 0.8 writes the memory of a strided array as it lies.
    contiguous = {name: np.ascontiguousarray(value, np.float32) for name, value in sorted(tensors.items())}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})


def write_case(
    folder: Path,
    *,
    origin: str,
    rank: int,
    alpha: float,
    pass_alpha: bool,
    logits: np.ndarray,
    packages: Sequence[str],
    item: Path,
) -> None:
    """Write everything but base and run; `item` is the folder of the saved tree."""
    (folder / "tokens.json").write_text(json.dumps(TOKENS) + "\n")
    np.save(folder / "logits.npy", np.asarray(logits, np.float32))
    versions = {name: version(name) for name in packages}
    case = {"origin": origin, "rank": rank, "alpha": alpha, "pass_alpha": pass_alpha, "versions": versions}
    (folder / "case.json").write_text(json.dumps(case, indent=2) + "\n")
    (folder / "tree.json").write_text(tree_text(item))


def tree_text(item: Path) -> str:
    """The leaves of an Orbax item as JSON, one a line: [key path, shape, dtype]."""
    metadata = json.loads((item / "_METADATA").read_text())
    leaves = []
    for leaf in metadata["tree_metadata"].values():
        if leaf["value_metadata"]["skip_deserialize"]:  # an empty dictionary
            continue
        path = [str(part["key"]) for part in leaf["key_metadata"]]
        name = ".".join(path)
        if metadata["use_ocdbt"]:
            base = {"driver": "file", "path": f"{item}/"}
            kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        else:
            kvstore = {"driver": "file", "path": f"{item}/{name}/"}
        driver = "zarr3" if metadata["use_zarr3"] else "zarr"
        store = tensorstore.open({"driver": driver, "kvstore": kvstore}, open=True, read=True).result()
        leaves.append([path, list(store.shape), store.dtype.name])
    return "[\n" + ",\n".join(map(json.dumps, sorted(leaves))) + "\n]\n"
