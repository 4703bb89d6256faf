"""TRL's own SFTTrainer beside our trainers: the same rows in the same order, by bench/peers/trl_runner.py.

It is no trainer of recipes: it takes a work folder with the batches as tokens, and knows one way to train. What a
recipe asks beyond that is refused, since a comparison of different work is none.

    settings.json     what is the same for every contender
    batches.jsonl     a line for each step: a list of rows [token ids, loss flags]
    adapter.npz       initial values, NAME.a (in, rank) and NAME.b (rank, out)
    trl.json          what it measured: losses, step_seconds, first_step_at, peak_memory_bytes, versions
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from portlab_bench.records import read_record
from portlab_bench.train_figures import run_findings, steady
from portlab_bench.train_schema import BackendRun, StepTime
from portlab_spec.data.tokens import Row
from portlab_spec.errors import UserError
from portlab_spec.files import new_file, read_json, sha256_json, write_json, write_text
from portlab_spec.models import GemmaConfig, plan_adapter
from portlab_spec.recipe import Recipe

RUNNER = Path("bench/peers/trl_runner.py")
RESULT = "trl.json"
# What the runner can do, by the recipe's keys.
ABLE: dict[str, Any] = {
    "method": "lora",
    "lora.quantize": "none",
    "lora.use_rslora": False,
    "lora.dropout": 0.0,
    "lora.rank_pattern": {},
    "lora.alpha_pattern": {},
    "lora.start_from": None,
    "lora.train_control_rows": False,
    "optimizer.name": "adamw",
    "optimizer.schedule": "constant",
    "optimizer.warmup_steps": 0,
    "eval_every": 0,
    "z_loss": 0.0,
}


class Work(NamedTuple):
    """What a recipe trains on.

    Attributes:
        model: folder.
        rows: of the training data.
        batches: rows of each step.
    """

    model: Path
    rows: Sequence[Row]
    batches: Sequence[Sequence[Row]]


class Measured(BaseModel):
    """`trl.json`."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    losses: list[float]
    step_seconds: list[Annotated[float, Field(gt=0)]]
    first_step_at: float
    peak_memory_bytes: int
    versions: dict[str, str]


def require_able(recipe: Recipe) -> None:
    """Refuse what the runner would do in another way.

    Raises:
        UserError: names the keys and the values that they must have.
    """
    raw = recipe.model_dump(mode="json")
    wrong = [key for key, value in ABLE.items() if _value(raw, key) != value]
    if wrong:
        fix = " ".join(f"--set {key}={json.dumps(ABLE[key])}" for key in wrong)
        raise UserError(
            f"TRL as it is cannot do what the recipe asks in {', '.join(wrong)}", where="--backends trl", fix=fix
        )


def _value(raw: dict[str, Any], key: str) -> Any:
    for part in key.split("."):
        raw = raw[part]
    return raw


def write_work(folder: Path, recipe: Recipe, work: Work, device: str, micro_batch: int) -> None:
    """Write the runner's work folder.

    Args:
        folder: new.
        recipe: that `require_able` accepts.
        work: its rows.
        device: "cpu" or "cuda".
        micro_batch: rows that TRL computes at a time.

    Raises:
        UserError: the micro-batch does not divide the batch.
    """
    if recipe.batch_size % micro_batch:
        raise UserError(f"{micro_batch} does not divide the batch of {recipe.batch_size} rows", where="--trl-rows")
    dtype = recipe.dtype if recipe.dtype != "auto" else "float32" if device == "cpu" else "bfloat16"
    o = recipe.optimizer
    settings = {
        "model": str(work.model),
        "device": device,
        "dtype": dtype,
        "rank": recipe.lora.rank,
        "alpha": recipe.lora.alpha,
        "targets": recipe.lora.targets,
        "learning_rate": o.learning_rate,
        "b1": o.b1,
        "b2": o.b2,
        "eps": o.eps,
        "weight_decay": o.weight_decay,
        "clip_norm": o.clip_norm,
        "micro_batch": {"trl": micro_batch},
    }
    write_json(folder / "settings.json", settings)
    lines = (json.dumps([[list(r.ids), [int(flag) for flag in r.loss]] for r in batch]) for batch in work.batches)
    write_text(folder / "batches.jsonl", "".join(f"{line}\n" for line in lines))
    with new_file(folder / "adapter.npz") as stream:
        np.savez(stream, allow_pickle=False, **_initial(recipe, work.model))


def _initial(recipe: Recipe, model: Path) -> dict[str, np.ndarray]:
    """PEFT's initialisation: a uniform in ±1/sqrt(in), b zero, so that the first step is the base's."""
    rng = np.random.default_rng(recipe.seed)
    values: dict[str, np.ndarray] = {}
    for leaf in plan_adapter(GemmaConfig.load(model), recipe.lora):
        if leaf.experts:
            raise UserError("TRL as it is adapts no experts", where="--backends trl", fix="Leave it out")
        bound = 1 / math.sqrt(leaf.into.size)
        for module in leaf.modules(""):
            values[f"{module}.a"] = rng.uniform(-bound, bound, (leaf.into.size, leaf.rank)).astype(np.float32)
            values[f"{module}.b"] = np.zeros((leaf.rank, leaf.out.size), np.float32)
    return values


def read_work(base: BackendRun, folder: Path, recipe: Recipe, work: Work, started: float, warm_up: int) -> BackendRun:
    """Fill a record from what the runner left.

    Args:
        base: what is known of the run.
        folder: the work folder.
        recipe, work: what was trained.
        started: Unix time at which the process began.
        warm_up: steps that count in no rate.

    Raises:
        UserError: the result is missing or is not what the runner writes.
    """
    file = folder / RESULT
    found = read_record(file, Measured, "result of TRL's runner", "Repeat the run")
    if len(found.step_seconds) != len(found.losses):
        raise UserError("has step times and losses of different numbers", where=str(file), fix="Repeat the run")
    device = read_json(folder / "settings.json", "TRL's settings")["device"]
    times = [
        StepTime(step=number, seconds=seconds, examples=len(rows), tokens=sum(len(row.ids) for row in rows))
        for number, (seconds, rows) in enumerate(zip(found.step_seconds, work.batches, strict=False), start=1)
    ]
    rates = steady(times, max(warm_up, 1))
    return base.model_copy(
        update={
            "device": {"platform": "cpu" if device == "cpu" else "gpu", "kind": device, "count": 1},
            "versions": found.versions,
            "recipe_digest": sha256_json(recipe.model_dump(mode="json")),
            "counts": counts(work),
            "first_step_seconds": max(found.first_step_at - started, 0.0),
            "steady": rates,
            "loss": tuple(found.losses),
            "peak_rss_bytes": found.peak_memory_bytes if device == "cpu" else None,
            "peak_device_bytes": found.peak_memory_bytes if device != "cpu" else None,
            "findings": run_findings(rates, times, recipe.steps, found.losses, warm_up),
        }
    )


def counts(work: Work) -> dict[str, int]:
    """As trainers report them: tokens of the training rows, of the whole run, supervised ones."""
    return {
        "train_rows": sum(len(row.ids) for row in work.rows),
        "run": sum(len(row.ids) for batch in work.batches for row in batch),
        "supervised": sum(sum(row.loss) for batch in work.batches for row in batch),
    }
