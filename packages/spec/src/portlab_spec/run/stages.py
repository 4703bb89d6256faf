"""Stages of a run whose result stays in its folder, so that the same command does not do them again."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from portlab_spec.files import read_json, write_json
from portlab_spec.report import Evaluation
from portlab_spec.run.evaluate import Answers


@dataclass(frozen=True)
class Stage:
    """A scored model: what it said, and how many seconds that took when it was computed."""

    answers: Answers
    seconds: float


def cached_stage(path: Path, compute: Callable[[], Answers]) -> tuple[Stage, bool]:
    """Score a model, or read how it was scored before.

    Args:
        path: JSON file of the result, in the run's folder: {"evaluation": ..., "outputs": {id: text}, "seconds": ...}.
        compute: scores the model.

    Returns:
        The stage, and whether the file held it.

    Raises:
        UserError: the file is not JSON.
    """
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


def scored_line(name: str, stage: Stage, *, cached: bool, tokens_per_second: float = 0.0) -> str:
    """What the user is told of a scored model.

    Args:
        name: "before" or "after".
        stage: the result.
        cached: was it there already?
        tokens_per_second: at which the answers were generated, compilation included; 0 if they were not.
    """
    exact = stage.answers.evaluation.metrics["call_exact"]
    note = " (cached)" if cached else ""
    speed = f", {tokens_per_second:.0f} tokens/s generated" if tokens_per_second else ""
    return f"scored {name} training: {exact.hits}/{exact.count} exact calls in {stage.seconds:.1f} s{speed}{note}"
