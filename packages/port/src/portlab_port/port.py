"""A GPU recipe -> a Portlab recipe and a note on every setting: pure, no files."""

from collections.abc import Callable, Iterable
from typing import Any

from pydantic import ValidationError

from portlab_port import port_data, port_model, port_training
from portlab_port.build import Answers, Build, Note, Ported
from portlab_port.rules import RULES
from portlab_port.settings import Computed, GpuRecipe, Setting
from portlab_spec.errors import UserError
from portlab_spec.recipe import Recipe, invalid

_STEPS: tuple[Callable[[Build], None], ...] = (
    port_model.method,
    port_model.model,
    port_model.quantize,
    port_model.lora,
    port_training.batch,
    port_training.steps,
    port_training.optimizer,
    port_training.schedule,
    port_training.precision,
    port_training.sequence,
    port_data.data,
    port_data.mask,
    port_data.watch,
)
# Computed values of these harm nothing: what they decide is decided otherwise here.
_HARMLESS = {
    "bf16", "fp16", "dtype", "report_to", "eval_strategy", "save_strategy", "dataset_split", "dataset_config",
    "eval_dataset", "formatting_func", "dataset_format", "metric_for_best_model", "val_set_size", "logging_steps",
    "save_steps", "eval_steps", "save_total_limit", "dataset_text_field", "task_type", "start_from_tokenizer",
}  # fmt: skip


def port(gpu: GpuRecipe, devices: int | None = None, answers: Answers | None = None) -> Ported:
    """Port a recipe.

    Args:
        gpu: what was read.
        devices: GPUs that it ran on; None takes the number from the recipe, or 1.
        answers: what the file cannot say, and what may be left out.

    Raises:
        UserError: something is missing, contradicts itself, or changes what is learnt and cannot be said; every such
            fault is named in one line.
    """
    build = Build(gpu, devices, answers or Answers())
    _check_computed(build)
    for step in _STEPS:
        step(build)
    _rest(build)
    if build.faults:
        raise UserError("; ".join(build.faults), where=gpu.source, fix="Nothing was written")
    try:
        recipe = Recipe.model_validate(nested(build.fields))
    except ValidationError as error:
        raise invalid(error, gpu.source) from None
    return Ported(recipe, tuple(build.fields), _sorted(build.notes), gpu.unknown, tuple(build.sums))


def nested(fields: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys as mappings."""
    tree: dict[str, Any] = {}
    for key, value in fields.items():
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


def _check_computed(build: Build) -> None:
    """Computed values: harmless ones count as not said, others are faults."""
    for setting in build.gpu.settings:
        if not isinstance(setting.value, Computed):
            continue
        if setting.name in _HARMLESS or RULES[setting.name].computed:
            build.note(setting, why=f"computed by the script ({setting.value.why}); {RULES[setting.name].why}")
        elif setting.name == "dataset" and build.answers.data:
            build.note(setting, became=f"data: {build.answers.data}", why="given with --data")
        else:
            build.fault(
                f"{setting.where}: {setting.key} is {setting.value}, which only running it would tell "
                f"({setting.value.why}): give it with --set {setting.key}=VALUE"
            )
            build.note(setting)


def _rest(build: Build) -> None:
    """What no step has taken: the rule says all."""
    for setting in build.left():
        rule = RULES[setting.name]
        if rule.fate == "changes" and setting.value is False:
            build.note(setting, fate="carries", why="not in use there, nor here")
        elif rule.fate != "cannot":
            build.note(setting)
        elif _is_off(setting.value, rule.off):
            build.note(setting, fate="carries", became="", why="not in use there, and never here")
        elif build.accepts(setting) or not rule.loss:
            build.note(setting)
        else:
            build.fault(
                f"{setting.key}: {setting.text} ({setting.where}): {rule.why}; remove it, or --accept {setting.key}"
            )


def _is_off(value: object, off: Iterable[object]) -> bool:
    # 1 == True: a number is no switch.
    return any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in off) or value == 0


def _sorted(notes: list[Note]) -> tuple[Note, ...]:
    place = {name: number for number, name in enumerate(RULES)}

    def order(note: Note) -> tuple[Any, ...]:
        setting: Setting = note.setting
        return place[setting.name], setting.key, setting.text

    return tuple(sorted(notes, key=order))
