"""The training of a run: batches in, trained leaves out, a checkpoint every so often, resumable at any of them."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from portlab_jax import TRAINER
from portlab_jax.batches import PackedBatches, Step
from portlab_jax.checkpoint import Checkpoints
from portlab_jax.compiled import Compiled
from portlab_jax.distributed import is_main, stop_agreement
from portlab_jax.loss import head_logits
from portlab_jax.mesh import shard
from portlab_jax.profiling import Profiler
from portlab_jax.setup import Setup, abstract, jit_step
from portlab_jax.step import StepMetrics, StepOptions, TrainState, make_evaluation, supervised_hidden
from portlab_spec.data.tokens import Row
from portlab_spec.errors import CheckFailed
from portlab_spec.packing import Batch, BatchOrder, Layout, Plan, pack_batch
from portlab_spec.progress import bar
from portlab_spec.report import versions
from portlab_spec.run.job import Say, Trained
from portlab_spec.run.loop import Launched, Numbers, run_steps
from portlab_spec.run.metadata import planned_metadata
from portlab_spec.run.monitor import Throughput, Work, count_work
from portlab_spec.run.signals import Preemption
from portlab_spec.run.trackers import open_trackers
from portlab_spec.run.train_log import TrainLog

LIBRARIES = ("jax", "jaxlib", "optax", "orbax-checkpoint", "numpy", f"portlab-{TRAINER}")

PROBE_TOP_K = 8


@dataclass(frozen=True, kw_only=True)
class TrainedLeaves(Trained):
    """What training gave, leaves included.

    Attributes:
        adapter: leaves of `step`.
        compilations: of the step, in this process.
    """

    adapter: Any
    compilations: int


class Prepared(NamedTuple):
    """A step to take: its rows and layout, its batch on the devices, and what it computes."""

    step: Step
    arrays: Batch
    work: Work


class MonitoredLoss:
    """Mean cross-entropy on rows that are not trained on."""

    def __init__(self, setup: Setup, rows: Sequence[Row]) -> None:
        size = setup.recipe.batch_size // setup.recipe.accumulate
        batches = [rows[i : i + size] for i in range(0, len(rows), size)]
        plan = setup.plan(batches)
        self.rows, self._frozen = rows, setup.frozen
        self._batches = [setup.mesh.put_rows(pack_batch(b, plan.layout(i)), axis=1) for i, b in enumerate(batches)]
        layout = plan.layouts[0]
        self._evaluate = Compiled(jax.jit(make_evaluation(setup.for_layout(layout), layout)), "the monitored loss")

    def __call__(self, adapter: Any) -> float:
        """The loss of these leaves."""
        sums = [self._evaluate(adapter, self._frozen, batch) for batch in self._batches]
        return sum(float(nll) for nll, _ in sums) / sum(float(tokens) for _, tokens in sums)


class TrainingSteps:
    """The steps of a run on its devices, as `portlab_spec.run.loop.Steps`; compiled once for each layout.

    Args:
        setup: the run.
        state: that the next step starts from; donated to it.
        batches: of the steps that are left.
        plan: their static shapes.
        checkpoints: of the run.
        metadata: of every checkpoint; a probe of the first row is added.
        monitored: rows whose loss is measured.
        say: takes a line for the user.

    Attributes:
        state: as the latest step left it.
    """

    def __init__(
        self,
        setup: Setup,
        state: TrainState,
        batches: "PackedBatches[Prepared]",
        plan: Plan,
        checkpoints: Checkpoints,
        metadata: dict[str, Any],
        probed: Row,
        monitored: Sequence[Row],
        say: Say,
    ) -> None:
        self.state = state
        self._setup, self._batches, self._plan, self._say = setup, batches, plan, say
        self._checkpoints, self._metadata, self._probed = checkpoints, metadata, probed
        self._monitored = monitored
        self._abstract = abstract(state)
        self._by_layout: dict[Layout, Compiled] = {}
        self._next: tuple[Prepared, Compiled, bool]

    @property
    def compilations(self) -> int:
        """How often a step was compiled."""
        return sum(step.count for step in self._by_layout.values())

    def prepare(self, step: int) -> bool:
        """Wait for the step's batch, and compile its program if the layout is new."""
        prepared = next(self._batches)
        layout = prepared.step.layout
        if fresh := layout not in self._by_layout:
            self._by_layout[layout] = run = Compiled(jit_step(self._setup, self._abstract, layout), "the training step")
            run.prepare(self.state, self._setup.frozen, prepared.arrays)
            self._say(compile_line(run, layout, self._plan))
        self._next = prepared, self._by_layout[layout], fresh
        return fresh

    def launch(self, step: int) -> Launched:
        """Take the step that was prepared."""
        prepared, run, fresh = self._next
        self.state, metrics = run(self.state, self._setup.frozen, prepared.arrays)
        rows = [row.id for row in prepared.step.rows]
        return Launched(rows, prepared.work, fresh, functools.partial(read_numbers, metrics, first=step == 0))

    def measure(self) -> float:
        """The monitored loss."""
        return self._loss(self.state.adapter)

    def save(self, done: int, log: TrainLog, monitored: float | None) -> None:
        """Save the state, with golden logits of it; the write goes on in the background."""
        extra = {"probe": probe(self._setup, self.state.adapter, self._probed)}
        where = self._batches.get_state()
        self._checkpoints.save(self.state, log, self._metadata | extra, data=where, monitored=monitored)

    def wait(self) -> None:
        """Return once all saves are on disk."""
        self._checkpoints.wait()

    @functools.cached_property
    def _loss(self) -> MonitoredLoss:
        return MonitoredLoss(self._setup, self._monitored)


def read_numbers(metrics: StepMetrics, *, first: bool) -> Numbers:
    """Wait for a step's numbers.

    Args:
        metrics: of the step.
        first: is it the run's first? Then every trained leaf must have got a gradient.

    Raises:
        CheckFailed: one has not.
    """
    found = Numbers(float(metrics.loss), float(metrics.grad_norm), float(metrics.accuracy))
    if first:
        require_gradients(metrics.leaf_norms)
    return found


def require_gradients(leaf_norms: dict[str, Any]) -> None:
    """Refuse a run in which something that is to be trained gets no gradient at all.

    LoRA's `a` gets none in the first step, since `b` is zero; rows of tokens get none if no row of data holds them.

    Raises:
        CheckFailed: names the leaves.
    """
    still = [n for n, norm in leaf_norms.items() if not n.endswith(("/a", "token_rows")) and float(norm) == 0]
    if still:
        raise CheckFailed(
            f"no gradient reaches {', '.join(still[:4])}" + (f" and {len(still) - 4} more" if len(still) > 4 else ""),
            where="lora.targets",
            fix="These layers would not be trained: take them out, or look at the rows, which do not involve them",
        )


def train(
    setup: Setup,
    state: TrainState,
    order: BatchOrder,
    checkpoints: Checkpoints,
    *,
    monitored: Sequence[Row] = (),
    folder: Path,
    say: Say = lambda line: None,
) -> TrainedLeaves:
    """Train, from the newest checkpoint if there is one. Call it under the run's mesh.

    Args:
        setup: the run.
        state: step 0; donated.
        order: rows of every step.
        checkpoints: of the run.
        monitored: rows whose loss is measured every `eval_every` steps.
        folder: the run's, for metrics and profiles.
        say: takes a line for the user.

    Raises:
        CheckFailed: the loss is not finite (names step and rows), or a trained leaf gets no gradient.
        UserError: a checkpoint of another run; the disk is full.
        Preempted: asked to leave; the step is saved.
    """
    recipe = setup.recipe
    plan = setup.plan(order, accumulate=recipe.accumulate, max_shapes=recipe.max_shapes)

    def prepare(step: Step) -> Prepared:
        work = count_work(setup.config, setup.size, step.rows, step.batch, method=recipe.method)
        return Prepared(step, setup.mesh.put_rows(step.batch, axis=1), work)

    batches, metadata, log = PackedBatches(order, plan, prepare), describe_run(setup, order), TrainLog()
    if restored := checkpoints.resume(state, metadata):
        state, log = restored.state, restored.log
        batches.set_state(restored.data)
    first = len(log.losses)
    steps = TrainingSteps(setup, state, batches, plan, checkpoints, metadata, order.rows[0], monitored, say)
    throughput = Throughput(jax.device_count(), jax.devices()[0].device_kind)
    described: dict[str, Any] = {"name": recipe.name, "config": recipe.model_dump(mode="json"), "trainer": TRAINER}
    with (
        open_trackers(recipe.trackers, folder, step=first, leads=is_main(), **described) as trackers,
        Profiler(recipe.profile, folder / "profile") as profiler,
        Preemption(stop_agreement()) as preemption,
        bar("train", recipe.steps) as advance,
    ):
        ended = run_steps(
            recipe,
            steps,
            log,
            throughput,
            track=trackers.log,
            preemption=preemption,
            advance=advance,
            around=profiler.step,
        )
    state, at = steps.state, ended.done
    if recipe.keep_best and (best := checkpoints.best) and best.step != at:
        state, at = checkpoints.restore(best.step, state).state, best.step
    return TrainedLeaves(
        step=at,
        log=ended.log,
        fresh_steps=ended.done - first,
        fresh_seconds=ended.seconds,
        plan=plan,
        supervised_tokens=sum(sum(row.loss) for batch in order[: ended.done] for row in batch),
        rates=throughput.rates(),
        adapter=state.adapter,
        compilations=steps.compilations,
    )


def compile_line(step: Compiled, layout: Layout, plan: Plan) -> str:
    """What was compiled, in words."""
    memory = f", {step.memory.describe()}" if step.memory else ""
    saved = 1 - plan.held_tokens / plan.row_tokens
    shared = f", {saved:.0%} of all tokens shared" if saved else ""
    return f"compiled the step for {layout.tokens_per_step} tokens in {step.seconds:.1f} s{memory}{shared}"


def describe_run(setup: Setup, order: BatchOrder) -> dict[str, Any]:
    """Metadata of every checkpoint of a run."""
    return planned_metadata(
        setup.recipe,
        setup.model,
        setup.config,
        setup.options.adapter.leaves,
        prefix=setup.loaded.prefix,
        token_ids=setup.options.adapter.token_ids,
        versions=versions(*LIBRARIES),
        data_digest=order.digest(),
    )


def probe(setup: Setup, adapter: Any, row: Row) -> dict[str, Any]:
    """Golden logits of base plus adapter at the supervised positions of one row, for verification after export."""
    layout = setup.plan([[row]]).layout(0)
    micro = jax.tree.map(lambda x: x[0], pack_batch([row], layout))
    batch = setup.mesh.put_rows(micro)
    top, values = _probe(adapter, setup.frozen, batch, setup.for_layout(layout), layout.chunk)
    held = micro.weights[0] > 0
    order = np.argsort(micro.slots[0][held], kind="stable")
    return {
        "token_ids": [int(i) for i in row.ids],
        "positions": (np.flatnonzero(row.loss) - 1).tolist(),
        "topk_ids": np.asarray(top)[held][order].tolist(),
        "topk_logits": np.asarray(values, np.float32)[held][order].round(6).tolist(),
    }


def _probe_forward(
    adapter: Any, frozen: Any, batch: Batch, options: StepOptions, chunk: int
) -> tuple[jax.Array, jax.Array]:
    weights = options.weights(adapter, frozen)
    hidden = supervised_hidden(weights, batch, options)
    logits = shard(head_logits(hidden, weights.token_rows, weights.embedding, options.loss(chunk)))
    values, top = jax.lax.top_k(logits[0], min(PROBE_TOP_K, logits.shape[-1]))
    return top, values


_probe = jax.jit(_probe_forward, static_argnums=(3, 4))
