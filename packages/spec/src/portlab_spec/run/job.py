"""The main job: prepare, score, train, score again, export, verify, report; the same for every trainer.

Each stage leaves its result in the run folder and is skipped when a later run of the same command finds it there:

    <run>/recipe.json  before.json  checkpoints/  after.json  adapter/  merged/  loss.png  report.json
"""

import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from portlab_spec.assets import ModelFolder, resolve_model
from portlab_spec.data.tokens import Row
from portlab_spec.files import require_free_space, write_json
from portlab_spec.packing import BatchOrder, Plan
from portlab_spec.progress import bar
from portlab_spec.recipe import Recipe
from portlab_spec.report import Evaluation, Report, Seconds, peak_rss_bytes, versions
from portlab_spec.run import charts
from portlab_spec.run.data import RunData, RunRows, control_token_ids, load_run_data, tokenize_run
from portlab_spec.run.evaluate import Answers, evaluate, stop_ids
from portlab_spec.run.export import require_merge_ckpt
from portlab_spec.run.folder import STAMP, run_folder, write_stamp
from portlab_spec.run.outcome import Outcome, telling_example, training_line
from portlab_spec.run.stages import Stage, cached_stage, scored_line
from portlab_spec.run.trackers import require_trackers
from portlab_spec.run.train_log import TrainLog
from portlab_spec.tokenizer import Tokenizer

Say = Callable[[str], None]
Advance = Callable[[float], None]


@dataclass(frozen=True)
class Trained:
    """What training gave; the weights of `step` are in the session.

    Attributes:
        step: whose weights they are: the last, or the best if the recipe keeps it.
        log: losses, measurements and seconds of the whole run, resumed steps included.
        fresh_steps: steps taken in this process.
        fresh_seconds: and what they took, compilation and saving included.
        plan: static shapes of the batches.
        supervised_tokens: over the whole run.
        rates: throughput of this process without compilation, see `Throughput`.
        device: what training tells about the device, beside what the session knows.
    """

    step: int
    log: TrainLog
    fresh_steps: int
    fresh_seconds: float
    plan: Plan
    supervised_tokens: int
    rates: dict[str, float]
    device: Mapping[str, Any] = field(default_factory=dict)


class Session(Protocol):
    """A run with its model loaded: what the job asks of a trainer."""

    def introduce(self) -> list[str]:
        """What is trained and where, a line each."""

    def device(self) -> dict[str, Any]:
        """`platform`, `kind` and `count` of the devices, and what else tells them from others."""

    def disk_needed(self) -> int:
        """Bytes of the run's folder at its largest."""

    def generate(self, prompts: Sequence[Sequence[int]], stop_ids: Sequence[int], advance: Advance) -> list[list[int]]:
        """Greedy continuation of each prompt by the model as it is; told how many are done."""

    def loss(self, rows: Sequence[Row]) -> float:
        """Mean cross-entropy over the supervised tokens of rows, by the model as it is."""

    def train(self, rows: RunRows, order: BatchOrder, folder: Path, say: Say) -> Trained:
        """Train, from the newest checkpoint if there is one."""

    def export(self, rows: RunRows, after: Evaluation, folder: Path, say: Say) -> dict[str, str]:
        """Write and verify what the run is for; paths by name."""


class Backend(NamedTuple):
    """A trainer.

    Attributes:
        name: in reports and run folders, "xla" say.
        trainer: its command, "train-xla" say.
        libraries: whose versions are reported.
        open: a session from the recipe, its model, and the rows of the embedding to train.
        leads: this process is the one that prints and writes. Others of the same run do what computes, and nothing
            else.
    """

    name: str
    trainer: str
    libraries: tuple[str, ...]
    open: Callable[[Recipe, ModelFolder, tuple[int, ...]], Session]
    leads: bool = True


def run_job(recipe: Recipe, out: Path | None, backend: Backend, say: Say) -> Outcome:
    """Do the main job.

    Args:
        recipe: the run.
        out: run folder, or None for the default.
        backend: the trainer.
        say: prints one line for each stage.

    Raises:
        UserError: bad input, found before anything is written where that is possible.
        CheckFailed: the export does not verify.
        Preempted: asked to leave while training; the same command goes on.
    """
    if not backend.leads:
        say = _silent
    started = time.perf_counter()
    require_trackers(recipe.trackers, backend.trainer)
    if recipe.method == "lora":
        require_merge_ckpt()
    data = load_run_data(recipe)
    with bar("prepare model", 1.0) as advance:
        model = resolve_model(recipe.model, recipe.revision, lambda what, done: advance(done, what))
    tokenizer = Tokenizer.load(model.path)
    rows = tokenize_run(recipe, data, tokenizer)
    folder = run_folder(recipe, out, backend.name)
    session = backend.open(recipe, model, control_token_ids(recipe, data.fmt, tokenizer))
    if backend.leads and not (folder / STAMP).exists():
        require_free_space(folder, session.disk_needed(), "the run")
        write_stamp(folder, recipe, backend.name)
    prepared = time.perf_counter() - started
    say(f"prepared {model.id} and {len(data.train)} training rows in {prepared:.1f} s -> {folder}")
    for line in session.introduce():
        say(line)
    before = _scored("before", session, data, rows, tokenizer, folder, say)
    trained = _train(recipe, session, rows, folder, say)
    if backend.leads:
        charts.loss_curve(folder / "loss.png", trained.log.losses, f"{recipe.name}: {recipe.model}")
    after = _scored("after", session, data, rows, tokenizer, folder, say)
    export_started = time.perf_counter()
    paths = session.export(rows, after.answers.evaluation, folder, say) if backend.leads else {}
    report = Report(
        recipe=recipe.model_dump(mode="json"),
        backend=backend.name,
        device=session.device() | dict(trained.device),
        versions=versions(*backend.libraries),
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
        paths={"run": str(folder), "checkpoints": str(folder / "checkpoints"), "base": str(model.path)}
        | paths
        | {"report": str(folder / "report.json"), "loss_curve": str(folder / "loss.png")},
    )
    if backend.leads:
        write_json(folder / "report.json", report.model_dump(mode="json"))
    example = telling_example(data.held_out, before.answers, after.answers)
    return Outcome(report, example, before.answers.outputs[example.id], after.answers.outputs[example.id])


def _silent(_: str) -> None:
    """What processes other than the first say."""


def _scored(
    name: str, session: Session, data: RunData, rows: RunRows, tokenizer: Tokenizer, folder: Path, say: Say
) -> Stage:
    stops, speed = stop_ids(data.fmt, tokenizer), 0.0

    def compute() -> Answers:
        with bar(f"score {name} training", len(data.held_out)) as advance:

            def generate(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
                nonlocal speed
                started = time.perf_counter()
                outputs = session.generate(prompts, stops, lambda done: advance(done, ""))
                speed = sum(map(len, outputs)) / (time.perf_counter() - started)
                return outputs

            answers = evaluate(generate, data.held_out, data.fmt, tokenizer, train=data.train)
            loss = session.loss(rows.held_out)
            return Answers(answers.evaluation.model_copy(update={"loss": loss}), answers.outputs)

    stage, cached = cached_stage(folder / f"{name}.json", compute)
    say(scored_line(name, stage, cached=cached, tokens_per_second=speed))
    return stage


def _train(recipe: Recipe, session: Session, rows: RunRows, folder: Path, say: Say) -> Trained:
    order = BatchOrder(rows.train, recipe.batch_size, recipe.steps, recipe.seed, group_by_prefix=recipe.group_by_prefix)
    trained = session.train(rows, order, folder, say)
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
    return trained
