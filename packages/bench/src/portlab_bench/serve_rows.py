"""Rows of serving: the model at its objective, the published figures beside it, and how far the model is off them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from portlab_bench.evidence import Figure
from portlab_bench.machines import Machine, Precision, parse_machine
from portlab_bench.published import Published, find_published, load_published
from portlab_bench.serve_model import FITTED_ON, MODEL, Point, ServeModel, Workload, kv_bytes
from portlab_spec.errors import UserError
from portlab_spec.models.config import GemmaConfig
from portlab_spec.models.published import published_config, published_models

GIB = 2**30
MODEL_RECORD = "portlab_bench.serve_model"


@dataclass(frozen=True)
class ServeRow:
    """A machine that serves a model.

    Attributes:
        machine: the hardware.
        model: Hugging Face id.
        work: the requests.
        weights, cache: GiB of a device.
        max_batch: sequences that memory holds; 0 if the weights do not fit.
        point: at the highest rate that meets the objective; None if none does.
    """

    machine: Machine
    model: str
    work: Workload
    weights: Figure
    cache: Figure
    max_batch: int
    point: Point | None

    def figure(self, value: float, unit: str, note: str = "") -> Figure:
        """A figure of the model."""
        return modelled(value, unit, note)


def modelled(value: float, unit: str, note: str = "") -> Figure:
    """A figure that the serving model gives; dated by the newest record that it was fitted to."""
    return Figure(
        value=value,
        unit=unit,
        evidence="modelled",
        record=MODEL_RECORD,
        date=find_published(FITTED_ON[0]).as_of,
        note=note,
    )


def config_of(model: str) -> GemmaConfig:
    """The published configuration of a model.

    Raises:
        UserError: there is none.
    """
    config = published_config(model)
    if config is None:
        raise UserError(
            "no published configuration", where=repr(model), fix=f"Use one of {', '.join(published_models())}"
        )
    return config


def serve_row(
    machine: Machine,
    work: Workload,
    ttft_p99: float | None = None,
    *,
    model: str = MODEL,
    precision: Precision = "bf16",
) -> ServeRow:
    """What a machine bears under an objective on the first token (seconds, 99 of 100 requests)."""
    serving = ServeModel(config_of(model), machine, precision)
    return ServeRow(
        machine=machine,
        model=model,
        work=work,
        weights=modelled(serving.weights / machine.devices / GIB, "GiB"),
        cache=modelled(max(0.0, serving.cache_bytes) / machine.devices / GIB, "GiB"),
        max_batch=serving.max_batch(work) if serving.fits else 0,
        point=serving.capacity(work, ttft_p99),
    )


def curve(machine: Machine, work: Workload, *, model: str = MODEL, points: int = 24) -> list[Point]:
    """Rates from light load to the highest that the machine bears."""
    serving = ServeModel(config_of(model), machine)
    top = serving.capacity(work)
    if top is None:
        return []
    rates = [top.rate * (number + 1) / points for number in range(points)]
    return [point for rate in rates if (point := serving.at(rate * (1 - 1e-9), work))]


def published_serving(model: str = MODEL, machines: Sequence[str] | None = None) -> list[Published]:
    """Published serving figures of a model that the guards let pass."""
    metrics = ("output_throughput", "total_throughput", "ttft_median", "ttft_p99", "tpot_median", "itl_mean")
    return [
        record
        for record in load_published()
        if record.model == model
        and record.metric in metrics
        and record.refused is None
        and (machines is None or record.machine in machines)
    ]


@dataclass(frozen=True)
class Check:
    """The model beside a published figure.

    Attributes:
        record: what was published.
        value: what the model says.
        fitted: whether the model was fitted to it.
    """

    record: Published
    value: float
    fitted: bool

    @property
    def factor(self) -> float:
        """Model over published."""
        return self.value / self.record.value


@cache
def checks() -> tuple[Check, ...]:
    """The model beside every published figure of Gemma 4 31B that it can say something of."""
    config = config_of(MODEL)
    found = []
    for record in published_serving():
        if "block2048" in record.id or "mtp" in record.id or "-tp4-" in record.id:
            continue  # other kernels, other splits, several tokens a step: not what is modelled
        serving = ServeModel(config, parse_machine(record.machine), record.precision or "bf16")
        if (value := _say(serving, record)) is not None:
            found.append(Check(record, value, record.id in FITTED_ON))
    capacity = find_published("zimbres-kv-bf16")
    machine = parse_machine(capacity.machine)
    serving = ServeModel(config, machine)
    each = kv_bytes(config, 1, machine.devices, windowed=False)
    found.append(Check(capacity, serving.cache_bytes / each, False))
    return tuple(found)


def _say(serving: ServeModel, record: Published) -> float | None:
    output, prompt = record.output_tokens or 0, record.prompt_tokens or 0
    if record.metric == "itl_mean" and record.batch and record.precision == "bf16":
        return serving.step_seconds(record.batch, output or 128)
    if record.metric == "tpot_median" and record.batch and prompt:
        return serving.step_seconds(record.batch, prompt + output / 2)
    if record.metric == "tpot_median" and prompt:
        # The rate is not said: so many sequences were under way as the best throughput and this pace make.
        throughput = find_published(record.id.replace("-tpot", "-throughput")).value
        return serving.step_seconds(throughput * record.value, prompt + output / 2)
    if record.metric == "ttft_median" and record.rate and prompt:
        point = serving.at(record.rate, Workload(prompt, output))
        return point.ttft if point else None
    return None
