"""Training: TRL's loop, and what happens between its steps."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from portlab_hf.model import trained_parameters
from portlab_spec.data.tokens import Row
from portlab_spec.packing import BatchOrder, Plan, pack_batch
from portlab_spec.progress import bar
from portlab_spec.run.job import Say, Trained
from portlab_spec.run.monitor import Throughput, count_work, patience_is_over
from portlab_spec.run.signals import Preemption
from portlab_spec.run.trackers import open_trackers
from portlab_spec.run.train_log import TrainLog, best_step
from portlab_spec.schedule import learning_rates
from portlab_xla.checkpoint import Checkpoints
from portlab_xla.inputs import MicroBatch, micro_batches
from portlab_xla.loss import batch_sums
from portlab_xla.optim import make_optimizer, make_scheduler
from portlab_xla.setup import Setup
from portlab_xla.trainer import PlannedSFTTrainer, StepBatches
from portlab_xla.watch import CompileBudget, StepInfo, StepLog


class MonitoredLoss:
    """Mean cross-entropy on rows that are not trained on: all of them, the last batch padded with ignored slots."""

    def __init__(self, setup: Setup, rows: Sequence[Row]) -> None:
        size = setup.recipe.batch_size // setup.recipe.accumulate
        batches = [rows[i : i + size] for i in range(0, len(rows), size)]
        self._setup, self._plan = setup, setup.plan(batches)
        packed = [pack_batch(batch, self._plan.layout(i)) for i, batch in enumerate(batches)]
        self._batches = [micro_batches(batch)[0] for batch in packed]
        self._tokens = sum(float(batch.weights.sum()) for batch in packed)

    def __call__(self) -> float:
        """The loss of the model as it is."""
        setup = self._setup
        setup.adapted.eval()
        sums: list[torch.Tensor] = []
        with torch.no_grad():
            for number, tensors in enumerate(self._batches):
                batch, layout = MicroBatch(**setup.device.put_rows(tensors)), self._plan.layout(number)
                found = batch_sums(setup.base, setup.config, batch, setup.device.checkpoint, chunk=layout.chunk)
                sums.append(found.nll)
                setup.device.sync()
        return sum(float(nll) for nll in sums) / self._tokens


@dataclass
class Steps(TrainerCallback):
    """What happens between the steps of TRL's loop: numbers are read, losses measured, checkpoints saved.

    Attributes:
        setup: the run.
        batches: hands out what the steps compute.
        plan: the static shapes of the steps.
        checkpoints: where steps are saved.
        optimizer: whose state is saved with them.
        log: of the run so far.
        first: steps taken before this process.
        monitored: measures a loss, if the recipe has one measured.
        step_log: reads losses.
        budget: counts graphs.
        track: takes metrics of a step.
        advance: moves the progress bar.
        preemption: knows whether the run was asked to leave.
        say: takes a line for the user.
        trainer: that calls this.
    """

    setup: Setup
    batches: StepBatches
    plan: Plan
    checkpoints: Checkpoints
    optimizer: torch.optim.Optimizer
    log: TrainLog
    first: int
    monitored: MonitoredLoss | None
    step_log: StepLog
    budget: CompileBudget
    track: Callable[[int, dict[str, float]], None]
    advance: Callable[[float, str], None]
    preemption: Preemption
    say: Say
    trainer: PlannedSFTTrainer | None = None

    def __post_init__(self) -> None:
        self.done, self._earlier, self._started = self.first, self.log.seconds, time.perf_counter()
        self._rates = learning_rates(self.setup.recipe.optimizer, self.setup.recipe.steps)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        # What a step draws depends on its number alone, so that a resumed run draws the same.
        seed = np.random.SeedSequence([self.setup.recipe.seed, self.first + state.global_step])
        self.setup.device.seed(int(seed.generate_state(1)[0]))

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.setup.device.sync()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.done = self.first + state.global_step
        self._launch(self.done)
        self.step_log.collect()
        if losses := self.step_log.losses:
            self.advance(self.done, f"loss {losses[-1]:.4f}")
        if self._settle(self.done):
            control.should_training_stop = True

    def _launch(self, number: int) -> None:
        """Hand the step to the device, and ask for its numbers."""
        assert self.trainer is not None
        sums, grad_norm = self.trainer.take_step()
        rows, batch = self.batches.current
        work = count_work(self.setup.config, self.setup.size, rows, batch)
        info = StepInfo(number, [row.id for row in rows], work, float(self._rates[number - 1]))
        self.step_log.add(info, sums, grad_norm)
        self.setup.device.sync()
        compiled, warning = self.budget.step(number, self.plan.choice[number - 1])
        if compiled:
            self.step_log.compiled.add(number)
        if warning:
            self.say(f"warning: {warning}")

    def _settle(self, done: int) -> bool:
        """Measure and save where that is due; is the run to end here?"""
        recipe = self.setup.recipe
        last, stop = done == recipe.steps, self.preemption.due(done)
        measure = self.monitored is not None and (done % recipe.eval_every == 0 or last)
        if not (measure or stop or last or done % recipe.save_every == 0):
            return False
        self.step_log.flush()
        if measure and self.monitored is not None:
            loss = self.monitored()
            self.log.evals.append((done, loss))
            self.track(done, {"monitored_loss": loss})
        over = patience_is_over(self.log.evals, recipe.patience)
        if (measure and recipe.keep_best) or stop or last or over or done % recipe.save_every == 0:
            self._save(done)
        self.budget.forgive()
        self.step_log.pause()
        return stop or over

    def _save(self, done: int) -> None:
        self.log.losses = list(self.step_log.losses)
        self.log.seconds = self._earlier + time.perf_counter() - self._started
        self.checkpoints.save_step(self.setup.adapted, self.optimizer, done, self.log)


def train(
    setup: Setup,
    rows: Sequence[Row],
    monitored: Sequence[Row],
    checkpoints: Checkpoints,
    order: BatchOrder,
    *,
    folder: Path,
    say: Say,
) -> Trained:
    """Train, from the newest checkpoint if there is one.

    Returns:
        What training gave, and of the device how many graphs were compiled: `graphs` in the first steps of each shape,
        or to measure and save; `graphs_after_warm_up` later, 0 unless something is wrong.

    Raises:
        CheckFailed: the loss is no number.
        UserError: a checkpoint of another run.
        Preempted: asked to leave; the step is saved.
    """
    recipe, device = setup.recipe, setup.device
    plan = setup.plan(order, accumulate=recipe.accumulate, max_shapes=recipe.max_shapes)
    optimizer = make_optimizer(recipe.optimizer, trained_parameters(setup.adapted).values(), device.zeros_like)
    first, log = checkpoints.resume(setup.adapted, optimizer)
    device.sync()  # what was loaded is there before the first step, not part of its program
    throughput, budget = Throughput(device.count, str(device.describe()["kind"])), CompileBudget(device)
    described: dict[str, Any] = {"name": recipe.name, "config": recipe.model_dump(mode="json"), "trainer": "train-xla"}
    started = time.perf_counter()
    with (
        open_trackers(recipe.trackers, folder, step=first, **described) as trackers,
        Preemption() as preemption,
        bar("train", recipe.steps) as advance,
    ):
        steps = Steps(
            setup=setup,
            batches=StepBatches(order, plan, device, first=first),
            plan=plan,
            checkpoints=checkpoints,
            optimizer=optimizer,
            log=log,
            first=first,
            monitored=MonitoredLoss(setup, monitored) if recipe.eval_every else None,
            step_log=StepLog(device, recipe.log_every, throughput, trackers.log, losses=log.losses),
            budget=budget,
            track=trackers.log,
            advance=advance,
            preemption=preemption,
            say=say,
        )
        if first < recipe.steps and not patience_is_over(log.evals, recipe.patience):
            scheduler = make_scheduler(recipe.optimizer, recipe.steps, first, optimizer)
            trainer = PlannedSFTTrainer(setup, list(rows), steps.batches, (optimizer, scheduler), steps, folder)
            steps.trainer = trainer
            trainer.train()
            with contextlib.suppress(OSError):
                (folder / "trl").rmdir()  # transformers makes its output folder, and nothing is put there
            if preemption.due(steps.done) and steps.done < recipe.steps:
                raise preemption.leave(steps.done)
    at = done = steps.done
    seconds = time.perf_counter() - started if done > first else 0.0
    if recipe.keep_best and (best := best_step(log.evals, checkpoints.steps())) is not None and best != done:
        at = best
        checkpoints.load(setup.adapted, at)
    return Trained(
        step=at,
        log=log,
        fresh_steps=done - first,
        fresh_seconds=seconds,
        plan=plan,
        supervised_tokens=sum(sum(row.loss) for batch in order[:done] for row in batch),
        rates=throughput.rates(),
        device={"graphs": budget.planned, "graphs_after_warm_up": budget.unplanned},
    )
