"""The steps of a run, as the loop takes them: rows packed and placed, programs compiled, numbers read later."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from portlab_spec.data.tokens import Row
from portlab_spec.errors import CheckFailed
from portlab_spec.packing import Batch, BatchOrder, Plan, pack_batch
from portlab_spec.run.loop import Launched, Numbers
from portlab_spec.run.monitor import count_work
from portlab_spec.run.train_log import TrainLog
from portlab_torchax.checkpoint import Checkpoints
from portlab_torchax.functional import Values
from portlab_torchax.programs import Programs
from portlab_torchax.setup import Setup, jit_step
from portlab_torchax.step import StepMetrics, TrainState, make_evaluation

Say = Callable[[str], None]


class MeanLoss:
    """Mean cross-entropy over rows: all of them, the last batch padded with slots that weigh nothing."""

    def __init__(self, setup: Setup, rows: Sequence[Row]) -> None:
        size = setup.recipe.batch_size // setup.recipe.accumulate
        batches = [rows[i : i + size] for i in range(0, len(rows), size)]
        plan = setup.plan(batches)
        self._frozen = setup.frozen
        packed = (pack_batch(batch, plan.layout(i)) for i, batch in enumerate(batches))
        self._batches = [setup.placement.put_rows(batch, axis=1) for batch in packed]
        self._evaluate = jax.jit(make_evaluation(setup.program, plan.layouts[0]))

    def __call__(self, trained: Values) -> float:
        """The loss of these leaves."""
        sums = [self._evaluate(trained, self._frozen, batch) for batch in self._batches]
        return sum(float(nll) for nll, _ in sums) / sum(float(tokens) for _, tokens in sums)


class TrainingSteps:
    """`portlab_spec.run.loop.Steps` of a run.

    Attributes:
        state: after the latest step.
        programs: of the steps.
    """

    def __init__(
        self,
        setup: Setup,
        state: TrainState,
        order: BatchOrder,
        plan: Plan,
        checkpoints: Checkpoints,
        monitored: MeanLoss | None,
        say: Say,
    ) -> None:
        self._setup, self.state, self._order, self._plan = setup, state, order, plan
        self._checkpoints, self._monitored, self._say = checkpoints, monitored, say
        self.programs = Programs(lambda layout: jit_step(setup, state, layout))
        self._batch: Batch | None = None
        self._fresh = False

    def prepare(self, step: int) -> bool:
        rows, layout = self._order[step], self._plan.layout(step)
        self._packed = pack_batch(rows, layout)
        self._batch = self._setup.placement.put_rows(self._packed, axis=1)
        self._fresh = not self.programs.ready(layout)
        if self._fresh:
            self._say(self.programs.compile(layout, self._plan, self.state, self._setup.frozen, self._batch))
        return self._fresh

    def launch(self, step: int) -> Launched:
        setup, rows = self._setup, self._order[step]
        self.state, metrics = self.programs(self._plan.layout(step), self.state, setup.frozen, self._batch)
        work = count_work(setup.config, setup.size, rows, self._packed, method=setup.recipe.method)
        return Launched([row.id for row in rows], work, self._fresh, lambda: read(metrics, first=step == 0))

    def measure(self) -> float:
        assert self._monitored is not None
        return self._monitored(self.state.trained)

    def save(self, done: int, log: TrainLog, monitored: float | None) -> None:
        self._checkpoints.save_state(self.state, log)

    def wait(self) -> None:
        """Nothing is written in the background."""


def read(metrics: StepMetrics, *, first: bool) -> Numbers:
    """Wait for a step's numbers.

    Raises:
        CheckFailed: in the first step, no gradient reaches something that is to be trained.
    """
    if first:
        require_gradients(metrics.leaf_norms)
    return Numbers(float(metrics.loss), float(metrics.grad_norm), float(metrics.accuracy))


def require_gradients(leaf_norms: dict[str, Any]) -> None:
    """Refuse a run in which something that is to be trained gets no gradient at all.

    LoRA's A gets none in the first step, since B is zero; rows of tokens get none if no row of data holds them.

    Raises:
        CheckFailed: names the leaves.
    """
    idle = (".lora_A.", "trainable_tokens")
    still = [name for name, norm in leaf_norms.items() if not any(i in name for i in idle) and float(norm) == 0]
    if still:
        raise CheckFailed(
            f"no gradient reaches {', '.join(still[:4])}" + (f" and {len(still) - 4} more" if len(still) > 4 else ""),
            where="lora.targets",
            fix="These layers would not be trained: take them out, or look at the rows, which do not involve them",
        )
