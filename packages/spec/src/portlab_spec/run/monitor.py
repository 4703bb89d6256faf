"""What the training loop watches: is the loss a number, does it still fall, how fast does it go."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from portlab_spec.data.tokens import Row
from portlab_spec.errors import CheckFailed
from portlab_spec.models import GemmaConfig
from portlab_spec.models.flops import ModelSize, StepSize, attention_size, mfu, step_flops, visible_pairs
from portlab_spec.packing import Batch

NAMED_ROWS = 32  # a message names so many rows at most


def require_finite(loss: float, grad_norm: float, step: int, rows: Sequence[str]) -> None:
    """Stop a run whose loss or gradient is no number.

    Args:
        loss: of the step.
        grad_norm: of the step, before the clip.
        step: its number, from 1.
        rows: ids of its rows.

    Raises:
        CheckFailed: names the step and its rows.
    """
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return
    what = f"loss of step {step} is {loss}"
    if math.isfinite(loss):
        what = f"gradient norm of step {step} is {grad_norm}, with a loss of {loss:.4g}"
    names = ", ".join(rows[:NAMED_ROWS]) + (f" and {len(rows) - NAMED_ROWS} more" if len(rows) > NAMED_ROWS else "")
    raise CheckFailed(f"the {what}", fix=f"Lower optimizer.learning_rate, or look at its rows: {names}")


def patience_is_over(evals: Sequence[tuple[int, float]], patience: int) -> bool:
    """Have the last `patience` evaluations all failed to go below the lowest one before? Never, if it is 0.

    A function of the log alone, so that a resumed run stops where the whole one would have.

    Args:
        evals: (step, monitored loss) of every evaluation.
        patience: evaluations without a new lowest that end the run.
    """
    if not patience or not evals:
        return False
    losses = [loss for _, loss in evals]
    lowest = losses.index(min(losses))  # the first of equals: a tie is no improvement
    return len(losses) - 1 - lowest >= patience


class Work(NamedTuple):
    """What one step does.

    Attributes:
        examples: original rows.
        tokens: of the original rows.
        computed: tokens that pass the layers, shared parts once, padding included.
        flops: model FLOPs, see `portlab_spec.models.flops`.
    """

    examples: int
    tokens: int
    computed: int
    flops: int


def count_work(
    config: GemmaConfig, size: ModelSize, rows: Sequence[Row], batch: Batch, *, method: str = "lora"
) -> Work:
    """What one step does, for throughput and MFU.

    Args:
        config: of the model.
        size: weights that a token of it meets.
        rows: of the step, as given.
        batch: what they were packed into.
        method: "lora", or "full" if the weights get gradients.
    """
    held = batch.rows.ends > 0
    pairs = {kind: visible_pairs(batch.rows.positions, held, kind.window) for kind in set(config.layers)}
    heads = config.num_attention_heads
    attention = attention_size((pairs[kind], heads, kind.head_dim) for kind in config.layers)
    step = StepSize(int(held.sum()), attention, int((batch.weights > 0).sum()))
    return Work(len(rows), sum(len(row.ids) for row in rows), held.size, step_flops(size, step, method=method))


class Throughput:
    """Rates over the steps of this process, without those that compiled."""

    def __init__(self, devices: int, device_kind: str) -> None:
        self._devices, self._kind = devices, device_kind
        self._total, self._seconds, self._steps = Work(0, 0, 0, 0), 0.0, 0

    def add(self, work: Work, seconds: float, *, compiled: bool) -> None:
        """Count a step.

        Args:
            work: what it did.
            seconds: from the call to the loss on the host; without evaluation and saving.
            compiled: did the first step of a shape compile in them? Then they tell nothing of the rest.
        """
        if not compiled:
            self._total = Work(*(a + b for a, b in zip(self._total, work, strict=True)))
            self._seconds += seconds
            self._steps += 1

    def rates(self) -> dict[str, float]:
        """Means so far; nothing before the second step of a shape.

        `tokens_per_second` counts the rows as they are, `computed_tokens_per_second` what is left of them by sharing
        and comes to them by padding; `mfu` only where the device's peak is known.
        """
        if not self._seconds:
            return {}
        rates = {
            "seconds_per_step": self._seconds / self._steps,
            "examples_per_second": self._total.examples / self._seconds,
            "tokens_per_second": self._total.tokens / self._seconds,
            "computed_tokens_per_second": self._total.computed / self._seconds,
        }
        share = mfu(self._total.flops, self._seconds, self._devices, self._kind)
        return rates if share is None else rates | {"mfu": share}
