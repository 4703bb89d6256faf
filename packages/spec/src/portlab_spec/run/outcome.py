"""What a run shows at its end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from portlab_spec.conversation import Conversation
from portlab_spec.recipe import Recipe
from portlab_spec.report import Report
from portlab_spec.run.evaluate import Answers


@dataclass(frozen=True)
class Outcome:
    """A finished run.

    Attributes:
        report: as in report.json.
        example: a held-out conversation.
        before, after: the model's answers to it.
    """

    report: Report
    example: Conversation
    before: str
    after: str


def telling_example(held_out: Sequence[Conversation], before: Answers, after: Answers) -> Conversation:
    """The first question whose answer training changed, else the first."""
    return next((c for c in held_out if before.outputs[c.id] != after.outputs[c.id]), held_out[0])


def training_line(
    recipe: Recipe,
    *,
    losses: Sequence[float],
    seconds: float,
    fresh_steps: int,
    fresh_seconds: float,
    exported_step: int,
    rates: Mapping[str, float],
) -> str:
    """What the user is told of the training.

    Args:
        recipe: the run.
        losses: of every step, resumed ones included.
        seconds: that all of them took.
        fresh_steps: steps taken in this process; none if the run was finished before.
        fresh_seconds: and what they took, compilation and saving included.
        exported_step: the step whose weights are kept.
        rates: see `Throughput`.
    """
    if not fresh_steps:
        return f"trained {len(losses)} steps in {seconds:.1f} s, loss {losses[-1]:.4f} (cached)"
    rate = fresh_steps * recipe.batch_size / fresh_seconds
    start = f" from step {len(losses) - fresh_steps}" if fresh_steps < len(losses) else ""
    early = f", stopped early at step {len(losses)}" if len(losses) < recipe.steps else ""
    best = f", kept step {exported_step}" if exported_step != len(losses) else ""
    share = f", MFU {rates['mfu']:.1%}" if "mfu" in rates else ""
    speed = f"{rate:.1f} examples/s with compilation{share}"
    return (
        f"trained {fresh_steps} steps{start} in {fresh_seconds:.1f} s, {speed}, "
        f"loss {losses[0]:.3f} -> {losses[-1]:.4f}{early}{best}"
    )
