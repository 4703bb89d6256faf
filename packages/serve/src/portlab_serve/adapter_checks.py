"""Would the server apply all of a PEFT adapter? vLLM loads some without a word and serves the base (vllm#41754)."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portlab_serve.findings import Finding, error, note, of_error, warning
from portlab_serve.model_folder import ModelFolder
from portlab_serve.targets import Target
from portlab_spec.errors import UserError
from portlab_spec.files import read_json
from portlab_spec.models.config import GemmaConfig
from portlab_spec.models.table import param_table
from portlab_spec.safetensors_file import TensorView, open_file
from portlab_spec.serving import (
    DEFAULT_MAX_RANK,
    MAX_RANKS,
    MODELS,
    half_applied_keys,
    max_rank_for,
    server_module,
    unknown_modules,
)

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_KEY = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
# Inits that leave the base as it is (vllm/lora/peft_helper.py); the others change it when PEFT loads the adapter.
_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
# Without one of them the server refuses an adapter (vllm/lora/peft_helper.py).
_REQUIRED = ("r", "lora_alpha", "target_modules")
_UNSUPPORTED = {
    "use_dora": "DoRA",
    "lora_bias": "biases of LoRA",
    "alora_invocation_tokens": "activated LoRA",
    "layer_replication": "replicated layers",
    "use_bdlora": "block-diagonal LoRA",
    "use_qalora": "QALoRA",
}


@dataclass(frozen=True)
class AdapterRequest:
    """An adapter that --lora-modules names."""

    name: str
    path: str
    base: str | None = None


@dataclass(frozen=True)
class Adapter:
    """A PEFT folder: its config and, by module, the two factors."""

    request: AdapterRequest
    config: Mapping[str, Any]
    factors: Mapping[str, Mapping[str, TensorView]]
    others: tuple[str, ...]

    @property
    def rank(self) -> int:
        """The largest rank, as the server counts it: the config's too, though no module may have it."""
        shapes = [sides["A"].shape[0] for sides in self.factors.values() if "A" in sides]
        return max([int(self.config.get("r") or 0), *shapes])


def requested_adapters(values: Sequence[str]) -> list[AdapterRequest]:
    """The values of --lora-modules: `name=path`, or JSON where one holds a comma, as vLLM reads them.

    Raises:
        UserError: neither of the two.
    """
    found = []
    for value in values:
        if "=" in value and "," not in value:
            name, _, path = value.partition("=")
            found.append(AdapterRequest(name, path))
            continue
        try:
            held = json.loads(value)
            found.append(AdapterRequest(held["name"], held["path"], held.get("base_model_name")))
        except (ValueError, KeyError, TypeError):
            fix = """Write name=path or '{"name": ..., "path": ...}'"""
            raise UserError(f"{value!r} is no adapter", where="--lora-modules", fix=fix) from None
    return found


def read_adapter(request: AdapterRequest) -> tuple[Adapter | None, list[Finding]]:
    """Read a folder's config and the headers of its weights."""
    folder = Path(request.path)
    if not folder.is_dir():
        what = f"adapter {request.name} is not in a local folder: not checked"
        return None, [note("adapter", what, request.path, "Check its effect with --check-adapter")]
    try:
        config = read_json(folder / CONFIG, "adapter config")
        views = open_file(folder / WEIGHTS)
    except UserError as raised:
        return None, [of_error("adapter", raised)]
    if not isinstance(config, dict):
        return None, [error("adapter", "is not a JSON object", str(folder / CONFIG), "Export the adapter again")]
    factors: dict[str, dict[str, TensorView]] = {}
    others = []
    for name, view in views.items():
        if match := _KEY.fullmatch(name):
            factors.setdefault(match["module"], {})[match["side"]] = view
        else:
            others.append(name)
    return Adapter(request, config, factors, tuple(others)), []


def check_adapter(adapter: Adapter, model: ModelFolder, target: Target) -> Iterator[Finding]:
    """All checks of an adapter but its rank."""
    where = adapter.request.path
    yield from _features(adapter, where)
    yield from _other_tensors(adapter, where)
    yield from _base(adapter, model, where)
    names = MODELS.get(model.architecture)
    if names is None or model.config is None:
        yield note("adapter", f"the module names of {model.architecture} are not known here: not checked", where)
        return
    experts = [module for module in adapter.factors if ".experts" in module]
    modules = {module: server_module(module, names) for module in adapter.factors if module not in experts}
    found = list(modules.values())
    for what in unknown_modules(found, model.config, names.prefix):
        yield error("adapter", what, where, f"Export it for this base: its modules are named {names.takes[0]}layers...")
    for what in half_applied_keys(found, model.config, names.prefix):
        yield error("adapter", what, where, "Serve the merged model: merge-ckpt merge")
    yield from _experts(experts, model.config, target, where)
    yield from _factors(adapter, modules, model.config, names.prefix, where)


def check_rank(adapters: Sequence[Adapter], given: str | None) -> Iterator[Finding]:
    """Ranks against --max-lora-rank, `given` as it was written or None."""
    allowed = int(given) if given and given.isdigit() else DEFAULT_MAX_RANK
    for adapter in adapters:
        if adapter.rank > MAX_RANKS[-1]:
            what = f"rank {adapter.rank} is beyond {MAX_RANKS[-1]}, the largest that --max-lora-rank takes"
            yield error("rank", what, adapter.request.path, "Serve the merged model: merge-ckpt merge")
        elif given and adapter.rank > allowed:
            what = f"rank {adapter.rank} is above --max-lora-rank {given}: the server refuses it"
            yield error("rank", what, adapter.request.path, f"Pass --max-lora-rank {max_rank_for(adapter.rank)}")


def check_target_modules(adapters: Sequence[Adapter], only: Sequence[str]) -> Iterator[Finding]:
    """Modules that --lora-target-modules leaves out, which the server drops in silence (vllm#55193)."""
    for adapter in adapters:
        adapted = {module.rpartition(".")[2] for module in adapter.factors}
        if only and (dropped := sorted(adapted - set(only))):
            what = f"adapts {', '.join(dropped)}, which --lora-target-modules leaves out: they would not be applied"
            yield error("adapter", what, adapter.request.path, f"Add {' '.join(dropped)} to --lora-target-modules")


def _features(adapter: Adapter, where: str) -> Iterator[Finding]:
    config, fix = adapter.config, "Serve the merged model: merge-ckpt merge"
    if config.get("peft_type") != "LORA":
        yield error("adapter", f"peft_type is {config.get('peft_type')!r}, not LORA", where, "Serve a merged model")
    if missing := [key for key in _REQUIRED if key not in config]:
        what = f"{CONFIG} lacks {', '.join(missing)}: the server refuses it"
        yield error("adapter", what, where, "Export it again: merge-ckpt adapter")
    for key, name in _UNSUPPORTED.items():
        if config.get(key):
            yield error("adapter", f"{key} is set, and the server has no {name}", where, fix)
    if (bias := config.get("bias", "none")) != "none":
        yield error("adapter", f"bias is {bias!r}, and the server takes none", where, fix)
    if config.get("modules_to_save"):
        yield error("adapter", f"modules_to_save {config['modules_to_save']} are not applied", where, fix)
    if config.get("trainable_token_indices"):
        rows_fix = "Put them into the base: merge-ckpt adapter --rows-into DIR"
        yield error("adapter", "trained token rows are not applied: the server refuses the file", where, rows_fix)
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower() not in _PLAIN_INITS:
        yield error("adapter", f"init_lora_weights {init!r} changed the base as well", where, fix)


def _other_tensors(adapter: Adapter, where: str) -> Iterator[Finding]:
    if not adapter.factors:
        yield error("adapter", "holds no lora_A and lora_B", where, "Export it again: merge-ckpt adapter")
    others = [name for name in adapter.others if "token_adapter" not in name or not _has_rows(adapter)]
    if others:
        what = f"{len(others)} tensors are no factors of a linear layer, first {others[0]}: the server refuses them"
        yield error("adapter", what, where, "Serve the merged model: merge-ckpt merge")
    if lone := [module for module, sides in adapter.factors.items() if len(sides) < 2]:
        yield error("adapter", f"{lone[0]} has one factor of two", where, "Export it again: merge-ckpt adapter")


def _has_rows(adapter: Adapter) -> bool:
    return bool(adapter.config.get("trainable_token_indices"))


def _base(adapter: Adapter, model: ModelFolder, where: str) -> Iterator[Finding]:
    named = str(adapter.config.get("base_model_name_or_path") or "")
    if named and Path(named).name != model.path.resolve().name:
        what = f"was trained on {named}, and {model.path} is served"
        yield warning("adapter", what, where, "If that is another model, serve the one it was trained on")


def _experts(experts: list[str], config: GemmaConfig, target: Target, where: str) -> Iterator[Finding]:
    if target == "vllm-tpu" and config.experts:
        what = "a model with experts takes no adapter on TPU: its kernels for experts do not allow --enable-lora"
        yield error("adapter", what, where, "Serve the merged model: merge-ckpt merge")
    elif experts and target == "cpu":
        yield error("adapter", "updates of experts run in a Triton kernel, on a GPU", where, "Serve the merged model")
    elif experts:
        yield warning(
            "adapter",
            "experts are adapted in PEFT's fused layout",
            where,
            "Pass --enable-mixed-moe-lora-format and is_3d_lora_weight: merge-ckpt adapter --check-server prints both",
        )


def _factors(
    adapter: Adapter, modules: Mapping[str, str], config: GemmaConfig, prefix: str, where: str
) -> Iterator[Finding]:
    """Shapes against the base's, and an update that is zero."""
    shapes = {module: param.shape for param in param_table(config) if param.target for module in param.modules(prefix)}
    whole = {m: s for m, s in adapter.factors.items() if len(s) == 2}
    for module, sides in whole.items():
        made = (sides["B"].shape[0], sides["A"].shape[-1])
        wanted = shapes.get(modules.get(module, ""))
        if wanted and made != wanted:
            what = f"{module} is {made[0]} x {made[1]}, in this base {wanted[0]} x {wanted[1]}"
            yield error("adapter", what, where, "Serve it on the base that it was trained on")
            return
    if whole and not any(_any_nonzero(sides["B"]) for sides in whole.values()):
        yield error("adapter", "every lora_B is zero: it changes nothing", where, "Export a step after training")


def _any_nonzero(view: TensorView) -> bool:
    return bool(view.numpy().any())
