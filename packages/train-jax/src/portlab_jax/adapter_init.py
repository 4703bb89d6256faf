"""Go on from an adapter that another run trained: one of PEFT's folders, or a run folder of ours.

The adapter must be what the recipe would train: the same modules with the same ranks and scalings. What differs is
refused by name rather than dropped or left at its initial value.

Names and forms of PEFT are those of release 0.21.2: `base_model.model.<module>.lora_{A,B}.weight`; whole embedding rows
as `<embedding>.token_adapter.trainable_tokens_delta`; the experts of a layer side by side in one pair of matrices,
A (E r, in) and B (out, r E). Of two parameters of one module, the second wraps the first (`.base_layer`).
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from portlab_jax.checkpoint import STEP_METADATA, why_incomplete
from portlab_jax.leaf_digests import leaf_digests
from portlab_jax.lora import Adapter
from portlab_spec.errors import UserError
from portlab_spec.files import read_json
from portlab_spec.models import PREFIXES, AdapterLeaf
from portlab_spec.models.targets import pattern_key, scaling
from portlab_spec.run.metadata import FORMATS
from portlab_spec.safetensors_file import open_file

PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

# What changes the computation in a way that plain LoRA on the original base does not express.
UNSUPPORTED = ("use_dora", "lora_bias", "modules_to_save", "layer_replication", "use_qalora", "use_bdlora")
REWRITES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # values of init_lora_weights

_PREFIX = re.compile("|".join(re.escape(prefix) for prefix in sorted(PREFIXES, key=len, reverse=True)))
_PEFT_NAME = re.compile(r"base_model\.model\.(.+)\.(lora_[AB]\.weight|token_adapter\.trainable_tokens_delta)")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pair:
    """The update of one module: scaling * (a @ b), a (in, r) and b (r, out); those of experts have E in front."""

    a: np.ndarray
    b: np.ndarray
    scaling: float

    @property
    def rank(self) -> int:
        return self.a.shape[-1]


@dataclass(frozen=True)
class Found:
    """An adapter as it was read.

    Attributes:
        pairs: by module, named behind the text model's prefix ("layers.0.self_attn.q_proj").
        rows: trained rows of the embedding by token id.
        others: what has no place in a text model's adapter, by name.
    """

    pairs: dict[str, Pair]
    rows: dict[int, np.ndarray]
    others: list[str] = field(default_factory=list)


def load_adapter(path: Path, leaves: Sequence[AdapterLeaf], token_ids: tuple[int, ...], fresh: Adapter) -> Adapter:
    """The values of an adapter, in the form of and placed as a fresh one.

    Args:
        path: a PEFT adapter's folder, a run folder, or one of its checkpoints (`<run>/checkpoints/<step>`). Of a run,
            the exported adapter is taken, or the newest checkpoint where it was not finished.
        leaves: what this run adapts.
        token_ids: rows that this run trains. Those that the adapter did not train stay as they are in `fresh`.
        fresh: from `init_adapter`.

    Raises:
        UserError: no adapter there; it is damaged, of a kind that is not supported, or other modules, ranks or
            scalings than this run's.
    """
    kind, folder = _locate(path)
    found = _read_peft(folder, leaves) if kind == "peft" else _read_checkpoint(folder, leaves)
    _require_same(found, leaves, token_ids, str(folder))
    lora = {leaf.key: _stack(leaf, found) for leaf in leaves}
    adapter: dict[str, Any] = {"lora": lora}
    if token_ids:
        rows = np.array(fresh["token_rows"])
        for i, token in enumerate(token_ids):
            rows[i] = found.rows.get(token, rows[i])
        adapter["token_rows"] = rows
    log.info("start from %s: %d modules, %d token rows", folder, len(found.pairs), len(found.rows))
    return jax.tree.map(_placed_like, adapter, fresh)


def _locate(path: Path) -> tuple[str, Path]:
    for folder in (path, path / "adapter"):
        if (folder / PEFT_CONFIG).is_file():
            return "peft", folder
    if (path / STEP_METADATA).is_file():
        return "checkpoint", path
    folders = path.glob("checkpoints/*")
    steps = [step for step in folders if step.name.isdecimal() and not why_incomplete(step)]
    if steps:
        return "checkpoint", max(steps, key=lambda step: int(step.name))
    raise UserError(
        f"holds neither {PEFT_CONFIG} nor a complete checkpoint",
        where=str(path),
        fix="lora.start_from takes a PEFT adapter's folder or a run folder",
    )


# --- PEFT


def _read_peft(folder: Path, leaves: Sequence[AdapterLeaf]) -> Found:
    config = read_json(folder / PEFT_CONFIG, "PEFT adapter config")
    _require_plain_lora(config, str(folder / PEFT_CONFIG))
    halves: dict[str, dict[str, np.ndarray]] = {}
    rows: dict[int, np.ndarray] = {}
    others = []
    for name, view in open_file(folder / PEFT_WEIGHTS).items():
        match = _PEFT_NAME.fullmatch(name)
        module = _behind_prefix(match[1]) if match else None
        if match and module == "embed_tokens" and match[2].startswith("token_adapter"):
            ids = _token_ids(config)
            if len(ids) != len(view.numpy()):
                raise UserError(
                    f"{len(view.numpy())} token rows, but {PEFT_CONFIG} names {len(ids)}", where=str(folder)
                )
            rows = dict(zip(ids, view.numpy().astype(np.float32), strict=True))
        elif match and module and module.startswith("layers.") and match[2].startswith("lora_"):
            halves.setdefault(module, {})[match[2][5]] = view.numpy().astype(np.float32)
        else:
            others.append(name)
    if lone := [module for module, half in halves.items() if len(half) != 2]:
        raise UserError(f"{lone[0]} has lora_A or lora_B, not both", where=str(folder / PEFT_WEIGHTS))
    experts = {module: leaf for leaf in leaves if leaf.experts for module in leaf.modules("")}
    pairs = {
        module: _linear_pair(half, config, module)
        for module, half in halves.items()
        if not module.removesuffix(".base_layer").endswith(".experts")
    }
    for module, leaf in experts.items():
        wrapper = module.rpartition(".")[0]
        for name in (wrapper, f"{wrapper}.base_layer"):
            if name in halves and (pair := _experts_pair(halves[name], leaf, config, module)):
                pairs[module] = pair
                halves.pop(name)
                break
    others += [m for m in halves if m not in pairs and m.removesuffix(".base_layer").endswith(".experts")]
    return Found(pairs, rows, others)


def _require_plain_lora(config: Any, where: str) -> None:
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise UserError(f"is an adapter of type {kind!r}, not LoRA", where=where, fix="Start from a LoRA adapter")
    wrong = [key for key in UNSUPPORTED if config.get(key)]
    wrong += ["bias"] if config.get("bias", "none") != "none" else []
    init = config.get("init_lora_weights")
    wrong += [f"init_lora_weights={init}"] if isinstance(init, str) and init.startswith(REWRITES_BASE) else []
    if wrong:
        raise UserError(
            f"uses {', '.join(wrong)}, which train-jax does not compute",
            where=where,
            fix="Merge the adapter into its base with PEFT, and train a new one on the result",
        )


def _token_ids(config: Mapping[str, Any]) -> list[int]:
    """PEFT takes a list for the input embedding, or a table from embeddings to lists."""
    indices = config.get("trainable_token_indices") or []
    if isinstance(indices, dict):
        indices = next((ids for name, ids in indices.items() if "embed_tokens".endswith(name.rpartition(".")[2])), [])
    return [int(token) for token in indices]


def _peft_scaling(config: Mapping[str, Any], module: str, rank: int) -> float:
    patterns = config.get("alpha_pattern") or {}
    key = next((k for prefix in PREFIXES if (k := pattern_key(patterns, prefix + module))), None)
    alpha = config["lora_alpha"] if key is None else patterns[key]
    return scaling(alpha, rank, bool(config.get("use_rslora")))


def _linear_pair(half: Mapping[str, np.ndarray], config: Mapping[str, Any], module: str) -> Pair:
    a, b = half["A"].T, half["B"].T
    return Pair(a, b, _peft_scaling(config, module, a.shape[1]))


def _experts_pair(
    half: Mapping[str, np.ndarray], leaf: AdapterLeaf, config: Mapping[str, Any], module: str
) -> Pair | None:
    """A layer's experts taken apart; None if the matrices are those of the module's other parameter."""
    (count,) = (dim.size for dim in leaf.experts)
    a, b = half["A"], half["B"]
    if (a.shape[1], b.shape[0]) != (leaf.into.size, leaf.out.size) or a.shape[0] != b.shape[1] or a.shape[0] % count:
        return None
    rank = a.shape[0] // count
    a, b = a.reshape(count, rank, -1).transpose(0, 2, 1), b.reshape(-1, rank, count).transpose(2, 1, 0)
    return Pair(a, b, _peft_scaling(config, module, rank))


def _behind_prefix(module: str) -> str | None:
    """The name behind the text model's prefix; None outside the text model."""
    match = _PREFIX.match(module)
    return module[match.end() :] if match else None


# --- checkpoints


def _read_checkpoint(folder: Path, leaves: Sequence[AdapterLeaf]) -> Found:
    metadata = read_json(folder / STEP_METADATA, "step metadata").get("custom_metadata") or {}
    if metadata.get("format") != FORMATS["lora"]:
        raise UserError(
            f"is a checkpoint of format {metadata.get('format')!r}, not of an adapter",
            where=str(folder),
            fix="After full fine-tuning, start from the run's merged folder: --model <run>/merged",
        )
    tree = _restore_on_host(folder / "adapter")
    if leaf_digests(tree) != metadata.get("leaf_sha256"):
        raise UserError("is damaged (sha256)", where=str(folder), fix="Start from another checkpoint of the run")
    lora = metadata["lora"]
    pairs = {}
    for entry in lora["leaves"]:
        leaf = tree["lora"][entry["target"]]
        for i, name in enumerate(entry["modules"]):
            module = _behind_prefix(name) or name
            rank = leaf["a"].shape[-1]
            factor = _peft_scaling(lora | {"lora_alpha": lora["alpha"]}, module, rank)
            pairs[module] = Pair(leaf["a"][i], leaf["b"][i], factor)
    ids = (lora.get("token_rows") or {}).get("ids", [])
    rows = dict(zip(ids, tree["token_rows"], strict=True)) if ids else {}
    return Found(pairs, rows)


def _restore_on_host(item: Path) -> dict[str, Any]:
    """All arrays of an Orbax item in host memory, whatever devices they were saved from."""
    checkpointer = ocp.PyTreeCheckpointer()
    try:
        stored = checkpointer.metadata(item.absolute()).item_metadata
        arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), dict(stored.tree))
        return checkpointer.restore(item.absolute(), args=ocp.args.PyTreeRestore(restore_args=arguments))
    except (ValueError, KeyError, OSError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        raise UserError(f"cannot be read ({first})", where=str(item), fix="Start from another checkpoint") from error


# --- into this run's form


def _require_same(found: Found, leaves: Sequence[AdapterLeaf], token_ids: tuple[int, ...], where: str) -> None:
    wanted = {module: leaf for leaf in leaves for module in leaf.modules("")}
    missing = [module for module in wanted if module not in found.pairs]
    extra = [module for module in found.pairs if module not in wanted] + found.others
    faults = []
    if missing:
        faults.append(f"this run adapts {_several(missing)}, which it lacks")
    if extra:
        faults.append(f"it holds {_several(extra)}, which this run does not train")
    if spare := sorted(found.rows.keys() - set(token_ids)):
        faults.append(f"it holds rows of the tokens {_several(spare)}, which this run does not train")
    for module, leaf in wanted.items():
        if (pair := found.pairs.get(module)) and (fault := _misfit(pair, leaf)):
            faults.append(f"{module} {fault}")
            break
    if faults:
        both = len(wanted) - len(missing)
        raise UserError(
            f"is another adapter than the recipe's: {'; '.join(faults)} ({both} of {len(wanted)} modules are in both)",
            where=where,
            fix="Give the recipe the adapter's targets, rank, alpha and patterns, or start afresh",
        )


def _misfit(pair: Pair, leaf: AdapterLeaf) -> str:
    if pair.rank != leaf.rank:
        return f"has rank {pair.rank}, the recipe says {leaf.rank}"
    lead = tuple(dim.size for dim in leaf.experts)
    shapes = (*lead, leaf.into.size, leaf.rank), (*lead, leaf.rank, leaf.out.size)
    if (pair.a.shape, pair.b.shape) != shapes:
        return f"is adapted by {pair.a.shape} x {pair.b.shape}, in this base by {shapes[0]} x {shapes[1]}"
    if not np.isclose(pair.scaling, leaf.scaling, rtol=1e-6):
        return f"is scaled by {pair.scaling:g}, the recipe says {leaf.scaling:g} (alpha, use_rslora)"
    return ""


def _several(items: Sequence[Any]) -> str:
    rest = f" and {len(items) - 3} more" if len(items) > 3 else ""
    return ", ".join(map(str, items[:3])) + rest


def _stack(leaf: AdapterLeaf, found: Found) -> dict[str, np.ndarray]:
    pairs = [found.pairs[module] for module in leaf.modules("")]
    return {"a": np.stack([pair.a for pair in pairs]), "b": np.stack([pair.b for pair in pairs])}


def _placed_like(array: np.ndarray, like: jax.Array) -> jax.Array:
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: array[index].astype(like.dtype))
