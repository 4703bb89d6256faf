"""What every checkpoint says about the run that wrote it: the contract with merge-ckpt, and with a later process.

It is stored with the step, by Orbax as its `custom_metadata`; `FORMATS` names its version. `portlab_merge.contract` is
the other side of it, which has neither a framework nor the model's code: hence names, numbers and digests alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from portlab_spec.assets import ModelFolder
from portlab_spec.errors import UserError
from portlab_spec.files import sha256_file, sha256_json
from portlab_spec.models import AdapterLeaf, GemmaConfig, config_sha256, param_table
from portlab_spec.recipe import Recipe
from portlab_spec.safetensors_file import model_files

FORMATS = {"lora": "portlab-lora/1", "full": "portlab-full/1"}  # by method; merge-ckpt reads the first


def run_metadata(
    recipe: Recipe,
    model: ModelFolder,
    family: str,
    leaves: Sequence[tuple[str, Sequence[str]]],
    *,
    versions: Mapping[str, str],
    token_rows: tuple[str, Sequence[int]] | None = None,
    data_digest: str | None = None,
) -> dict[str, Any]:
    """The part of the metadata that is the same for every save of a run. Hashes the base's files.

    Args:
        recipe: the run.
        model: its base.
        family: the base's family, as its config names it.
        leaves: key of each adapter leaf, and the modules stacked on its first axis, in order.
        versions: of the libraries that trained, by name; see `portlab_spec.report.versions`.
        token_rows: the embedding of which rows are trained, by its name in the base's files, and their ids.
        data_digest: names the training rows and their order, if the caller can tell.
    """
    lora = recipe.lora
    modules = [module for _, names in leaves for module in names]
    described = {
        "rank": lora.rank,
        "alpha": lora.alpha,
        "use_rslora": lora.use_rslora,
        "scaling": lora.scaling,
        "dropout": lora.dropout,
        "targets": list(dict.fromkeys(module.rpartition(".")[2] for module in modules)),
        "rank_pattern": dict(lora.rank_pattern),
        "alpha_pattern": dict(lora.alpha_pattern),
        "leaves": [{"target": key, "modules": list(names)} for key, names in leaves],
        "token_rows": {"parameter": token_rows[0], "ids": list(token_rows[1])} if token_rows else None,
    }
    return {
        "format": FORMATS[recipe.method],
        "method": recipe.method,
        "lora": described,
        # Digests protect the leaves; a flipped token id or layer number would do as much harm.
        "lora_sha256": sha256_json(described),
        "optimizer": recipe.optimizer.name,
        "base": {
            "id": model.id,
            "revision": model.revision,
            "path": str(model.path),
            "files_sha256": {f.name: sha256_file(f) for f in model_files(model.path)},
        },
        "model": {"family": family, "config_sha256": config_sha256(model.path)},
        "data_sha256": data_digest,
        "recipe": recipe.model_dump(mode="json"),
        "versions": dict(versions),
    }


def planned_metadata(
    recipe: Recipe,
    model: ModelFolder,
    config: GemmaConfig,
    leaves: Sequence[AdapterLeaf],
    *,
    prefix: str,
    token_ids: Sequence[int],
    versions: Mapping[str, str],
    data_digest: str,
) -> dict[str, Any]:
    """`run_metadata` of a run whose adapter is planned; modules and embedding are named as in the base's files.

    Args:
        recipe: the run.
        model: its base.
        config: of it.
        leaves: what is adapted.
        prefix: what the names of the text model start with in the base.
        token_ids: rows of the embedding that are trained.
        versions: of the libraries that trained.
        data_digest: names the training rows and their order.
    """
    embedding = next(p for p in param_table(config) if p.name == "embed_tokens")
    return run_metadata(
        recipe,
        model,
        config.family,
        [(leaf.key, leaf.modules(prefix)) for leaf in leaves],
        versions=versions,
        token_rows=(embedding.tensor_names(prefix)[0], token_ids) if token_ids else None,
        data_digest=data_digest,
    )


def require_same_run(saved: Mapping[str, Any], now: Mapping[str, Any], where: str, trainer: str) -> None:
    """Refuse to go on from a checkpoint of another base, adapter, optimiser or data.

    Args:
        saved: metadata of the checkpoint.
        now: metadata of this run.
        where: the checkpoint, for the message.
        trainer: that asks, "train-jax" say.

    Raises:
        UserError: names what differs.
    """
    if saved.get("format") not in FORMATS.values():
        raise UserError(
            f"the checkpoint's format is {saved.get('format')!r}, which {trainer} does not know",
            where=where,
            fix=f"Choose another --out; {trainer} goes on from its own checkpoints only",
        )
    if differences := [line for name, compare in _COMPARISONS if (line := compare(saved.get(name), now.get(name)))]:
        raise UserError(
            f"the checkpoint belongs to another run: {'; '.join(differences)}",
            where=where,
            fix="Choose another --out, or give this run what that one had",
        )


def _compare_base(saved: Any, now: Any) -> str:
    saved, now = (dict((side or {}).get("files_sha256", {})) for side in (saved, now))
    changed = sorted(name for name in saved.keys() | now.keys() if saved.get(name) != now.get(name))
    return f"its base differs ({', '.join(changed)})" if changed else ""


def _compare_model(saved: Any, now: Any) -> str:
    same = (saved or {}).get("config_sha256") == (now or {}).get("config_sha256")
    return "" if same else "its base differs (config.json)"


def _compare_lora(saved: Any, now: Any) -> str:
    saved, now = saved or {}, now or {}
    for key in ("rank", "alpha", "use_rslora", "rank_pattern", "alpha_pattern"):
        if saved.get(key) != now.get(key):
            return f"its adapter differs (lora.{key} {saved.get(key)}, now {now.get(key)})"
    theirs, ours = (set(side.get("targets", ())) for side in (saved, now))
    if theirs != ours:
        return f"its adapter differs (it has {_names(theirs - ours)}, this run has {_names(ours - theirs)})"
    if saved.get("leaves") != now.get("leaves"):
        return "its adapter differs (other layers of the same modules)"
    return "" if saved.get("token_rows") == now.get("token_rows") else "its adapter differs (other token rows)"


def _compare_value(what: str) -> Any:
    def compare(saved: Any, now: Any) -> str:
        known = saved is not None and now is not None
        return f"its {what} is {saved}, now {now}" if known and saved != now else ""

    return compare


def _compare_data(saved: Any, now: Any) -> str:
    known = saved is not None and now is not None
    return "its training rows or their order differ" if known and saved != now else ""


_COMPARISONS = (
    ("method", _compare_value("method")),
    ("base", _compare_base),
    ("model", _compare_model),
    ("lora", _compare_lora),
    ("optimizer", _compare_value("optimiser")),
    ("data_sha256", _compare_data),
)


def _names(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "nothing else"
