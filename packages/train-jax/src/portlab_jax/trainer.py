"""The training loop: batches in, trained leaves out, a checkpoint every so often, resumable at any of them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from portlab_jax import TRAINER
from portlab_jax.batches import PackedBatches, Step
from portlab_jax.checkpoint import Checkpoints, TrainLog
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
from portlab_spec.run.metadata import planned_metadata
from portlab_spec.run.monitor import Throughput, Work, count_work, patience_is_over, require_finite
from portlab_spec.run.signals import Preemption
from portlab_spec.run.trackers import open_trackers
from portlab_spec.schedule import learning_rates

LIBRARIES = ("jax", "jaxlib", "optax", "orbax-checkpoint", "numpy", f"portlab-{TRAINER}")

PROBE_TOP_K = 8


@dataclass(frozen=True)
class Trained:
    """What training gave.

    Attributes:
        adapter: final leaves, or those of the best checkpoint if the recipe keeps it.
        step: the step they are from.
        log: losses, evaluations and seconds of the whole run, resumed steps included.
        fresh_steps: steps taken in this process.
        fresh_seconds: and what they took, compilation and saving included.
        plan: the static shapes of the batches.
        supervised_tokens: over the whole run.
        rates: throughput of this process without compilation, see `Throughput`.
        compilations: of the step, in this process.
    """

    adapter: Any
    step: int
    log: TrainLog
    fresh_steps: int
    fresh_seconds: float
    plan: Plan
    supervised_tokens: int
    rates: dict[str, float]
    compilations: int


class Prepared(NamedTuple):
    """A step on its way: its rows and layout, its batch on the devices, and what it computes."""

    step: Step
    arrays: Batch
    work: Work


class Steps:
    """The compiled steps of a run, one for each layout."""

    def __init__(self, setup: Setup, state: TrainState) -> None:
        self._setup = setup
        self._state = abstract(state)
        self._by_layout: dict[Layout, Compiled] = {}

    def __call__(self, layout: Layout) -> Compiled:
        """The step for a layout."""
        if layout not in self._by_layout:
            self._by_layout[layout] = Compiled(jit_step(self._setup, self._state, layout), "the training step")
        return self._by_layout[layout]

    @property
    def compilations(self) -> int:
        """How often a step was compiled."""
        return sum(step.count for step in self._by_layout.values())


class MonitoredLoss:
    """Mean cross-entropy on rows that are not trained on."""

    def __init__(self, setup: Setup, rows: Sequence[Row]) -> None:
        size = setup.recipe.batch_size // setup.recipe.accumulate
        batches = [rows[i : i + size] for i in range(0, len(rows), size)]
        plan = setup.plan(batches)
        self._frozen = setup.frozen
        self._batches = [setup.mesh.put_rows(pack_batch(b, plan.layout(i)), axis=1) for i, b in enumerate(batches)]
        layout = plan.layouts[0]
        self._evaluate = Compiled(jax.jit(make_evaluation(setup.for_layout(layout), layout)), "the monitored loss")

    def __call__(self, adapter: Any) -> float:
        """The loss of these leaves."""
        sums = [self._evaluate(adapter, self._frozen, batch) for batch in self._batches]
        return sum(float(nll) for nll, _ in sums) / sum(float(tokens) for _, tokens in sums)


@dataclass
class Progress:
    """What the loop has seen; metrics are read one step late, so that the devices never wait for the host."""

    learning_rates: np.ndarray
    losses: list[float]
    throughput: Throughput
    track: Callable[[int, dict[str, float]], None]
    pending: tuple[Prepared, StepMetrics, bool] | None = None
    since: float = field(default_factory=time.perf_counter)

    def push(self, prepared: Prepared, metrics: StepMetrics, *, compiled: bool) -> None:
        """Take a step's metrics in, and read those of the step before."""
        self.flush()
        self.pending = prepared, metrics, compiled

    def flush(self) -> None:
        """Wait for the latest step and record it.

        Raises:
            CheckFailed: its loss or gradient is not finite, or a leaf gets no gradient.
        """
        if self.pending is None:
            return
        (prepared, metrics, compiled), self.pending = self.pending, None
        step, number = prepared.step, prepared.step.number + 1
        loss, grad_norm = float(metrics.loss), float(metrics.grad_norm)
        now = time.perf_counter()
        self.throughput.add(prepared.work, now - self.since, compiled=compiled)
        self.since = now
        require_finite(loss, grad_norm, number, [row.id for row in step.rows])
        if number == 1:
            require_gradients(metrics.leaf_norms)
        self.losses.append(loss)
        values = {"loss": loss, "grad_norm": grad_norm, "token_accuracy": float(metrics.accuracy)}
        values["learning_rate"] = float(self.learning_rates[step.number])
        self.track(number, values | self.throughput.rates())

    def pause(self) -> None:
        """Leave the time until now out of the throughput."""
        self.since = time.perf_counter()


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
    rows: Sequence[Row],
    checkpoints: Checkpoints,
    *,
    monitored: Sequence[Row] = (),
    folder: Path,
    say: Callable[[str], None] = lambda line: None,
) -> Trained:
    """Train, from the newest checkpoint if there is one. Call it under the run's mesh.

    Args:
        setup: the run.
        state: step 0; donated.
        rows: what to train on.
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
    order = BatchOrder(rows, recipe.batch_size, recipe.steps, recipe.seed, group_by_prefix=recipe.group_by_prefix)
    plan = setup.plan(order, accumulate=recipe.accumulate, max_shapes=recipe.max_shapes)

    def prepare(step: Step) -> Prepared:
        work = count_work(setup.config, setup.size, step.rows, step.batch, method=recipe.method)
        return Prepared(step, setup.mesh.put_rows(step.batch, axis=1), work)

    batches = PackedBatches(order, plan, prepare)
    metadata = describe_run(setup, order)
    steps = Steps(setup, state)
    trained_log, first = TrainLog([], 0.0), 0
    if restored := checkpoints.resume(state, metadata):
        state, trained_log, first = restored.state, restored.log, restored.step
        batches.set_state(restored.data)
    evals, earlier = list(trained_log.evals), trained_log.seconds
    loss_of = MonitoredLoss(setup, monitored) if recipe.eval_every else None
    config = recipe.model_dump(mode="json")
    started = time.perf_counter()
    done = first
    with (
        open_trackers(
            recipe.trackers,
            folder,
            step=first,
            name=recipe.name,
            config=config,
            trainer=TRAINER,
            leads=is_main(),
        ) as trackers,
        Profiler(recipe.profile, folder / "profile") as profiler,
        Preemption(stop_agreement()) as preemption,
        bar("train", recipe.steps) as advance,
    ):
        throughput = Throughput(jax.device_count(), jax.devices()[0].device_kind)
        planned = learning_rates(recipe.optimizer, recipe.steps)
        progress = Progress(planned, list(trained_log.losses), throughput, trackers.log)

        def save(monitored_loss: float | None) -> None:
            logged = TrainLog(list(progress.losses), earlier + time.perf_counter() - started, list(evals))
            extra = {"probe": probe(setup, state.adapter, rows[0])}
            where = batches.get_state()
            checkpoints.save(state, logged, metadata | extra, data=where, monitored=monitored_loss)

        for number in range(first, recipe.steps):
            if patience_is_over(evals, recipe.patience):
                break
            prepared = next(batches)
            layout = prepared.step.layout
            run = steps(layout)
            fresh = not run.count
            if fresh:
                run.prepare(state, setup.frozen, prepared.arrays)
                say(compile_line(run, layout, plan))
                progress.pause()
            with profiler.step(number + 1):
                state, metrics = run(state, setup.frozen, prepared.arrays)
                progress.push(prepared, metrics, compiled=fresh)
            done = number + 1
            last, stop = done == recipe.steps, preemption.due(done)
            measure = loss_of is not None and (done % recipe.eval_every == 0 or last)
            advance(done, f"loss {progress.losses[-1]:.4f}" if progress.losses else "")
            if not (measure or stop or last or done % recipe.save_every == 0):
                continue
            progress.flush()
            monitored_loss = None
            if measure and loss_of is not None:
                monitored_loss = loss_of(state.adapter)
                evals.append((done, monitored_loss))
                trackers.log(done, {"monitored_loss": monitored_loss})
            over = patience_is_over(evals, recipe.patience)
            if (measure and recipe.keep_best) or stop or last or over or done % recipe.save_every == 0:
                save(monitored_loss)
            progress.pause()
            if stop and not last:
                checkpoints.wait()
                raise preemption.leave(done)
        seconds = time.perf_counter() - started
        rates = progress.throughput.rates()
        final = TrainLog(progress.losses, earlier + seconds, evals)
    at = done
    if recipe.keep_best and (best := checkpoints.best) and best.step != done:
        state, at = checkpoints.restore(best.step, state).state, best.step
    supervised = sum(sum(row.loss) for batch in order[:done] for row in batch)
    return Trained(state.adapter, at, final, done - first, seconds, plan, supervised, rates, steps.compilations)


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
