"""A model folder as a server will read it: config, tensor names and shapes, tokens, stops, template; no weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portlab_serve.findings import Finding, error, of_error
from portlab_spec.errors import UserError
from portlab_spec.files import read_json
from portlab_spec.formats import find_format
from portlab_spec.models.config import GemmaConfig
from portlab_spec.safetensors_file import TensorView, open_tensors

# Formats whose tokens a tokenizer has only if the model knows them, by which a model is recognised.
_NATIVE_FORMATS = ("functiongemma", "gemma4", "qwen3")
_PROMPTED_FORMAT = "gemma3-json"  # any Gemma 3 can be asked for it
_MANIFEST = "merge_manifest.json"  # of merge-ckpt: names the format of the recipe
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")


@dataclass(frozen=True)
class ModelFolder:
    """What a folder holds.

    Attributes:
        path: the folder.
        raw: its config.json.
        architectures: as it lists them.
        config: the text model; None for a kind that this version does not know.
        tensors: by name; None if the weights cannot be read.
        tokens: ids of the tokenizer's added tokens; None without a readable tokenizer.
        stops: ids that end a generation, and the file that says so.
        template: chat template, and the file that holds it.
        trained_format: tool-call format that it was trained on, where merge-ckpt left word of it.
    """

    path: Path
    raw: Mapping[str, Any]
    architectures: tuple[str, ...]
    config: GemmaConfig | None
    tensors: Mapping[str, TensorView] | None
    tokens: Mapping[str, int] | None
    stops: tuple[tuple[int, ...], str]
    template: tuple[str, str] | None
    trained_format: str | None = None

    @property
    def architecture(self) -> str:
        """The class that serves it."""
        return self.architectures[0] if self.architectures else ""

    @property
    def tool_format(self) -> str | None:
        """The tool-call format that it was trained on, or else the one that its control tokens speak for."""
        if self.trained_format:
            return self.trained_format
        tokens = self.tokens or {}
        for name in _NATIVE_FORMATS:
            if all(token in tokens for token in find_format(name).control_tokens):
                # The larger Gemma 4 models, which have no per-layer inputs, end a prompt in another way.
                large = name == "gemma4" and self.config is not None and self.config.per_layer is None
                return "gemma4-31b" if large else name
        return _PROMPTED_FORMAT if all(t in tokens for t in find_format(_PROMPTED_FORMAT).control_tokens) else None


def read_model(folder: Path) -> tuple[ModelFolder | None, list[Finding]]:
    """Read a folder as far as it can be read; what cannot be is a finding."""
    findings: list[Finding] = []
    try:
        raw = read_json(folder / "config.json", "model config")
    except UserError as raised:
        return None, [of_error("config", raised)]
    if not isinstance(raw, dict):
        return None, [error("config", "is not a JSON object", str(folder / "config.json"), "Restore the file")]

    def attempt(check: str, read: Callable[..., Any], *args: Any) -> Any:
        try:
            return read(*args)
        except UserError as raised:
            findings.append(of_error(check, raised))
            return None

    config = attempt("config", _config, folder, raw)
    tensors = attempt("weights", open_tensors, folder)
    tokens = attempt("tokenizer", _added_tokens, folder)
    stops = attempt("stops", _stops, folder, raw) or ((), "generation_config.json")
    template = attempt("template", _template, folder)
    trained = attempt("parser", _trained_format, folder)
    listed = raw.get("architectures")
    architectures = tuple(str(name) for name in listed) if isinstance(listed, list) else ()
    return ModelFolder(folder, raw, architectures, config, tensors, tokens, stops, template, trained), findings


def _config(folder: Path, raw: Mapping[str, Any]) -> GemmaConfig | None:
    """The text model; None for a family that is not Gemma's and not known otherwise."""
    where = str(folder / "config.json")
    if str(raw.get("model_type", "")).startswith("gemma"):
        return GemmaConfig.from_dict(raw, where=where)
    try:
        return GemmaConfig.from_dict(raw, where=where)
    except UserError:
        return None


def _added_tokens(folder: Path) -> dict[str, int]:
    """Added tokens of tokenizer.json; the file is not parsed further: it is tens of megabytes."""
    path = folder / "tokenizer.json"
    added = read_json(path, "tokenizer")
    try:
        return {str(token["content"]): int(token["id"]) for token in added["added_tokens"]}
    except (KeyError, TypeError, ValueError):
        raise UserError("lists no added tokens", where=str(path), fix="Restore the file") from None


def _stops(folder: Path, raw: Mapping[str, Any]) -> tuple[tuple[int, ...], str]:
    """What vLLM stops at: generation_config.json, or else config.json."""
    path = folder / "generation_config.json"
    if path.is_file():
        found = read_json(path, "generation config")
        if isinstance(found, dict) and found.get("eos_token_id") is not None:
            return _ids(found["eos_token_id"]), str(path)
    text = raw.get("text_config")
    ids = raw.get("eos_token_id", text.get("eos_token_id") if isinstance(text, dict) else None)
    return _ids(ids), str(path)


def _trained_format(folder: Path) -> str | None:
    """What merge-ckpt noted; a format that this version does not know is an error."""
    path = folder / _MANIFEST
    if not path.is_file():
        return None
    manifest = read_json(path, "manifest of the merge")
    name = manifest.get("tool_format") if isinstance(manifest, dict) else None
    if name is None:
        return None
    try:
        return find_format(str(name)).name
    except UserError as error:
        raise UserError(error.what, where=str(path), fix="Pass --tool-format") from None


def _ids(value: Any) -> tuple[int, ...]:
    listed = value if isinstance(value, list) else [value]
    return tuple(i for i in listed if isinstance(i, int))


def _template(folder: Path) -> tuple[str, str] | None:
    """The template in the order in which transformers looks for it."""
    for name in TEMPLATE_FILES:
        path = folder / name
        if not path.is_file():
            continue
        if path.suffix == ".jinja":
            return path.read_text(encoding="utf-8"), str(path)
        held = read_json(path, "tokenizer config")
        found = held.get("chat_template") if isinstance(held, dict) else None
        if isinstance(found, list):  # several by name
            found = next((t.get("template") for t in found if isinstance(t, dict) and t.get("name") == "default"), None)
        if isinstance(found, str) and found:
            return found, str(path)
    return None
