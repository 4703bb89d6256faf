"""The main job: prepare, score, train, score again, export, verify, report.

Each stage leaves its result in the run folder and is skipped when a later run of the same command finds it there:

    <run>/recipe.json  before.json  checkpoints/  after.json  merged/  adapter/  loss.png  report.json
"""

import contextlib
import dataclasses
import datetime
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from portlab_jax import charts, distributed
from portlab_jax.checkpoint import Checkpoints
from portlab_jax.compiled import use_compilation_cache
from portlab_jax.decode import Decoder
from portlab_jax.evaluate import Answers, evaluate, stop_ids
from portlab_jax.export_full import export_full
from portlab_jax.setup import Setup, control_token_ids, initial_state, set_up
from portlab_jax.step import TrainState
from portlab_jax.trackers import require_trackers
from portlab_jax.trainer import Trained, train
from portlab_spec.assets import resolve_model
from portlab_spec.conversation import Conversation
from portlab_spec.data import load_dataset
from portlab_spec.data.tokens import Row, tokenize
from portlab_spec.errors import CheckFailed, UserError
from portlab_spec.files import read_json, require_free_space, write_json
from portlab_spec.formats import Format, find_format
from portlab_spec.models import param_table
from portlab_spec.models.targets import describe
from portlab_spec.progress import bar
from portlab_spec.recipe import Recipe
from portlab_spec.report import Evaluation, Report, Seconds, peak_rss_bytes, versions
from portlab_spec.tokenizer import Tokenizer

Say = Callable[[str], None]

STAMP = "recipe.json"  # a folder that holds it is a run


@dataclasses.dataclass(frozen=True)
class Stage:
    """A scored model: what it said, and how long that took when it was computed."""

    answers: Answers
    seconds: float


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the main job shows at its end."""

    report: Report
    example: Conversation
    before: str
    after: str


def run_folder(recipe: Recipe, out: Path | None) -> Path:
    """The run's folder: `--out`, or one named after the recipe and a digest of all its values.

    Raises:
        UserError: the folder holds a run of another recipe, or is not a run folder.
    """
    resolved = recipe.model_dump(mode="json")
    digest = hashlib.sha256(json.dumps(resolved, sort_keys=True).encode()).hexdigest()[:8]
    folder = out or Path("runs") / f"{recipe.name}-{digest}"
    stamp = folder / STAMP
    if stamp.exists():
        found = read_json(stamp, "the run's recipe")
        if found != resolved:
            keys = _differences(found, resolved)
            raise UserError(
                f"holds a run with other settings ({', '.join(keys)})", where=str(folder), fix="Choose another --out"
            )
    elif folder.exists() and any(folder.iterdir()):
        raise UserError("is not empty and holds no run", where=str(folder), fix="Choose another --out")
    return folder


def run(recipe: Recipe, out: Path | None, say: Say) -> Outcome:
    """Do the main job.

    Args:
        recipe: the run.
        out: run folder, or None for the default.
        say: prints one line for each stage.

    Raises:
        UserError: bad input, found before anything is written where that is possible.
        CheckFailed: the export does not verify.
        Preempted: asked to leave while training; the same command goes on.
    """
    distributed.initialize()
    use_compilation_cache()
    if not distributed.is_main():
        say = _silent
    started = time.perf_counter()
    distributed.check_same("recipe", recipe.model_dump_json())
    require_trackers(recipe.trackers)
    data = _load_data(recipe)
    with bar("prepare model", 1.0) as advance:
        model = resolve_model(recipe.model, recipe.revision, lambda what, done: advance(done, what))
    tokenizer = Tokenizer.load(model.path)
    rows = tokenize(data.train, data.fmt, tokenizer, recipe.max_length, policy=recipe.too_long)
    tokenize(data.held_out, data.fmt, tokenizer, recipe.max_length)
    monitored: list[Row] = []
    if recipe.eval_every:
        monitored = tokenize(data.monitored, data.fmt, tokenizer, recipe.max_length, policy=recipe.too_long)
    setup = set_up(recipe, model, control_token_ids(recipe, data.fmt, tokenizer))
    folder = run_folder(recipe, out)
    with jax.set_mesh(setup.mesh.mesh):
        state = initial_state(setup)
        if distributed.is_main() and not (folder / STAMP).exists():
            require_free_space(folder, _disk_needed(setup, state), "the run")
            write_json(folder / STAMP, recipe.model_dump(mode="json"))
        prepared = time.perf_counter() - started
        say(f"prepared {model.id} and {len(data.train)} training rows in {prepared:.1f} s -> {folder}")
        for line in _describe(setup):
            say(line)
        rows_of = {"train": rows, "monitored": monitored}
        fitted = _fit(setup, state, data, tokenizer, rows_of, folder, say)
        paths = {"run": str(folder), "checkpoints": str(folder / "checkpoints"), "base": str(model.path)}
        export_started = time.perf_counter()
        if distributed.is_main() and setup.options.full:
            paths |= _export_full(setup, fitted.trained, folder, say)
    # The merge runs in its own process: the base must not be held here meanwhile.
    rss = peak_rss_bytes()
    full = setup.options.full
    del setup, state
    if distributed.is_main() and not full:
        paths |= export(folder, model.path, say, step=fitted.trained.step, quantized=recipe.lora.quantize)
    trained = fitted.trained
    report = Report(
        recipe=recipe.model_dump(mode="json"),
        backend="jax",
        device=device(),
        versions=versions("jax", "jaxlib", "optax", "orbax-checkpoint", "numpy", "tokenizers"),
        when=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        before=fitted.before.answers.evaluation,
        after=fitted.after.answers.evaluation,
        loss=tuple(trained.log.losses),
        evals=tuple(trained.log.evals),
        rates=trained.rates,
        exported_step=trained.step,
        seconds=Seconds(
            prepare=prepared,
            before=fitted.before.seconds,
            train=trained.log.seconds,
            after=fitted.after.seconds,
            export=time.perf_counter() - export_started,
        ),
        peak_rss_bytes=rss,
        tokens={
            "supervised": trained.supervised_tokens,
            "run": trained.plan.row_tokens,
            "run_held": trained.plan.held_tokens,
            "run_computed": trained.plan.computed_tokens,
            "train_rows": sum(len(row.ids) for row in rows),
        },
        paths=paths | {"report": str(folder / "report.json"), "loss_curve": str(folder / "loss.png")},
    )
    if distributed.is_main():
        write_json(folder / "report.json", report.model_dump(mode="json"))
    before, after = fitted.before.answers, fitted.after.answers
    example = _telling_example(data.held_out, before, after)
    return Outcome(report, example, before.outputs[example.id], after.outputs[example.id])


def _silent(_: str) -> None:
    """What processes other than the first say."""


def _describe(setup: Setup) -> list[str]:
    """What is trained, and where."""
    config, adapter = setup.config, setup.options.adapter
    lines = [f"{config.family}, {config.num_hidden_layers} layers; {setup.loaded.describe()}"]
    if setup.options.full:
        lines.append("training all weights")
    else:
        rows = f", {len(adapter.token_ids)} token rows" if adapter.token_ids else ""
        lines.append(f"training adapters of {describe(adapter.leaves)}{rows}")
    if jax.device_count() > 1:
        lines.append(f"mesh {setup.mesh.describe()}")
        lines += setup.mesh.replications(param_table(config))
    return lines


@dataclasses.dataclass(frozen=True)
class Data:
    """The conversations of a run, by use."""

    fmt: Format
    train: list[Conversation]
    held_out: list[Conversation]
    monitored: list[Conversation]


@dataclasses.dataclass(frozen=True)
class Fitted:
    """The middle of the job: scored, trained, scored."""

    before: Stage
    trained: Trained
    after: Stage


def _load_data(recipe: Recipe) -> Data:
    conversations = load_dataset(recipe.data)
    by_split = {split: [c for c in conversations if c.split == split] for split in ("validation", "test")}
    monitor = (recipe.monitor_split,) if recipe.eval_every else ()
    for split, use in ((recipe.eval_split, "to score"), *((split, "to monitor") for split in monitor)):
        if not by_split[split]:
            raise UserError(
                f"the data set has no {split} rows {use}", where=recipe.data, fix='Give some rows a "split"'
            )
    train = [c for c in conversations if c.split in recipe.train_splits]
    return Data(find_format(recipe.format), train, by_split[recipe.eval_split], by_split[recipe.monitor_split])


def _fit(
    setup: Setup,
    state: TrainState,
    data: Data,
    tokenizer: Tokenizer,
    rows: dict[str, list[Row]],
    folder: Path,
    say: Say,
) -> Fitted:
    recipe, options = setup.recipe, setup.options
    stops = stop_ids(data.fmt, tokenizer)
    decoder = Decoder(setup.config, options.adapter, stops, recipe.max_new_tokens, setup.mesh, dtype=options.dtype)

    def scored(name: str, adapter: Any) -> Stage:
        def compute() -> Answers:
            with bar(f"score {name} training", len(data.held_out)) as advance:
                return evaluate(
                    decoder,
                    options.weights(adapter, setup.frozen),
                    data.held_out,
                    data.fmt,
                    tokenizer,
                    train=data.train,
                    advance=lambda done: advance(done, ""),
                )

        stage, cached = _cached(folder / f"{name}.json", compute)
        exact = stage.answers.evaluation.metrics["call_exact"]
        note = " (cached)" if cached else ""
        say(f"scored {name} training: {exact.hits}/{exact.count} exact calls in {stage.seconds:.1f} s{note}")
        return stage

    before = scored("before", state.adapter)
    with Checkpoints(folder / "checkpoints", keep=recipe.keep, keep_best=recipe.keep_best) as checkpoints:
        trained = train(setup, state, rows["train"], checkpoints, monitored=rows["monitored"], folder=folder, say=say)
    say(_training_line(recipe, trained))
    if distributed.is_main():
        charts.loss_curve(folder / "loss.png", trained.log.losses, f"{recipe.name}: {recipe.model}")
    return Fitted(before, trained, scored("after", trained.adapter))


def _export_full(setup: Setup, trained: Trained, folder: Path, say: Say) -> dict[str, str]:
    merged, fresh = folder / "merged", folder / "merged.new"
    shutil.rmtree(fresh, ignore_errors=True)
    tensors = export_full(setup.model.path, setup.config, trained.adapter, fresh)
    shutil.rmtree(merged, ignore_errors=True)
    fresh.rename(merged)
    say(f"exported {merged}: {tensors} trained tensors, read back and equal")
    return {"merged": str(merged)}


def device() -> dict[str, Any]:
    """The devices that JAX uses."""
    devices = jax.devices()
    return {"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)}


def export(folder: Path, base: Path, say: Say, *, step: int | None = None, quantized: str = "none") -> dict[str, str]:
    """Run `merge-ckpt` to a merged folder and a PEFT adapter, and verify both from disk.

    Args:
        folder: of the run.
        base: model folder.
        say: told of each step.
        step: to export; the latest if None.
        quantized: how the frozen weights were held. The recipe asked for it, so that the base as it is may be exported.

    Raises:
        UserError: merge-ckpt refused its input.
        CheckFailed: a verification failed.
    """
    if importlib.util.find_spec("portlab_merge") is None:
        raise UserError("merge-ckpt is not installed", fix="Install packages/merge-ckpt beside train-jax")
    merged, adapter = folder / "merged", folder / "adapter"
    common = ["--base", str(base), "--ckpt", str(folder), *(() if step is None else ("--step", str(step)))]
    if quantized != "none":
        common.append("--accept-unquantized")
        say(f"exporting from the base as it is: training held it in {quantized}, and scored it so")
    verify = ("verify", *common, "--merged", str(merged), "--adapter", str(adapter))
    paths = {"merged": str(merged), "adapter": str(adapter)}
    if merged.exists() and adapter.exists():
        # Left by an earlier run: good if they verify, else of an older checkpoint or damaged, and made again.
        with contextlib.suppress(UserError):
            _merge_ckpt(*verify)
            say(f"verified {merged} and {adapter} (cached)")
            return paths
    for command, target in (("merge", merged), ("adapter", adapter)):
        # The old folder goes only once it is replaced.
        fresh = target.with_name(f"{target.name}.new")
        shutil.rmtree(fresh, ignore_errors=True)
        _merge_ckpt(command, *common, "--out", str(fresh))
        shutil.rmtree(target, ignore_errors=True)
        fresh.rename(target)
        say(f"exported {target}")
    _merge_ckpt(*verify)
    say("verified both against the checkpoint")
    return paths


def _merge_ckpt(command: str, *arguments: str) -> None:
    """Run merge-ckpt in a process of its own; its complaint and exit code become ours."""
    with bar(f"merge-ckpt {command}", None):
        done = subprocess.run(
            [sys.executable, "-m", "portlab_merge", command, *arguments], capture_output=True, text=True, check=False
        )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"ended with exit code {done.returncode}"]
        kind = CheckFailed if done.returncode == CheckFailed.exit_code else UserError
        raise kind(lines[-1].removeprefix("merge-ckpt: error: "), where=f"merge-ckpt {command}")


def _disk_needed(setup: Setup, state: TrainState) -> int:
    """Bytes of a run: the merged model, and the checkpoints that are kept, each of trained leaves and optimiser."""
    merged = sum(file.stat().st_size for file in setup.model.path.iterdir() if file.is_file())
    one = sum(leaf.nbytes for leaf in jax.tree.leaves((state.adapter, state.opt)))
    # The newest is written before the oldest goes; the adapter is also exported.
    return merged + (setup.recipe.keep + setup.recipe.keep_best + 2) * one


def _cached(path: Path, compute: Callable[[], Answers]) -> tuple[Stage, bool]:
    if path.exists():
        raw = read_json(path, "cached result")
        answers = Answers(Evaluation.model_validate(raw["evaluation"]), raw["outputs"])
        return Stage(answers, raw["seconds"]), True
    started = time.perf_counter()
    answers = compute()
    seconds = time.perf_counter() - started
    record = {"evaluation": answers.evaluation.model_dump(mode="json"), "outputs": answers.outputs, "seconds": seconds}
    write_json(path, record)
    return Stage(answers, seconds), False


def _training_line(recipe: Recipe, trained: Trained) -> str:
    losses, fresh = trained.log.losses, trained.fresh_steps
    if not fresh:
        return f"trained {len(losses)} steps in {trained.log.seconds:.1f} s, loss {losses[-1]:.4f} (cached)"
    rate = fresh * recipe.batch_size / trained.fresh_seconds
    start = f" from step {len(losses) - fresh}" if fresh < len(losses) else ""
    early = f", stopped early at step {len(losses)}" if len(losses) < recipe.steps else ""
    best = f", kept step {trained.step}" if trained.step != len(losses) else ""
    share = f", MFU {trained.rates['mfu']:.1%}" if "mfu" in trained.rates else ""
    speed = f"{rate:.1f} examples/s with compilation{share}"
    return (
        f"trained {fresh} steps{start} in {trained.fresh_seconds:.1f} s, {speed}, "
        f"loss {losses[0]:.3f} -> {losses[-1]:.4f}{early}{best}"
    )


def _telling_example(held_out: Sequence[Conversation], before: Answers, after: Answers) -> Conversation:
    """The first question whose answer training changed, else the first."""
    return next((c for c in held_out if before.outputs[c.id] != after.outputs[c.id]), held_out[0])


def _differences(a: dict[str, Any], b: dict[str, Any], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for key in sorted(a.keys() | b.keys()):
        if isinstance(a.get(key), dict) and isinstance(b.get(key), dict):
            keys += _differences(a[key], b[key], f"{prefix}{key}.")
        elif a.get(key) != b.get(key):
            keys.append(prefix + key)
    return keys
