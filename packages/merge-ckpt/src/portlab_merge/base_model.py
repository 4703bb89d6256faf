"""The base: a Hugging Face model folder, described by its headers without reading a weight."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portlab_merge.adapter import BaseRecord
from portlab_spec.errors import UserError
from portlab_spec.files import read_json, sha256_file
from portlab_spec.models import PREFIXES, config_sha256
from portlab_spec.safetensors_file import INDEX_FILE, SINGLE_FILE, model_files, read_index
from portlab_spec.safetensors_header import Header, TensorInfo, read_header

# Files that describe the very bytes beside them: an index, a manifest of ours, that of the prepared default model.
DESCRIPTIONS = (".index.json", "merge_manifest.json", "portlab.json")
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")


@dataclass(frozen=True)
class BaseModel:
    """A model folder.

    Attributes:
        folder: the folder.
        shards: header of each weights file, by file name, in the order of the names.
        tensors: file name and header entry of each tensor.
        index: content of the index file, or None for a single file.
        config: content of config.json.
        config_sha256: hex digest of the bytes of config.json.
    """

    folder: Path
    shards: dict[str, Header]
    tensors: dict[str, tuple[str, TensorInfo]]
    index: dict[str, Any] | None
    config: dict[str, Any]
    config_sha256: str

    def side_files(self) -> list[Path]:
        """Every file of the folder that is not weights, relative to it: what a merged model also needs."""
        return sorted(
            path.relative_to(self.folder)
            for path in self.folder.rglob("*")
            if path.is_file()
            and not any(part.startswith(".") for part in path.relative_to(self.folder).parts)
            and path.suffix not in WEIGHT_SUFFIXES
            and not path.name.endswith(DESCRIPTIONS)
        )

    def resolve(self, module: str) -> str:
        """Name of the weight of a module, or of a bare parameter, whichever prefix this folder uses.

        Raises:
            UserError: no tensor, or more than one, has that name.
        """
        names = [f"{module}.weight", module]  # experts are parameters without a module of their own
        if present := [name for name in names if name in self.tensors]:
            return present[0]
        # The longest prefix first: "model." is also the start of "model.language_model.".
        known = next((p for p in sorted(PREFIXES, key=len, reverse=True) if module.startswith(p)), "")
        others = [p + name[len(known) :] for p in PREFIXES for name in names]
        found = [name for name in others if name in self.tensors]
        if len(found) == 1:
            return found[0]
        what = "matches " + " and ".join(found) if found else "is not in the base under any known prefix"
        raise UserError(f"module {module} {what}", where=str(self.folder), fix="Pass the base that was trained")


def open_base(folder: Path) -> BaseModel:
    """Read config.json, the index and the headers of a model folder.

    Raises:
        UserError: a file is missing or broken, or index and weights disagree.
    """
    if not folder.is_dir():
        raise UserError("base model folder not found", where=str(folder), fix="Pass --base DIR")
    config = read_json(folder / "config.json", "config of the base")
    if not isinstance(config, dict):
        raise UserError("is not a JSON object", where=str(folder / "config.json"), fix="Download it again")
    single, index_path = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.exists() and index_path.exists():
        raise UserError(
            f"holds both {SINGLE_FILE} and {INDEX_FILE}",
            where=str(folder),
            fix="Remove the one that is stale",
        )
    index = read_index(index_path) if index_path.exists() else None
    shards = {path.name: read_header(path) for path in model_files(folder)}
    tensors: dict[str, tuple[str, TensorInfo]] = {}
    for name, header in shards.items():
        for tensor in header.tensors:
            if tensor.name in tensors:
                raise UserError(f"{tensor.name} is also in {tensors[tensor.name][0]}", where=str(folder / name))
            tensors[tensor.name] = (name, tensor)
    if index is not None:
        _check_index(index["weight_map"], tensors, index_path)
    return BaseModel(folder, shards, tensors, index, config, config_sha256(folder))


def check_base_weights(base: BaseModel, trained: BaseRecord) -> None:
    """Hash the base's weights and compare with what a run was trained on, if it says.

    Raises:
        UserError: another base.
    """
    for name in base.shards if trained.files_sha256 else ():
        check_base_file(trained, base.folder / name, sha256_file(base.folder / name))


def check_base_file(trained: BaseRecord, file: Path, digest: str) -> None:
    """Compare the sha256 of one weights file with what a run was trained on, if it says.

    Raises:
        UserError: another base.
    """
    expected = trained.files_sha256.get(file.name, digest)
    if digest != expected:
        raise UserError(
            f"wrong base: its sha256 is {digest}, the run was trained on {expected}",
            where=str(file),
            fix=f"Pass {trained.id or 'the base that was trained'} as --base",
        )


def _check_index(weight_map: dict[str, str], tensors: dict[str, tuple[str, TensorInfo]], path: Path) -> None:
    wrong = sorted(name for name, file in weight_map.items() if tensors.get(name, ("",))[0] != file)
    wrong += sorted(set(tensors) - set(weight_map))
    if wrong:
        raise UserError(
            f"index and weights files disagree on {len(wrong)} tensors, first {wrong[0]}",
            where=str(path),
            fix="Download the base again",
        )
