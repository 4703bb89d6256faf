"""Recipes in YAML: which dialect, and which keys."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import yaml

from portlab_port.collect import Entry, complete
from portlab_port.dialects import DIALECTS
from portlab_port.dialects.calls import AUTO_MODEL
from portlab_port.dialects.table import Dialect, Key
from portlab_port.settings import GpuRecipe
from portlab_spec.errors import UserError

# Mappings whose keys are settings themselves: Unsloth's files, and those that people write for scripts of their own.
SECTIONS = (
    "model", "training", "train", "lora", "peft", "data", "dataset", "sft", "args", "trainer", "quantization",
    "logging",
    "optimizer", "output", "eval", "inference", "generation", "export",
)  # fmt: skip
# Short names that mean something inside a section alone.
_WITHIN = {
    "lora": {"rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout", "target": "target_modules",
             "targets": "target_modules"},
    "model": {"name": "model_name", "model": "model_name"},
    "dataset": {"name": "dataset_name", "path": "dataset_name", "split": "dataset_split"},
    "data": {"name": "dataset_name", "path": "dataset_name", "split": "dataset_split"},
    "training": {"epochs": "num_train_epochs", "lr": "learning_rate", "scheduler": "lr_scheduler_type"},
}  # fmt: skip


def read_yaml(text: str, source: str, style: str | None = None, by_hand: Mapping[str, Any] | None = None) -> GpuRecipe:
    """Settings of a YAML recipe, with its dialect's defaults.

    Args:
        text: the file.
        source: its name, for messages.
        style: a dialect's name; None tells it by the keys.
        by_hand: values in place of the file's.

    Raises:
        UserError: not YAML, no mapping, no dialect's recipe.
    """
    try:
        loader = _UniqueKeys(text)
        node = loader.get_single_node()
        raw = None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        raise UserError(f"is not YAML ({error})", where=source, fix="Mend the file") from None
    except RecursionError:
        raise UserError("is nested too deep", where=source, fix="Mend the file") from None
    if not isinstance(raw, dict) or not raw:
        raise UserError("is no recipe: a mapping of keys to values is expected", where=source, fix="Check the path")
    raw = {str(key): value for key, value in raw.items()}
    dialect = DIALECTS[style] if style else detect(raw, source)
    lines = _lines(node)

    def placed(entry: Entry) -> Entry:
        first, _, second = entry.key.partition(".")
        line = lines.get(f"{first}.{second}") or lines.get(first.partition("[")[0])
        return entry if line is None else replace(entry, where=f"{source}:{line}")

    entries = map(placed, _entries(raw, dialect, source))
    return complete(dialect.style, source, entries, dialect, dialect.keys, by_hand or {})


def _lines(node: yaml.Node | None) -> dict[str, int]:
    """Where the keys of a file stand, and those of its sections; keys behind `<<` stand where they are written."""
    lines: dict[str, int] = {}
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        lines[str(key.value)] = key.start_mark.line + 1
        for inner, _ in value.value if isinstance(value, yaml.MappingNode) else ():
            lines[f"{key.value}.{inner.value}"] = inner.start_mark.line + 1
    return lines


def detect(raw: dict[str, Any], source: str) -> Dialect:
    """The dialect of a YAML recipe, by the keys that only one has, then by how many keys it knows.

    Raises:
        UserError: no dialect knows two of the keys.
    """
    keys = set(raw)
    for section in SECTIONS:
        if isinstance(raw.get(section), dict):
            keys |= set(map(str, raw[section]))

    if "distributed_type" in keys or "zero_optimization" in keys:
        what = "accelerate" if "distributed_type" in keys else "DeepSpeed"
        fix = "Give the recipe that runs under it; its number of processes is --devices"
        raise UserError(f"is a configuration of {what}, no recipe", where=source, fix=fix)

    def score(dialect: Dialect) -> tuple[int, int]:
        return len(dialect.marks & keys), sum(dialect.find(key) is not None for key in keys)

    best = max(DIALECTS.values(), key=score)
    marks, known = score(best)
    if known < 2 and not marks:
        raise UserError(
            "is no fine-tuning recipe that is known: TRL, Axolotl, LLaMA-Factory and Unsloth have none of its keys",
            where=source,
            fix="Check the file, or say which with --style",
        )
    return best


def _entries(raw: dict[str, Any], dialect: Dialect, source: str) -> Iterator[Entry]:
    for key, value in raw.items():
        if key in SECTIONS and isinstance(value, dict):
            for inner, inner_value in value.items():
                name = _WITHIN.get(key, {}).get(str(inner), str(inner))
                yield Entry(f"{key}.{inner}", inner_value, source, dialect.find(name))
        elif key == "datasets" and isinstance(value, list) and dialect.style == "axolotl":
            yield from _axolotl_datasets(value, source)
        elif key == "dataset_mixture" and isinstance(value, dict):
            yield from _mixture(value, source)
        elif key == "model_init_kwargs" and isinstance(value, dict):
            for inner, inner_value in value.items():
                yield Entry(f"{key}.{inner}", inner_value, source, AUTO_MODEL.get(str(inner)))
        elif key == "dataset_mixer" and isinstance(value, dict):
            yield Entry(key, list(value), source, Key("dataset"))
            for name, share in value.items():
                yield Entry(f"{key}.{name}", share, source, Key("mix_strategy", _share))
        else:
            yield Entry(key, value, source, dialect.find(key))


def _axolotl_datasets(datasets: list[Any], source: str) -> Iterator[Entry]:
    paths = [item.get("path") if isinstance(item, dict) else item for item in datasets]
    yield Entry("datasets", paths, source, Key("dataset"))
    within = {
        "path": None, "type": Key("dataset_format"), "ds_type": Key("dataset_format"), "split": Key("dataset_split"),
        "name": Key("dataset_config"), "data_files": Key("dataset_dir"), "chat_template": Key("chat_template"),
        "train_on_inputs": Key("train_on_inputs"), "revision": Key("dataset_config"),
        "train_on_eos": Key("eot_tokens"), "roles_to_train": Key("train_on_inputs", _other_roles),
    }  # fmt: skip
    for index, item in enumerate(datasets):
        for name, value in item.items() if isinstance(item, dict) else ():
            key = str(name)
            prefixed = key.startswith(("field", "message", "roles", "drop_system"))
            if key != "path":
                meaning = within.get(key) or (Key("message_mapping") if prefixed else None)
                yield Entry(f"datasets[{index}].{key}", value, source, meaning)


def _mixture(mixture: dict[str, Any], source: str) -> Iterator[Entry]:
    """alignment-handbook's `dataset_mixture`: one data set in it may be ported, several are a mixture."""
    within = {
        "split": Key("dataset_split"), "config": Key("dataset_config"), "columns": Key("message_mapping"),
        "weight": Key("mix_strategy", _share),
    }  # fmt: skip
    for key, value in mixture.items():
        if key == "datasets" and isinstance(value, list):
            items = [item for item in value if isinstance(item, dict)]
            yield Entry(
                "dataset_mixture.datasets",
                list(dict.fromkeys(str(item.get("id")) for item in items)),
                source,
                Key("dataset"),
            )
            for index, item in enumerate(items):
                for name, inner_value in item.items():
                    inner = str(name)
                    if inner != "id":
                        yield Entry(
                            f"dataset_mixture.datasets[{index}].{inner}", inner_value, source, within.get(inner)
                        )
        else:
            known = {"test_split_size": Key("val_set_size"), "seed": Key("message_mapping")}
            yield Entry(f"dataset_mixture.{key}", value, source, known.get(key))


def _share(value: Any) -> Any:
    """All rows of a data set, or a part of them."""
    return None if value == 1 else value


def _other_roles(value: Any) -> bool:
    """Does anyone but the assistant's words count?"""
    roles = value if isinstance(value, list) else [value]
    return any(role not in ("assistant", "gpt", "model") for role in roles)


class _UniqueKeys(yaml.SafeLoader):
    """A loader for which a key that stands twice is an error: YAML's own takes the last one, without a word."""


def _mapping(loader: _UniqueKeys, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if isinstance(key, str | int | float | bool) and key in seen and key != "<<":
            raise yaml.constructor.ConstructorError(
                None, None, f"{key!r} stands twice, the second time", key_node.start_mark
            )
        if isinstance(key, str | int | float | bool):
            seen.add(key)
    return yaml.SafeLoader.construct_mapping(loader, node, deep)


def _construct(loader: _UniqueKeys, node: yaml.MappingNode) -> Iterator[dict[Any, Any]]:
    data: dict[Any, Any] = {}
    yield data
    data.update(_mapping(loader, node))


_UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct)
