"""The main job: prepare, score, train, score again, export, verify, report.

Each stage leaves its result in the run folder and is skipped when a later run of the same command finds it there:

    <run>/recipe.json  before.json  checkpoints/  after.json  merged/  adapter/  loss.png  report.json
"""

import contextlib
import dataclasses
import datetime
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from portlab_jax import TRAINER, distributed
from portlab_jax.checkpoint import Checkpoints
from portlab_jax.compiled import use_compilation_cache
from portlab_jax.decode import Decoder
from portlab_jax.export_full import export_full
from portlab_jax.setup import Setup, initial_state, set_up
from portlab_jax.step import TrainState
from portlab_jax.trainer import Trained, train
from portlab_spec.assets import resolve_model
from portlab_spec.errors import UserError
from portlab_spec.files import require_free_space, write_json
from portlab_spec.models import param_table
from portlab_spec.models.targets import describe
from portlab_spec.progress import bar
from portlab_spec.recipe import Recipe
from portlab_spec.report import Report, Seconds, peak_rss_bytes, versions
from portlab_spec.run import charts
from portlab_spec.run.data import RunData, RunRows, control_token_ids, load_run_data, tokenize_run
from portlab_spec.run.evaluate import Answers, evaluate, stop_ids
from portlab_spec.run.export import require_merge_ckpt, run_merge_ckpt
from portlab_spec.run.folder import STAMP, run_folder, write_stamp
from portlab_spec.run.outcome import Outcome, telling_example, training_line
from portlab_spec.run.stages import Stage, cached_stage, scored_line
from portlab_spec.run.trackers import require_trackers
from portlab_spec.tokenizer import Tokenizer

Say = Callable[[str], None]


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
    require_trackers(recipe.trackers, TRAINER)
    data = load_run_data(recipe)
    with bar("prepare model", 1.0) as advance:
        model = resolve_model(recipe.model, recipe.revision, lambda what, done: advance(done, what))
    tokenizer = Tokenizer.load(model.path)
    rows = tokenize_run(recipe, data, tokenizer)
    setup = set_up(recipe, model, control_token_ids(recipe, data.fmt, tokenizer))
    folder = run_folder(recipe, out)
    with jax.set_mesh(setup.mesh.mesh):
        state = initial_state(setup)
        if distributed.is_main() and not (folder / STAMP).exists():
            require_free_space(folder, _disk_needed(setup, state), "the run")
            write_stamp(folder, recipe)
        prepared = time.perf_counter() - started
        say(f"prepared {model.id} and {len(data.train)} training rows in {prepared:.1f} s -> {folder}")
        for line in _describe(setup):
            say(line)
        fitted = _fit(setup, state, data, tokenizer, rows, folder, say)
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
            "train_rows": sum(len(row.ids) for row in rows.train),
        },
        paths=paths | {"report": str(folder / "report.json"), "loss_curve": str(folder / "loss.png")},
    )
    if distributed.is_main():
        write_json(folder / "report.json", report.model_dump(mode="json"))
    before, after = fitted.before.answers, fitted.after.answers
    example = telling_example(data.held_out, before, after)
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
class Fitted:
    """The middle of the job: scored, trained, scored."""

    before: Stage
    trained: Trained
    after: Stage


def _fit(
    setup: Setup,
    state: TrainState,
    data: RunData,
    tokenizer: Tokenizer,
    rows: RunRows,
    folder: Path,
    say: Say,
) -> Fitted:
    recipe, options = setup.recipe, setup.options
    stops = stop_ids(data.fmt, tokenizer)
    decoder = Decoder(setup.config, options.adapter, stops, recipe.max_new_tokens, setup.mesh, dtype=options.dtype)

    def scored(name: str, adapter: Any) -> Stage:
        def compute() -> Answers:
            with bar(f"score {name} training", len(data.held_out)) as advance:
                weights = options.weights(adapter, setup.frozen)
                return evaluate(
                    lambda prompts: decoder(weights, prompts, advance=lambda done: advance(done, "")),
                    data.held_out,
                    data.fmt,
                    tokenizer,
                    train=data.train,
                )

        stage, cached = cached_stage(folder / f"{name}.json", compute)
        say(scored_line(name, stage, cached=cached))
        return stage

    before = scored("before", state.adapter)
    with Checkpoints(folder / "checkpoints", keep=recipe.keep, keep_best=recipe.keep_best) as checkpoints:
        trained = train(setup, state, rows.train, checkpoints, monitored=rows.monitored, folder=folder, say=say)
    line = training_line(
        recipe,
        losses=trained.log.losses,
        seconds=trained.log.seconds,
        fresh_steps=trained.fresh_steps,
        fresh_seconds=trained.fresh_seconds,
        exported_step=trained.step,
        rates=trained.rates,
    )
    say(line)
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
    require_merge_ckpt()
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
            run_merge_ckpt(*verify)
            say(f"verified {merged} and {adapter} (cached)")
            return paths
    for command, target in (("merge", merged), ("adapter", adapter)):
        # The old folder goes only once it is replaced.
        fresh = target.with_name(f"{target.name}.new")
        shutil.rmtree(fresh, ignore_errors=True)
        run_merge_ckpt(command, *common, "--out", str(fresh))
        shutil.rmtree(target, ignore_errors=True)
        fresh.rename(target)
        say(f"exported {target}")
    run_merge_ckpt(*verify)
    say("verified both against the checkpoint")
    return paths


def _disk_needed(setup: Setup, state: TrainState) -> int:
    """Bytes of a run: the merged model, and the checkpoints that are kept, each of trained leaves and optimiser."""
    merged = sum(file.stat().st_size for file in setup.model.path.iterdir() if file.is_file())
    one = sum(leaf.nbytes for leaf in jax.tree.leaves((state.adapter, state.opt)))
    # The newest is written before the oldest goes; the adapter is also exported.
    return merged + (setup.recipe.keep + setup.recipe.keep_best + 2) * one
