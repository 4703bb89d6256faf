"""What a comparison of trainers leaves: `train.json`."""

from typing import Any, Literal

from pydantic import Field

from portlab_bench.schema import Distribution, Finding
from portlab_spec.conversation import Record

BackendName = Literal["jax", "xla", "torchax", "trl"]

MFU_FORMULA = (
    "model FLOPs of the steady steps / (their seconds x devices x peak dense bfloat16 FLOP/s of one); a LoRA step has "
    "4 N T + 6 n T + 12 A + 4 H S, a full one 6 N T + 12 A + 6 H S (portlab_spec.models.flops)"
)


class StepTime(Record):
    """One step that did not compile.

    Attributes:
        step: its number, from 1.
        seconds: from its call to its loss on the host.
        examples: rows.
        tokens: of the rows as given.
        computed: tokens that passed the layers: what rows share once, padding included. None where not told.
        peak_seconds: what all devices would have needed at their peak for its model FLOPs; None where that is unknown.
    """

    step: int
    seconds: float
    examples: float
    tokens: float
    computed: float | None = None
    peak_seconds: float | None = None


class Steady(Record):
    """Rates over the steps after the warm-up that did not compile.

    Attributes:
        steps: their numbers.
        seconds: of a step.
        examples_per_second, tokens_per_second: of the rows as given, whatever a trainer makes of them.
        computed_tokens_per_second: of what passed the layers.
        mfu: see MFU_FORMULA; None where the device's peak is unknown.
    """

    steps: tuple[int, ...]
    seconds: Distribution
    examples_per_second: float
    tokens_per_second: float
    computed_tokens_per_second: float | None = None
    mfu: float | None = None


class BackendRun(Record):
    """One trainer's run.

    Attributes:
        failure: what went wrong, on one line; empty if nothing did. Then the rest is as far as it came.
        device: as the trainer names it: platform, kind, count.
        recipe_digest: SHA-256 of the resolved recipe in its report.
        counts: what it says of its rows: tokens of the training rows, of the whole run, supervised ones.
        first_step_seconds: from the process's start to its first loss, without preparing data and scoring the model
            before: imports, compilation, one step. None if no loss was seen.
        steady: None if there are too few steps.
        loss: of every step.
        stages: seconds of the whole run by stage, as reported.
        peak_rss_bytes: of the process on the host; None where it is not told.
        peak_device_bytes: of the device's allocations; None where it is not told.
        findings: one that is not ok keeps the run out of tables.
        log: what it printed, beside this file.
    """

    backend: BackendName
    failure: str = ""
    device: dict[str, Any] = Field(default={})
    versions: dict[str, str] = Field(default={})
    recipe_digest: str = ""
    counts: dict[str, int] = Field(default={})
    first_step_seconds: float | None = None
    steady: Steady | None = None
    loss: tuple[float, ...] = ()
    stages: dict[str, float] = Field(default={})
    wall_seconds: float = 0.0
    peak_rss_bytes: int | None = None
    peak_device_bytes: int | None = None
    findings: tuple[Finding, ...] = ()
    log: str = ""

    @property
    def valid(self) -> bool:
        """Whether it may stand in a table."""
        return not self.failure and self.steady is not None and all(finding.ok for finding in self.findings)


class TrainRun(Record):
    """`train.json`: trainers side by side on one recipe.

    Attributes:
        recipe: resolved.
        rows_digest: SHA-256 of the training rows in the order of the data, as the recipe gives them.
        warm_up: steps from the first that count in no rate.
        findings: about all runs together.
    """

    schema_version: Literal[1] = 1
    when: str
    recipe: dict[str, Any]
    recipe_digest: str
    rows_digest: str
    warm_up: int
    client: dict[str, Any]
    mfu_formula: str = MFU_FORMULA
    runs: tuple[BackendRun, ...]
    findings: tuple[Finding, ...] = ()
