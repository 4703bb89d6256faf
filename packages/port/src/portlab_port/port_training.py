"""Batch, steps, optimiser, schedule, precision, length: arithmetic as the GPU trainers do it."""

import math
from typing import Any

from portlab_port.build import Build
from portlab_port.settings import Setting

_ADAMW = (
    "adamw", "adamw_torch", "adamw_hf", "adamw_torch_fused", "adamw_apex_fused", "adamw_anyprecision",
    "adamw_torch_xla", "adamw_torch_npu_fused", "adamw_torch_4bit", "adamw_torch_8bit", "adamw_8bit", "adamw_bnb_8bit",
    "paged_adamw", "paged_adamw_8bit", "paged_adamw_32bit", "adamw_32bit",
)  # fmt: skip
_PLAIN_ADAMW = ("adamw", "adamw_torch", "adamw_hf")
NO_CLIP = 1e9  # a norm that no gradient reaches: a recipe always clips
# transformers' shapes that end at zero, and ours.
_SHAPES = {
    "linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant",
    "inverse_sqrt": "inverse_sqrt", "cosine_with_min_lr": "cosine", "warmup_stable_decay": "wsd",
    "cosine_with_restarts": "cosine",
}  # fmt: skip


def batch(build: Build) -> None:
    """Global batch: per device x devices x accumulation, in examples."""
    per_device = build.find("per_device_train_batch_size")
    accumulate = build.find("gradient_accumulation_steps")
    devices, where = _devices(build)
    if per_device is None or accumulate is None:
        return
    for setting in (per_device, accumulate):
        if setting.value < 1:
            build.fault(f"{setting.key} {setting.value} ({setting.where}) must be 1 or more")
            return
    packed = _examples_per_row(build)
    part = max(round(per_device.value * devices * packed), 1)
    total = part * accumulate.value
    became = build.set("batch_size", total)
    parts = build.set("accumulate", accumulate.value)
    rows = f"{total} examples" if packed == 1 else f"{total} examples, {packed:g} to a packed row"
    unit = "device" if devices == 1 else "devices"
    build.sums.append(
        f"batch_size: {rows} = {per_device.value} per device x {devices} {unit} ({where}) x {accumulate.value} "
        "accumulated"
    )
    build.note(per_device, became=became)
    build.note(accumulate, became=parts)
    build.note(build.find("devices"), became=became)


def _devices(build: Build) -> tuple[int, str]:
    found, fsdp = build.find("devices"), build.find("fsdp_config")
    if fsdp is not None and isinstance(fsdp.value, dict) and fsdp.value.get("xla_fsdp_v2") is True:
        return 1, "under XLA's FSDPv2 it counts the rows of all devices"
    if build.devices is not None:
        return _with_rows_of_their_own(build, build.devices, "--devices")
    if found is not None and found.value >= 1:
        return _with_rows_of_their_own(build, found.value, found.key)
    return 1, "none named: 1 assumed, give --devices if there were more"


def _with_rows_of_their_own(build: Build, devices: int, where: str) -> tuple[int, str]:
    """Devices that tensor or context parallelism joins see the same rows."""
    joined = 1
    for setting in build.gpu.settings:
        if setting.name in ("tensor_parallel_size", "context_parallel_size") and isinstance(setting.value, int):
            joined *= max(setting.value, 1)
            build.note(
                setting, fate="changes", why="devices that share rows count once in the batch; here mesh.tp is chosen"
            )
    if joined == 1:
        return devices, where
    if devices % joined:
        build.fault(f"{devices} devices ({where}) are no multiple of the {joined} that share rows")
    return max(devices // joined, 1), f"{where} {devices}, {joined} of which share rows"


def _examples_per_row(build: Build) -> float:
    """Examples in a row of the GPU run: 1, or what is known of its packing."""
    setting = build.find("packing")
    if setting is None:
        return 1.0
    if not setting.value:
        build.note(setting, why="rows are packed all the same, into one planned shape: a packed example never sees "
                   "another, so that the loss is that of padded rows")  # fmt: skip
        return 1.0
    number = build.answers.examples_per_row
    became = build.set("pack", True)
    if number is not None:
        build.note(setting, became=became)
        return number
    why = ("the GPU's batch counts packed rows and ours counts examples: give the mean number of examples in a row "
           "with --examples-per-row")  # fmt: skip
    build.refuse(setting, why, accepted=f"{became}; batch_size as if a row were one example")
    return 1.0


def steps(build: Build) -> None:
    """Optimiser steps: max_steps, or epochs of a known number of rows."""
    limit, epochs = build.find("max_steps"), build.find("num_train_epochs")
    if limit is not None and limit.value > 0:
        build.note(limit, became=build.set("steps", limit.value))
        build.note(epochs, fate="drops", why="max_steps is given, and overrides epochs")
        return
    build.note(limit, fate="carries", why="not in use there: epochs decide")
    if epochs is None:
        if not any(s.name in ("max_steps", "num_train_epochs") for s in build.gpu.settings):
            build.fault("neither steps nor epochs are given: give --set max_steps=N")
        return
    if epochs.value <= 0:
        build.fault(f"{epochs.key} {epochs.text} ({epochs.where}) must be above 0")
        return
    each = steps_of_epoch(build)
    if each is None:
        build.note(epochs)
        build.fault(
            f"{epochs.key} {epochs.value:g} of a data set whose size is not known: give the rows of its training split "
            "with --rows N"
        )
        return
    total = max(math.ceil(epochs.value * each), 1)
    build.note(epochs, became=build.set("steps", total))
    build.sums.append(
        f"steps: {total} = {epochs.value:g} epochs x {each} steps of {build.fields['batch_size']} examples, "
        f"from {build.answers.rows} rows{_passes(build, total, epochs.value)}"
    )


def _passes(build: Build, total: int, epochs: float) -> str:
    """How often the rows are seen, where full batches make it more than the epochs."""
    seen = total * build.fields["batch_size"] / (build.answers.rows or 1)
    return (
        "" if abs(seen / epochs - 1) < 0.01 else f"; every batch is full here, so that they are seen {seen:.3g} times"
    )


def steps_of_epoch(build: Build) -> int | None:
    """Steps of an epoch as transformers counts them: batches rounded up, then updates rounded up."""
    rows, total = build.answers.rows, build.fields.get("batch_size")
    if rows is None or total is None:
        return None
    accumulate = build.fields["accumulate"]
    drop = build.value("dataloader_drop_last", False) is True
    batches = (math.floor if drop else math.ceil)(rows / (total // accumulate))
    return max(math.ceil(batches / accumulate), 1)


def optimizer(build: Build) -> None:
    """Optimiser, its numbers and the clip."""
    setting = build.find("optim")
    name = "adamw"
    if setting is not None:
        kind = setting.value.lower().removeprefix("optimizernames.")
        if kind == "adafactor":
            name = "adafactor"
            build.note(
                setting, fate="carries", became=build.set("optimizer.name", name), why="the same, with an absolute rate"
            )
        elif kind in _ADAMW:
            became = build.set("optimizer.name", name)
            plain = kind in _PLAIN_ADAMW
            build.note(setting, fate="carries" if plain else None, became=became, why="the same" if plain else None)
        else:
            build.refuse(
                setting, "AdamW and Adafactor are the optimisers here", accepted=build.set("optimizer.name", name)
            )
    build.carry("learning_rate", "optimizer.learning_rate")
    if not any(s.name == "learning_rate" for s in build.gpu.settings):
        build.fault("no learning rate is given: give --set learning_rate=VALUE")
    build.carry("weight_decay", "optimizer.weight_decay")
    build.carry("seed", "seed")
    for key, target in (("adam_beta1", "b1"), ("adam_beta2", "b2"), ("adam_epsilon", "eps")):
        if name == "adamw":
            build.carry(key, f"optimizer.{target}")
        else:
            build.note(build.find(key), fate="drops", why="AdamW's; Adafactor has none")
    clip = build.find("max_grad_norm")
    if clip is not None and clip.value <= 0:
        build.note(clip, fate="changes", became=build.set("optimizer.clip_norm", NO_CLIP),
                   why="0 is no clip there; a recipe always clips, here at a norm that is never reached")  # fmt: skip
    else:
        build.carry("max_grad_norm", "optimizer.clip_norm")


def schedule(build: Build) -> None:
    """Shape of the learning rate, and warm-up."""
    setting = build.find("lr_scheduler_type")
    if setting is None:
        return
    kind = setting.value.lower().removeprefix("schedulertype.")
    options = build.find("lr_scheduler_kwargs")
    given: dict[str, Any] = options.value if options is not None and isinstance(options.value, dict) else {}
    shape = _SHAPES.get(kind)
    extra = set(given) - {"min_lr", "min_lr_rate", "min_lr_ratio", "num_decay_steps", "num_stable_steps", "num_cycles",
                          "decay_type", "num_warmup_steps"}  # fmt: skip
    cycles = given.get("num_cycles", 1 if kind == "cosine_with_restarts" else 0.5)
    if shape is None or extra or cycles != (1 if kind == "cosine_with_restarts" else 0.5):
        became = build.set("optimizer.schedule", "cosine")
        if build.refuse(setting, "no such shape here: constant, linear, cosine, wsd, inverse_sqrt", accepted=became):
            _last_rate(build, given)
            _warm_up(build, setting)
        build.note(options, fate="cannot")
        return
    became = build.set("optimizer.schedule", shape)
    if shape == "wsd":
        became = f"{became}, {_decay(build, given)}"
    if shape in ("linear", "cosine", "wsd"):
        became = f"{became}, {_last_rate(build, given)}"
    same = kind in ("linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt", "cosine_with_min_lr")
    why = None if same else "one cycle is a cosine" if kind == "cosine_with_restarts" else "ours decays along a line"
    build.note(setting, fate=None if same else "changes", became=became, why=why)
    build.note(options, became="optimizer.final_fraction" if given else "")
    _warm_up(build, setting)


def _last_rate(build: Build, given: dict[str, Any]) -> str:
    peak = build.value("learning_rate")
    share = given.get("min_lr_rate", given.get("min_lr_ratio", 0.0))
    if given.get("min_lr") and peak:
        share = float(given["min_lr"]) / peak
    ratio = build.find("cosine_min_lr_ratio")
    if ratio is not None:
        share = ratio.value
    became = build.set("optimizer.final_fraction", float(share or 0.0))
    build.note(ratio, became=became)
    return became


def _decay(build: Build, given: dict[str, Any]) -> str:
    total = build.fields.get("steps")
    decay = given.get("num_decay_steps")
    if decay is None or not total:
        build.fault("lr_scheduler_kwargs of warmup_stable_decay must hold num_decay_steps: give it with --set")
        return "optimizer.decay_fraction"
    return build.set("optimizer.decay_fraction", min(int(decay) / total, 1.0))


def _warm_up(build: Build, scheduler: Setting) -> None:
    given, ratio = build.find("warmup_steps"), build.find("warmup_ratio")
    total = build.fields.get("steps")
    if scheduler.value == "constant":
        became = build.set("optimizer.warmup_steps", 0)
        for setting in (given, ratio):
            off = setting is None or setting.value == 0
            why = "none" if off else "transformers' constant has no warm-up, whatever is asked for"
            build.note(setting, fate="carries" if off else "changes", became=became, why=why)
        return
    if total is None:
        for setting in (given, ratio):
            build.note(setting)
        return
    axolotl = build.gpu.style == "axolotl"
    if given is not None and (given.value > 0 or axolotl):
        count = int(given.value) if given.value >= 1 else math.ceil(given.value * total)
        by = given
        build.note(ratio, fate="drops", why="steps of warm-up are given, and override the ratio")
    elif ratio is not None:
        # Axolotl rounds down, transformers up.
        count = int(ratio.value * total) if axolotl else math.ceil(ratio.value * total)
        by = ratio
        build.note(given, why="0: the ratio decides")
    elif given is not None:
        count, by = 0, given
    else:
        count, by = min(int(0.03 * total), 100), None  # Axolotl's default
    if axolotl and count == 1:
        count = 2  # so does Axolotl
    if count >= total:
        build.fault(f"the warm-up of {count} steps is not shorter than the run of {total}")
    became = build.set("optimizer.warmup_steps", count)
    if by is None:
        build.sums.append(
            f"optimizer.warmup_steps: {count}, 3% of the steps and at most 100, as Axolotl has by default"
        )
    elif by is ratio or (by is given and 0 < by.value < 1):
        build.sums.append(f"optimizer.warmup_steps: {count} = {by.value:g} of {total} steps")
    build.note(by, became=became)


def precision(build: Build) -> None:
    """bfloat16 wherever the GPU had 16 bits; float32 only if the file says so everywhere."""
    bf16, fp16, dtype = build.find("bf16"), build.find("fp16"), build.find("dtype")
    if bf16 and fp16 and bf16.value and fp16.value and not bf16.default_of:
        build.fault(f"{bf16.key} and {fp16.key} are both true ({bf16.where}); keep one of them")
    half = any(setting is not None and setting.value for setting in (bf16, fp16))
    said = "" if dtype is None else dtype.value.lower().removeprefix("torch.")
    full = said == "float32" and not half and bf16 is not None and bf16.value is False
    became = build.set("dtype", "float32" if full else "auto")
    for setting in (bf16, fp16):
        if setting is None:
            continue
        if setting.value:
            build.note(setting, became=became, fate="carries" if setting is bf16 else None)
        else:
            build.note(setting, fate="carries", why="not in use there, nor here")
    if dtype is not None:
        half_float = said in ("float16", "fp16", "half")
        why = "float16 has no place on TPU: bfloat16 instead" if half_float else None
        same = said in ("bfloat16", "bf16", "auto") or full
        build.note(dtype, became=became, why=why, fate="carries" if same else None)
    _remat(build)


def _remat(build: Build) -> None:
    checkpointing, offload = build.find("gradient_checkpointing"), build.find("activation_offloading")
    if offload is not None and offload.value:
        became = build.set("remat", "offload")
        build.note(offload, fate="carries", became=became)
    else:
        became = ""
        build.note(offload, fate="carries", why="not in use there, nor here")
    if checkpointing is None:
        return
    value = str(checkpointing.value).lower()
    if value in ("false", "none", "no", "0"):
        became = became or build.set("remat", "none")
        build.note(checkpointing, fate="carries", became=became, why="nothing is computed again")
        return
    became = became or build.set("remat", "block")
    unsloth = value in ("unsloth", "offload", "offload_disk")
    why = (
        "whole layers are computed again; remat: offload also moves their inputs to the host, as this does"
        if unsloth
        else None
    )
    build.note(checkpointing, became=became, why=why)


def sequence(build: Build) -> None:
    """Longest row, and what becomes of longer ones."""
    setting = build.find("max_length")
    if setting is None:
        if not any(s.name == "max_length" for s in build.gpu.settings):
            build.fault("no longest row is given: give it with --set max_length=N")
        return
    if setting.value is None:
        build.refuse(setting, "rows without a limit have no planned shape; give --set max_length=N",
                     accepted=build.set("max_length", 1024))  # fmt: skip
        return
    if setting.value < 8:
        build.fault(f"{setting.key} {setting.value} ({setting.where}) must be 8 or more")
        return
    build.note(setting, became=build.set("max_length", setting.value))
    long_rows = build.find("long_rows")
    if long_rows is not None:
        kind = "drop" if long_rows.value == "drop" else "error"
        same = long_rows.value in ("drop", "raise")
        build.note(long_rows, fate="carries" if same else "changes", became=build.set("too_long", kind),
                   why="longer rows are left out" if kind == "drop" else None)  # fmt: skip
    else:
        build.set("too_long", "error")
