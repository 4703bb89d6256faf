"""PEFT LoRA folders (adapter_config.json and adapter_model.safetensors) as input."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pydantic
from pydantic import BeforeValidator, ConfigDict, ValidationError

from portlab_merge.adapter import Adapter, BaseRecord, LoraSettings, ModuleUpdate, TokenRows, check_values, leaf_digest
from portlab_merge.base_model import BaseModel
from portlab_merge.contract import Alpha, Rank
from portlab_merge.peft_format import CONFIG, EXPERTS, PICKLE, WEIGHTS, Key, parse_key, unpack_experts
from portlab_spec.errors import UserError
from portlab_spec.files import read_json
from portlab_spec.models.targets import ModulePattern, pattern_key, pattern_value, scaling
from portlab_spec.safetensors_file import open_file
from portlab_spec.safetensors_header import DTYPES

ORIGIN = "peft"
# Initialisations that leave the base as it is; the others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) train beside a changed
# base, and PEFT marks an adapter that was converted for the original one with `true`.
PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica")
# Keys of the config that mean something else than W + scaling * B A, and what to call it.
UNSUPPORTED = {
    "use_dora": "DoRA",
    "lora_bias": "a bias on lora_B (lora_bias)",
    "modules_to_save": "fully trained modules (modules_to_save)",
    "fan_in_fan_out": "fan_in_fan_out",
    "layer_replication": "repeated layers (layer_replication)",
    "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens)",
    "arrow_config": "Arrow routing (arrow_config)",
    "kasa_config": "KaSA (kasa_config)",
    "monteclora_config": "MonteCLoRA (monteclora_config)",
    "use_bdlora": "block-diagonal LoRA (use_bdlora)",
    "use_qalora": "QALoRA",
}


class _Config(pydantic.BaseModel):
    """The keys of adapter_config.json that decide what is added to the base; null is as good as absent."""

    model_config = ConfigDict(extra="ignore")

    r: Rank
    lora_alpha: Alpha
    use_rslora: bool = False
    lora_dropout: float = 0.0
    rank_pattern: Annotated[dict[ModulePattern, Rank], BeforeValidator(lambda value: value or {})] = {}
    alpha_pattern: Annotated[dict[ModulePattern, Alpha], BeforeValidator(lambda value: value or {})] = {}
    target_parameters: Annotated[tuple[str, ...], BeforeValidator(lambda value: value or ())] = ()
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None
    base_model_name_or_path: str | None = None
    revision: str | None = None

    def rank_of(self, path: str) -> int:
        return pattern_value(self.rank_pattern, path, self.r)

    def scaling_of(self, path: str) -> float:
        return scaling(pattern_value(self.alpha_pattern, path, self.lora_alpha), self.rank_of(path), self.use_rslora)


@dataclass(frozen=True, eq=False)
class _Pair:
    """A and B of one module, f32 as PEFT stores them."""

    module: str
    a: np.ndarray
    b: np.ndarray
    embedding: bool


def is_peft(folder: Path) -> bool:
    """Is this a folder that PEFT saved?"""
    return (folder / CONFIG).is_file()


def read_peft(folder: Path, *, tied_embeddings: bool = True) -> Adapter:
    """Read a PEFT LoRA folder.

    Args:
        folder: holds adapter_config.json and adapter_model.safetensors.
        tied_embeddings: the base's output matrix is its embedding, as in every Gemma. Then an adapter of one of the
            two alone fits no single matrix, and is a problem; PEFT's own merge changes both.

    Returns:
        The adapter in normal form. What is wrong with single tensors or patterns is in its problems.

    Raises:
        UserError: files missing or broken, a pickle, or a kind of adapter that is more than W + scaling * B A.
    """
    config, raw = _read_config(folder / CONFIG)
    leaves, keys, problems = _read_leaves(_weights_file(folder))
    stored = list(_pairs(leaves, keys, problems))
    pairs = _join_tied(stored, config, problems) if tied_embeddings else stored
    updates: list[ModuleUpdate] = []
    paths = [pair.module for pair in stored if pair not in pairs]
    for pair in pairs:
        path = _parameter_path(pair, pairs, config, problems)
        if path is not None and (update := _update(pair, path, config, problems)):
            paths.append(path)
            updates.append(update)
    if updates and not any(update.b.any() for update in updates):
        problems.append("every lora_B is all zero: the adapter is still at its initialisation")
    problems += _idle_patterns(config, paths)
    rows = _token_rows(leaves, keys, config, problems)
    if not updates and rows is None and not problems:
        problems.append(f"{WEIGHTS} holds no LoRA matrices")
    return Adapter(
        origin=ORIGIN,
        lora=LoraSettings(
            config.r,
            config.lora_alpha,
            config.use_rslora,
            config.lora_dropout,
            config.rank_pattern,
            config.alpha_pattern,
        ),
        updates=tuple(updates),
        rows=rows,
        base=_base_record(config),
        leaf_sha256={name: leaf_digest(array) for name, array in leaves.items()},
        problems=tuple(problems),
        record=raw,
    )


def base_copy_problems(adapter: Adapter, base: BaseModel) -> list[str]:
    """One line for each matrix of the base in the adapter's file that is not what this base holds.

    PEFT puts a whole embedding beside its adapter and loads it over the base's. It is a plain copy unless the
    embedding was resized or trained besides.
    """
    problems = []
    for name, digest in adapter.leaf_sha256.items():
        key = parse_key(name)
        if key and key.part == "base copy" and digest not in _digests(base, key.module.rpartition(".")[2]):
            problems.append(f"leaf {name} differs from the embedding of the base: it was resized or trained besides")
    return problems


def _digests(base: BaseModel, layer: str) -> Iterator[str]:
    """Digests of an embedding or output matrix of the base, in every dtype that a trainer may have loaded it in."""
    layers = ("lm_head", "embed_tokens") if layer == "lm_head" else (layer,)  # tied: one matrix for both
    found = [name for end in layers for name in base.tensors if f".{name}".endswith(f".{end}.weight")]
    if found:
        stored = open_file(base.folder / base.tensors[found[0]][0])[found[0]].numpy()
        yield leaf_digest(stored)
        yield from (leaf_digest(stored.astype(DTYPES[dtype])) for dtype in ("F32", "BF16", "F16"))


def _read_config(path: Path) -> tuple[_Config, dict[str, Any]]:
    raw = read_json(path, "PEFT config")
    if not isinstance(raw, dict):
        raise UserError("is not a JSON object", where=str(path), fix="Save the adapter again")
    if unsupported := list(_unsupported(raw)):
        raise UserError(
            f"cannot be merged: it uses {', '.join(unsupported)}",
            where=str(path),
            fix="Merge it with PEFT's merge_and_unload, or train plain LoRA",
        )
    try:
        return _Config.model_validate(raw), raw
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise UserError(f"is broken: {faults}", where=str(path), fix="Save the adapter again") from None


def _unsupported(raw: Mapping[str, Any]) -> Iterator[str]:
    if raw.get("peft_type") != "LORA":
        yield f"the PEFT type {raw.get('peft_type')}"
        return
    yield from (name for key, name in UNSUPPORTED.items() if raw.get(key))
    if raw.get("bias", "none") not in ("none", None):
        yield f"trained biases (bias={raw['bias']})"
    init = raw.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower() not in PLAIN_INITS:
        yield f"init_lora_weights={init}, which changed the base"


def _weights_file(folder: Path) -> Path:
    if (folder / WEIGHTS).is_file():
        return folder / WEIGHTS
    if (folder / PICKLE).is_file():
        raise UserError(
            f"holds {PICKLE}, a pickle that could run code, and no {WEIGHTS}",
            where=str(folder),
            fix="Load it in PEFT where you trust it and call save_pretrained, which writes safetensors",
        )
    raise UserError(f"holds {CONFIG} and no {WEIGHTS}", where=str(folder), fix="Copy the whole adapter folder")


def _read_leaves(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Key], list[str]]:
    """Tensors by name, as stored; what each of them is; and what is wrong with them."""
    leaves = {name: view.numpy() for name, view in open_file(path).items()}
    problems = list(check_values(leaves))
    keys: dict[str, Key] = {}
    for name in leaves:
        key = parse_key(name)
        if key is None:
            problems.append(f"leaf {name} is nothing that LoRA adds to a linear layer or an embedding")
        elif key in keys.values():
            problems.append(f"leaf {name} is a second {key.part} of {key.module}")
        else:
            keys[name] = key
    return leaves, keys, problems


def _pairs(leaves: Mapping[str, np.ndarray], keys: Mapping[str, Key], problems: list[str]) -> Iterator[_Pair]:
    """A and B that belong together; whatever lacks the other half is a problem."""
    halves: dict[tuple[str, bool], dict[str, str]] = defaultdict(dict)
    for name, key in keys.items():
        if key.part.startswith("lora_"):
            halves[key.module, "embedding" in key.part][key.part[-1]] = name
    for (module, embedding), names in halves.items():
        if len(names) != 2:
            problems.append(f"leaf {next(iter(names.values()))} lacks lora_{'B' if 'A' in names else 'A'}")
            continue
        stored_a, stored_b = (leaves[names[side]] for side in "AB")
        if stored_a.ndim != 2 or stored_b.ndim != 2 or len(stored_a) != stored_b.shape[1]:
            problems.append(
                f"{module} has lora_A {stored_a.shape} and lora_B {stored_b.shape}, expected (r, in), (out, r)"
            )
            continue
        a, b = (array.astype(np.float32) for array in (stored_a, stored_b))
        yield _Pair(module, a, b, embedding)


def _join_tied(pairs: list[_Pair], config: _Config, problems: list[str]) -> list[_Pair]:
    """One update for an embedding that is the output matrix too.

    With `ensure_weight_tying`, PEFT stores the same factors twice: for embed_tokens, and transposed for lm_head.
    """
    ends = {name: [p for p in pairs if p.module.rpartition(".")[2] == name] for name in ("embed_tokens", "lm_head")}
    embeddings, heads = ends["embed_tokens"], ends["lm_head"]
    if not embeddings and not heads:
        return pairs
    if len(embeddings) == len(heads) == 1:
        embedding, head = embeddings[0], heads[0]
        same = np.array_equal(head.a, embedding.b.T) and np.array_equal(head.b, embedding.a.T)
        if same and config.scaling_of(head.module) == config.scaling_of(embedding.module):
            return [pair for pair in pairs if pair is not head]
        problems.append("embed_tokens and lm_head are one matrix in the base, and get two different updates")
    else:
        found, other = ("embed_tokens", "lm_head") if embeddings else ("lm_head", "embed_tokens")
        problems.append(
            f"{found} is adapted and {other} is not, and they are one matrix in the base: no merge can do that "
            "(train with ensure_weight_tying=True)"
        )
    return [pair for pair in pairs if pair not in embeddings and pair not in heads]


def _parameter_path(pair: _Pair, pairs: list[_Pair], config: _Config, problems: list[str]) -> str | None:
    """What a pair adapts, as patterns see it: the path of a module, or of a parameter of `target_parameters`."""
    module, nested = re.subn(r"\.base_layer\b", "", pair.module)
    names = {
        name
        for owner, _, name in (target.rpartition(".") for target in config.target_parameters)
        if f".{module}".endswith(f".{owner or 'experts'}")
    }
    if not names:
        if nested:
            problems.append(f"{pair.module} is nested and {module} is in no target_parameters")
            return None
        return module
    # The outermost wrapper holds the last parameter of the module.
    order = [name for name in EXPERTS if name in names] if len(names) > 1 else list(names)
    wrappers = sum(re.sub(r"\.base_layer\b", "", other.module) == module for other in pairs)
    if len(order) != len(names) or wrappers != len(order):
        problems.append(f"{module} has {wrappers} pairs of matrices for the parameters {', '.join(sorted(names))}")
        return None
    return f"{module}.{order[len(order) - 1 - nested]}"


def _update(pair: _Pair, path: str, config: _Config, problems: list[str]) -> ModuleUpdate | None:
    rank, module = config.rank_of(path), path.removesuffix(".weight")
    if path.rpartition(".")[2] in EXPERTS and path != pair.module:
        if len(pair.a) % rank:
            problems.append(f"{path} has {len(pair.a)} ranks in all, no multiple of the config's {rank}")
            return None
        a, b = unpack_experts(pair.a, pair.b, rank)
    else:
        if len(pair.a) != rank:
            problems.append(f"{path} has rank {len(pair.a)}, the config says {rank}")
            return None
        # An embedding is (V, D): its A reaches the rows and its B the columns.
        a, b = (pair.b, pair.a) if pair.embedding else (pair.a.T, pair.b.T)
    return ModuleUpdate(module, pair.module, a, b, config.scaling_of(path))


def _idle_patterns(config: _Config, paths: list[str]) -> Iterator[str]:
    for name, pattern in (("rank_pattern", config.rank_pattern), ("alpha_pattern", config.alpha_pattern)):
        for key in pattern:
            if not any(pattern_key({key: 0}, path) for path in paths):
                yield f"{name} {key!r} matches no adapted module"


def _token_rows(
    leaves: Mapping[str, np.ndarray], keys: Mapping[str, Key], config: _Config, problems: list[str]
) -> TokenRows | None:
    stored = [name for name, key in keys.items() if key.part == "trainable_tokens_delta"]
    told = config.trainable_token_indices
    if len(stored) != (1 if told else 0) or (isinstance(told, dict) and len(told) != 1):
        problems.append(f"{len(stored)} embeddings have trained rows, trainable_token_indices is {told}")
        return None
    if not told:
        return None
    ids = told if isinstance(told, list) else next(iter(told.values()))
    name, module = stored[0], keys[stored[0]].module
    if leaves[name].ndim != 2 or len(leaves[name]) != len(ids) or not ids:
        problems.append(f"leaf {name} is {leaves[name].shape} for {len(ids)} token ids")
        return None
    return TokenRows(f"{module}.weight", tuple(ids), leaves[name].astype(np.float32))


def _base_record(config: _Config) -> BaseRecord:
    name = config.base_model_name_or_path or ""
    return BaseRecord(id=name, revision=config.revision, path=name if name and Path(name).is_dir() else "")
