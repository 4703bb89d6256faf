"""Data set, mask, evaluation, checkpoints and trackers."""

import math
from pathlib import PurePath

from portlab_port.build import Build
from portlab_port.port_training import steps_of_epoch
from portlab_port.settings import Setting

_FILES = (".json", ".jsonl", ".ndjson", ".parquet", ".arrow", ".gz")
_NEVER = ("no", "none", "false", "")
# What axolotl and others call the rows; the shapes that can be imported stand in docs/data.md.
_READ = ("chat_template", "sharegpt", "messages", "json", "jsonl", "parquet", "pygmalion")


def data(build: Build) -> None:
    """Data set: a path on this machine."""
    setting = build.find("dataset")
    chosen = build.answers.data
    build.set("name", build.answers.name or _slug(PurePath(build.gpu.source).stem))
    if setting is None:
        if chosen is None and not any(s.name == "dataset" for s in build.gpu.settings):
            build.fault("no data set is named: give a file or folder with --data")
        elif chosen is not None:
            build.set("data", chosen)
    else:
        _dataset(build, setting, chosen)
    for other in build.gpu.settings:
        if other.name == "dataset_split" and "[" in str(other.value):
            build.note(other, became="data", why="take those rows out of the file")
        if other.name == "dataset_format" and isinstance(other.value, str) and other.value not in _READ:
            build.note(
                other, why=f"rows of that type must be turned into one of the known shapes: {other.value} is none"
            )


def _dataset(build: Build, setting: Setting, chosen: str | None) -> None:
    names = [setting.value] if isinstance(setting.value, str) else [str(n) for n in setting.value or () if n]
    if len(names) == 1 and "," in names[0]:
        names = [part.strip() for part in names[0].split(",") if part.strip()]
    if chosen is not None:
        build.note(setting, became=build.set("data", chosen), why="given with --data")
        return
    if not names:
        build.fault(f"{setting.key} ({setting.where}) names no data set: give a file or folder with --data")
        build.note(setting)
        return
    first = names[0]
    local = first.endswith(_FILES) or first.startswith((".", "/", "~"))
    became = build.set("data", first if local else first.rstrip("/").rpartition("/")[2])
    if len(names) > 1:
        build.refuse(setting, "one data set for a run; join the files and give --data", accepted=became)
    elif local:
        build.note(
            setting, fate="carries", became=became, why="the same file, if its rows have one of the known shapes"
        )
    elif "/" in first:
        folder = build.fields["data"]
        why = (
            f"get it once: hf download {first} --repo-type dataset --local-dir {folder}; "
            "toolspec split gives rows their splits"
        )
        build.note(setting, became=became, why=why)
    else:
        build.note(setting, became=became, why="a name that only its trainer knows; give the file with --data")


def mask(build: Build) -> None:
    """Loss on what the assistant says: always."""
    said = False
    for name in ("completion_only_loss", "assistant_only_loss"):
        setting = build.find(name)
        if setting is None:
            continue
        if setting.value:
            said = True
            build.note(setting, fate="carries")
        elif setting.default_of or name == "assistant_only_loss":
            build.note(setting)
        else:
            said = True
            build.refuse(setting, "prompts cannot be learnt, only what the assistant says")
    inputs = build.find("train_on_inputs")
    if inputs is not None:
        said = True
        if inputs.value:
            build.refuse(inputs, "prompts cannot be learnt, only what the assistant says")
        else:
            build.note(inputs, fate="carries")
    history = build.find("mask_history")
    if history is not None:
        if history.value:
            build.refuse(history, 'all answers are learnt; mark earlier ones "supervised": false in the data')
        else:
            build.note(history, fate="carries", why="all answers are learnt")
    if not said:
        build.sums.append(
            "loss: on what the assistant says, calls and stop tokens included; the GPU recipe names no mask, and "
            "TRL learns whole rows then, unless they have a prompt and a completion"
        )


def watch(build: Build) -> None:
    """Evaluation, checkpoints, logs, trackers."""
    total = build.fields.get("steps")
    if total is None:
        return
    _evaluate(build, total)
    _save(build, total)
    logging = build.find("logging_steps")
    if logging is not None and logging.value > 0:
        build.note(logging, became=build.set("log_every", _interval(logging.value, total)))
    report = build.find("report_to")
    if report is not None:
        named = [report.value] if isinstance(report.value, str) else [str(n) for n in report.value or ()]
        kept = tuple(name for name in ("tensorboard", "trackio") if name in named)
        became = build.set("trackers", kept) if kept else ""
        all_kept = set(named) <= {*kept, "none"}
        build.note(report, fate="carries" if all_kept else None, became=became)


def _evaluate(build: Build, total: int) -> None:
    strategy, every, per_epoch = build.find("eval_strategy"), build.find("eval_steps"), build.find("evals_per_epoch")
    kind = "" if strategy is None else str(strategy.value).lower()
    held_out = build.find("val_set_size")
    never = kind in _NEVER and strategy is not None
    count = None
    if per_epoch is not None and per_epoch.value > 0 and not (held_out is not None and held_out.value == 0):
        count = _of_epoch(build, per_epoch, per_epoch.value)
    elif kind == "epoch" and strategy is not None:
        count = _of_epoch(build, strategy, 1)
    elif not never and every is not None and every.value > 0 and (kind == "steps" or build.gpu.style == "axolotl"):
        count = _interval(every.value, total)
    elif kind == "steps":
        count = _interval(build.value("logging_steps", 500), total)
    patience, best = build.find("early_stopping_patience"), build.find("load_best_model_at_end")
    if count is not None and count > total:
        count = None
    if count is None:
        for setting in (strategy, every, per_epoch):
            off = setting is strategy and never
            build.note(setting, fate="carries" if off else "drops", why="no measurement falls into the run")
        for setting in (patience, best):
            if setting is not None and setting.value:
                build.refuse(setting, "needs a monitored loss, and nothing is evaluated within the run")
            else:
                build.note(setting, why="not in use there, nor here")
        return
    became = build.set("eval_every", count)
    for setting in (strategy, every, per_epoch):
        build.note(setting, became=became)
    build.note(held_out)
    if patience is not None and patience.value > 0:
        build.note(patience, became=build.set("patience", patience.value))
    if best is not None and best.value:
        build.note(best, became=build.set("keep_best", True))


def _save(build: Build, total: int) -> None:
    strategy, every, per_epoch = build.find("save_strategy"), build.find("save_steps"), build.find("saves_per_epoch")
    kind = "steps" if strategy is None else str(strategy.value).lower()
    count = None
    if per_epoch is not None and per_epoch.value > 0:
        count = _of_epoch(build, per_epoch, per_epoch.value)
    elif kind == "epoch" and strategy is not None:
        count = _of_epoch(build, strategy, 1)
    elif kind in _NEVER:
        count = total
    elif every is not None and every.value > 0:
        count = _interval(every.value, total)
    became = build.set("save_every", count) if count else ""
    for setting in (strategy, every, per_epoch):
        build.note(setting, became=became)
    limit = build.find("save_total_limit")
    if limit is not None:
        build.note(limit, became=build.set("keep", limit.value) if limit.value >= 1 else "")


def _interval(value: float, total: int) -> int:
    """An interval in steps; below 1 it is a share of the run, as in transformers."""
    return max(math.ceil(value * total) if value < 1 else int(value), 1)


def _of_epoch(build: Build, setting: Setting, times: float) -> int | None:
    """Steps between `times` events of an epoch."""
    each = steps_of_epoch(build)
    if each is None:
        build.fault(f"{setting.key} {setting.text} counts epochs of a data set whose size is not known: give --rows N")
        return None
    return max(math.ceil(each / times), 1)


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in text).strip("-.") or "ported"
