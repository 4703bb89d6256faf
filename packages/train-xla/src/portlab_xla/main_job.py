"""The main job on PyTorch: prepare, score, train, score again, export, verify, report.

Each stage leaves its result in the run folder and is skipped when a later run of the same command finds it there:

    <run>/recipe.json  before.json  checkpoints/  after.json  adapter/  merged/  loss.png  report.json
"""

import datetime
import logging
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers

from portlab_hf.export import export_adapter, model_card, verify_adapter
from portlab_hf.model import module_prefix, trained_parameters
from portlab_spec.assets import resolve_model
from portlab_spec.files import require_free_space, write_json
from portlab_spec.mesh import replications
from portlab_spec.models import param_table
from portlab_spec.models.targets import describe
from portlab_spec.packing import BatchOrder
from portlab_spec.progress import bar
from portlab_spec.recipe import Recipe
from portlab_spec.report import Report, Seconds, peak_rss_bytes, versions
from portlab_spec.run import charts
from portlab_spec.run.data import RunData, RunRows, control_token_ids, load_run_data, tokenize_run
from portlab_spec.run.evaluate import Answers, evaluate, stop_ids
from portlab_spec.run.export import export_merged, require_merge_ckpt
from portlab_spec.run.folder import STAMP, run_folder, write_stamp
from portlab_spec.run.metadata import planned_metadata
from portlab_spec.run.outcome import Outcome, telling_example, training_line
from portlab_spec.run.stages import Stage, cached_stage, scored_line
from portlab_spec.run.trackers import require_trackers
from portlab_spec.tokenizer import Tokenizer
from portlab_xla.checkpoint import Checkpoints
from portlab_xla.decode import Decoder
from portlab_xla.devices import Name
from portlab_xla.export import probe
from portlab_xla.setup import Setup, batch_line, dtype_of, set_up
from portlab_xla.steps import Say, Trained, train
from portlab_xla.support import require_supported

BACKEND, TRAINER = "xla", "train-xla"
LIBRARIES = ("torch", "torch-xla", "transformers", "trl", "peft", "accelerate", "numpy", "tokenizers")


def run(recipe: Recipe, out: Path | None, name: Name, say: Say) -> Outcome:
    """Do the main job.

    Args:
        recipe: the run.
        out: run folder, or None for the default.
        name: of the device.
        say: prints one line for each stage.

    Raises:
        UserError: bad input, found before anything is written where that is possible.
        CheckFailed: the export does not verify.
        Preempted: asked to leave while training; the same command goes on.
    """
    quieten()
    started = time.perf_counter()
    require_supported(recipe)
    require_trackers(recipe.trackers, TRAINER)
    require_merge_ckpt()
    data = load_run_data(recipe)
    with bar("prepare model", 1.0) as advance:
        model = resolve_model(recipe.model, recipe.revision, lambda what, done: advance(done, what))
    tokenizer = Tokenizer.load(model.path)
    rows = tokenize_run(recipe, data, tokenizer)
    folder = run_folder(recipe, out, BACKEND)
    setup = set_up(recipe, model, control_token_ids(recipe, data.fmt, tokenizer), name)
    if not (folder / STAMP).exists():
        require_free_space(folder, disk_needed(setup), "the run")
        write_stamp(folder, recipe, BACKEND)
    prepared = time.perf_counter() - started
    say(f"prepared {model.id} and {len(data.train)} training rows in {prepared:.1f} s -> {folder}")
    for line in introduce(setup):
        say(line)
    before, trained, after, metadata = _fit(setup, data, rows, tokenizer, folder, say)
    export_started = time.perf_counter()
    paths = _export(setup, rows, metadata, after.answers, folder, say)
    report = Report(
        recipe=recipe.model_dump(mode="json"),
        backend=BACKEND,
        device=setup.device.describe()
        | {"graphs": trained.planned_graphs, "graphs_after_warm_up": trained.unplanned_graphs},
        versions=versions(*LIBRARIES),
        when=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        before=before.answers.evaluation,
        after=after.answers.evaluation,
        loss=tuple(trained.log.losses),
        evals=tuple(trained.log.evals),
        rates=trained.rates,
        exported_step=trained.step,
        seconds=Seconds(
            prepare=prepared,
            before=before.seconds,
            train=trained.log.seconds,
            after=after.seconds,
            export=time.perf_counter() - export_started,
        ),
        peak_rss_bytes=peak_rss_bytes(),
        tokens={
            "supervised": trained.supervised_tokens,
            "run": trained.plan.row_tokens,
            "run_held": trained.plan.held_tokens,
            "run_computed": trained.plan.computed_tokens,
            "train_rows": sum(len(row.ids) for row in rows.train),
        },
        paths=paths | {"report": str(folder / "report.json"), "loss_curve": str(folder / "loss.png")},
    )
    write_json(folder / "report.json", report.model_dump(mode="json"))
    example = telling_example(data.held_out, before.answers, after.answers)
    return Outcome(report, example, before.answers.outputs[example.id], after.answers.outputs[example.id])


def quieten() -> None:
    """Leave what libraries say about themselves out of the job's own lines, unless the user debugs."""
    if not logging.getLogger().isEnabledFor(logging.DEBUG):
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        logging.getLogger("absl").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", module=r"(torch|torch_xla|transformers|trl|peft|accelerate)\b.*")


def introduce(setup: Setup) -> list[str]:
    """What is trained, and where."""
    device, config = setup.device, setup.config
    rows = f", {len(setup.token_ids)} token rows" if setup.token_ids else ""
    found = device.describe()
    lines = [
        f"{config.family}, {config.num_hidden_layers} layers on {found['count']} {found['kind']} device(s), "
        f"{found['platform']}; training adapters of {describe(setup.leaves)}{rows}",
        batch_line(setup.recipe, device),
    ]
    if device.count > 1:
        lines += [f"mesh {found['mesh']}", *replications(param_table(config), device.shape)]
    if "unused" in found:
        lines.append(f"{found['unused']} is installed and not used: this stack trains through torch_xla")
    return lines


def _fit(
    setup: Setup, data: RunData, rows: RunRows, tokenizer: Tokenizer, folder: Path, say: Say
) -> tuple[Stage, Trained, Stage, dict[str, Any]]:
    recipe = setup.recipe
    decoder = Decoder(setup, stop_ids(data.fmt, tokenizer), recipe.max_new_tokens)

    def scored(name: str) -> Stage:
        def compute() -> Answers:
            with bar(f"score {name} training", len(data.held_out)) as advance:

                def generate(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
                    return decoder(prompts, advance=lambda done: advance(done, ""))

                return evaluate(generate, data.held_out, data.fmt, tokenizer, train=data.train)

        stage, cached = cached_stage(folder / f"{name}.json", compute)
        say(scored_line(name, stage, cached=cached))
        return stage

    before = scored("before")
    order = BatchOrder(rows.train, recipe.batch_size, recipe.steps, recipe.seed, group_by_prefix=recipe.group_by_prefix)
    metadata = describe_run(setup, order)
    checkpoints = Checkpoints(
        folder / "checkpoints",
        metadata,
        keep=recipe.keep,
        keep_best=recipe.keep_best,
        to_host=setup.device.to_host,
    )
    trained = train(setup, rows.train, rows.monitored, checkpoints, order, folder=folder, say=say)
    say(
        training_line(
            recipe,
            losses=trained.log.losses,
            seconds=trained.log.seconds,
            fresh_steps=trained.fresh_steps,
            fresh_seconds=trained.fresh_seconds,
            exported_step=trained.step,
            rates=trained.rates,
        )
    )
    charts.loss_curve(folder / "loss.png", trained.log.losses, f"{recipe.name}: {recipe.model}")
    return before, trained, scored("after"), metadata


def describe_run(setup: Setup, order: BatchOrder) -> dict[str, Any]:
    """Metadata of every checkpoint of a run."""
    return planned_metadata(
        setup.recipe,
        setup.model,
        setup.config,
        setup.leaves,
        prefix=module_prefix(setup.base),
        token_ids=setup.token_ids,
        versions=versions(*LIBRARIES),
        data_digest=order.digest(),
    )


def _export(
    setup: Setup, rows: RunRows, metadata: dict[str, Any], after: Answers, folder: Path, say: Say
) -> dict[str, str]:
    adapter, merged, base = folder / "adapter", folder / "merged", setup.model.path
    golden = probe(setup, rows.train[0])
    card = model_card(
        setup.recipe,
        setup.model.id,
        setup.device.describe(),
        after.evaluation,
        versions(*LIBRARIES),
        trainer="TRL",
    )
    export_adapter(setup.adapted, adapter, metadata, golden, card, setup.device.to_host)
    worst = verify_adapter(base, adapter, golden, dtype_of(setup.recipe, setup.device))
    say(f"exported {adapter}: plain PEFT computes the same logits, largest difference {worst:.2g}")
    export_merged(base, adapter, merged)
    say(f"exported {merged}, verified against base and adapter")
    return {
        "run": str(folder),
        "checkpoints": str(folder / "checkpoints"),
        "base": str(base),
        "adapter": str(adapter),
        "merged": str(merged),
    }


def disk_needed(setup: Setup) -> int:
    """Bytes of a run: the merged model, and the checkpoints that are kept, each an adapter and two moments of it."""
    merged = sum(file.stat().st_size for file in setup.model.path.iterdir() if file.is_file())
    adapter = sum(p.numel() * p.element_size() for p in trained_parameters(setup.adapted).values())
    # The newest is written before the oldest goes; the adapter is also exported.
    return merged + (setup.recipe.keep + setup.recipe.keep_best + 2) * 3 * adapter
