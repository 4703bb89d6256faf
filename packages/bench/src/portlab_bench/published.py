"""Figures that others published, each with source and date, and what the guards say of it.

`data/published.json` holds them. Nothing there is refused by hand: a record is refused when it is read, by the bounds
of `roofline` or by `price_lint`, and says why. What cannot be checked (an unknown model or GPU, a workload that is not
stated) is said to be unchecked.
"""

import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, model_validator

from portlab_bench import roofline
from portlab_bench.machines import Machine, Precision, parse_machine
from portlab_bench.price_lint import check_price
from portlab_bench.roofline import Verdict
from portlab_spec.conversation import Record
from portlab_spec.errors import UserError
from portlab_spec.files import read_json
from portlab_spec.models.published import published_config
from portlab_spec.prices import Plan

# What is measured -> the one unit that it is given in.
UNITS = {
    "output_throughput": "tokens/s",
    "prefill_throughput": "tokens/s",
    "total_throughput": "tokens/s",
    "train_throughput": "tokens/s",
    "chip_train_throughput": "tokens/s/chip",
    "chip_flops": "FLOP/s/chip",
    "mfu": "share",
    "step": "s",
    "hours": "h",
    "start": "s",
    "ttft_mean": "s",
    "ttft_median": "s",
    "ttft_p99": "s",
    "ttft_batch": "s",
    "tpot_median": "s",
    "itl_mean": "s",
    "run_cost": "USD",
    "token_cost": "USD/Mtoken",
    "price": "USD/h",
    "kv_capacity": "tokens",
    "speedup": "ratio",
    "cost_ratio": "ratio",
}
Metric = Literal[
    "output_throughput",
    "prefill_throughput",
    "total_throughput",
    "train_throughput",
    "chip_train_throughput",
    "chip_flops",
    "mfu",
    "step",
    "hours",
    "start",
    "ttft_mean",
    "ttft_median",
    "ttft_p99",
    "ttft_batch",
    "tpot_median",
    "itl_mean",
    "run_cost",
    "token_cost",
    "price",
    "kv_capacity",
    "speedup",
    "cost_ratio",
]


def _check_date(text: str) -> str:
    if not re.fullmatch(r"20\d\d-(0[1-9]|1[0-2])(-(0[1-9]|[12]\d|3[01]))?", text):
        raise ValueError(f"{text!r} is no date: YYYY-MM-DD, or YYYY-MM if the day is not known")
    return text


class Published(Record):
    """One figure of somebody else.

    Attributes:
        id: unique, lower case.
        model: Hugging Face id where there is one.
        machine: as `parse_machine` reads it, or free text for what is not in the hardware table.
        against: the other machine of a ratio; empty otherwise.
        precision: of the weights and, but for "w8a16" and "w4a16", of the products.
        workload: in words.
        prompt_tokens, output_tokens: of a request.
        batch: sequences decoded together.
        rate: requests per second.
        burst: requests that arrive together.
        plan: way of paying of a price.
        metric, value, unit: the figure; the unit is the metric's own.
        as_of: day, or month if the day is not known.
        dated: "made": when it was measured; "published": the source's own date; "read": the source bears none, and it
            was read on this day.
        source: address or DOI.
        note: what else a reader must know.
        verdict: of the guards; filled when the file is read.
    """

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")
    model: str = Field(min_length=1)
    machine: str = Field(min_length=1)
    against: str = ""
    precision: Precision | None = None
    workload: str = Field(min_length=1)
    prompt_tokens: int | None = Field(default=None, gt=0)
    output_tokens: int | None = Field(default=None, gt=0)
    batch: int | None = Field(default=None, gt=0)
    rate: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    burst: int | None = Field(default=None, gt=0)
    plan: Plan | None = None
    metric: Metric
    value: float = Field(gt=0, allow_inf_nan=False)
    unit: str
    as_of: Annotated[str, AfterValidator(_check_date)]
    dated: Literal["made", "published", "read"]
    source: str = Field(min_length=8)
    note: str = ""
    verdict: Verdict = Field(default=Verdict(True), exclude=True)

    @model_validator(mode="after")
    def _check(self) -> "Published":
        if self.unit != UNITS[self.metric]:
            raise ValueError(f"{self.metric} is given in {UNITS[self.metric]}, not in {self.unit}")
        if self.metric == "mfu" and self.value > 1:
            raise ValueError("a share is at most 1")
        if bool(self.against) != (self.unit == "ratio"):
            raise ValueError("a ratio names what it is against, and nothing else does")
        return self

    @property
    def refused(self) -> str | None:
        """Why the guards refuse it; None if they do not."""
        return None if self.verdict.ok else self.verdict.why

    @property
    def record(self) -> str:
        """Where it stands, for a `Figure`."""
        return f"published.json#{self.id}"


def load_published(path: Path | None = None) -> tuple[Published, ...]:
    """Records of a file, of the shipped one by default, with the guards' verdicts.

    Raises:
        UserError: no such file, not a list, an unknown key, a missing date or source, a unit that is not the metric's,
            no positive number, or an id twice; the message names the record.
    """
    if path is None:
        return _shipped()
    return _parse(read_json(path, "list of published figures"), str(path))


def find_published(identity: str) -> Published:
    """The shipped record of this id."""
    return next(record for record in load_published() if record.id == identity)


def check(record: Published) -> Verdict:
    """What the guards say of a figure."""
    if not (machine := _machine(record.machine)):
        return Verdict(True)
    if record.metric == "price":
        return check_price(machine, record.value, record.plan)
    if record.metric == "chip_flops":
        return roofline.check_rate("a chip", record.value, machine.chip.bf16_flops, "FLOP/s")
    config = published_config(record.model)
    if config is None:
        return Verdict(True)
    precision: Precision = record.precision or "bf16"
    if record.metric in ("prefill_throughput", "total_throughput"):
        return roofline.check_rate("prefill", record.value, roofline.prefill_limit(config, machine, precision))
    if record.metric == "output_throughput":
        limit = roofline.decode_limit(config, machine, precision, record.batch)
        return roofline.check_rate("decoding", record.value, limit)
    if record.metric in ("ttft_median", "ttft_mean") and record.prompt_tokens:
        least = roofline.ttft_limit(config, machine, record.prompt_tokens, precision, burst=record.burst or 1)
        return roofline.check_seconds("a first token", record.value, least)
    if record.metric in ("itl_mean", "tpot_median") and record.batch:
        least = record.batch / roofline.decode_limit(config, machine, precision, record.batch)
        return roofline.check_seconds("a step", record.value, least)
    if record.metric in ("train_throughput", "chip_train_throughput"):
        whole = record.value * (machine.chips if record.metric == "chip_train_throughput" else 1)
        return roofline.check_rate("training", whole, roofline.train_limit(config, machine))
    return Verdict(True)


def _machine(name: str) -> Machine | None:
    try:
        return parse_machine(name)
    except UserError:
        return None


@cache
def _shipped() -> tuple[Published, ...]:
    file = resources.files("portlab_bench") / "data" / "published.json"
    with resources.as_file(file) as path:
        return _parse(read_json(path, "list of published figures"), "published.json")


def _parse(raw: Any, where: str) -> tuple[Published, ...]:
    if not isinstance(raw, list) or not raw:
        raise UserError("published figures must be a list of records", where=where)
    records = [_parse_record(entry, f"{where}, record {number}") for number, entry in enumerate(raw, start=1)]
    seen: set[str] = set()
    for record in records:
        if record.id in seen:
            raise UserError("this id is there twice", where=f"{where}, {record.id}", fix="Give each record its own")
        seen.add(record.id)
    return tuple(record.model_copy(update={"verdict": check(record)}) for record in records)


def _parse_record(raw: Any, where: str) -> Published:
    if isinstance(raw, Mapping):
        where += f" ({raw.get('id', 'without an id')})"
        if "verdict" in raw or "refused" in raw:
            raise UserError("the guards refuse, the file does not", where=where, fix="Take the key out")
    try:
        return Published.model_validate(raw)
    except ValidationError as error:
        faults = "; ".join(
            ": ".join(filter(None, (".".join(map(str, e["loc"])), e["msg"].removeprefix("Value error, "))))
            for e in error.errors()
        )
        raise UserError(faults, where=where, fix="A figure needs its unit, its date and its source") from None
