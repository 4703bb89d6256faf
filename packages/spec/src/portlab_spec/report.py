"""The report of a training run, the same from every trainer."""

import importlib.metadata
import math
import platform
import resource
import sys
from typing import Any, Literal

from pydantic import Field

from portlab_spec.conversation import Record
from portlab_spec.metrics import Metric

METRIC_ORDER = (
    "call_exact",
    "name_accuracy",
    "parse_rate",
    "hallucinated_tool_rate",
    "stopped_rate",
    "schema_valid_rate",
    "most_frequent_tool",
)


class Evaluation(Record):
    """Metrics of one model on one split.

    Attributes:
        loss: mean cross-entropy over the supervised tokens of the split, in nats; None where it was not measured.
    """

    split: str
    examples: int
    metrics: dict[str, Metric]
    loss: float | None = None

    @property
    def perplexity(self) -> float | None:
        """The exponential of the loss."""
        return None if self.loss is None else math.exp(self.loss)


class Seconds(Record):
    """Wall-clock seconds by stage. A stage answered from a cache reports what it took when it was computed."""

    prepare: float
    before: float
    train: float
    after: float
    export: float


class Report(Record):
    """`report.json` of a run. Everything in it is measured on the machine that it names.

    Attributes:
        evals: (steps taken, monitored loss) of every measurement.
        rates: throughput of the training steps without compilation: seconds_per_step, examples_per_second,
            tokens_per_second, computed_tokens_per_second, and mfu where the device's peak is known.
        exported_step: the step whose weights were scored and exported.
    """

    schema_version: Literal[1] = 1
    recipe: dict[str, Any]
    backend: Literal["jax", "xla", "torchax"]
    device: dict[str, Any]
    versions: dict[str, str]
    when: str
    before: Evaluation
    after: Evaluation
    loss: tuple[float, ...]
    evals: tuple[tuple[int, float], ...] = ()
    rates: dict[str, float] = Field(default={})
    exported_step: int | None = None
    seconds: Seconds
    peak_rss_bytes: int
    tokens: dict[str, int]
    paths: dict[str, str]


def versions(*distributions: str) -> dict[str, str]:
    """Versions of Python and of the installed distributions among those named."""
    found = {"python": platform.python_version()}
    for name in distributions:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def peak_rss_bytes() -> int:
    """Largest resident set of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB
