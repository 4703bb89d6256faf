"""What to rent: fine-tuning runs and tokens served, under an objective, at dated prices.

Machines are compared by what a month costs. A fine-tuning run is paid for from starting the machine to its last step.
Serving takes as many copies of a machine as the volume needs, at least one, all of the month: a copy bears the rate at
which 99 of 100 first tokens meet the objective, times the utilisation, because load is not flat. All times are
modelled, so the answer says how large the gap to the next machine is beside the model's own error.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from portlab_bench.costs import PLANS, for_hours, hourly, per_million, price_of
from portlab_bench.evidence import Figure, combined
from portlab_bench.machines import Machine
from portlab_bench.serve_model import Workload
from portlab_bench.serve_rows import ServeRow, checks, modelled, serve_row
from portlab_bench.train_cost import TrainRow, train_row
from portlab_spec.conversation import Record
from portlab_spec.prices import Plan, Price

MONTH = 730.0  # hours: a twelfth of 365 days
DAY = 86_400.0
_COPIES = 400  # to which break-even volumes are looked for


@dataclass(frozen=True)
class Question:
    """What is wanted.

    Attributes:
        job: what a run trains, a key of `compiled.JOBS`.
        train_runs: in a month.
        tokens_per_day: output tokens to serve.
        ttft_p99: seconds.
        work: the requests.
        utilisation: mean load over the load at the objective.
        plan: way of paying.
        provider: whose prices count; the cheapest's if None.
    """

    job: str = "gemma4-31b"
    train_runs: float = 1
    tokens_per_day: float = 50e6
    ttft_p99: float = 0.5
    work: Workload = field(default_factory=Workload)
    utilisation: float = 0.5
    plan: Plan = "on_demand"
    provider: str | None = None


class TrainOption(Record):
    """A machine to train on.

    Attributes:
        machine: its name.
        hour: USD.
        hours, start: of the steps; seconds before them.
        run, month: USD.
        memory: "compiled: fits", or that it is not known.
    """

    machine: str
    hour: Figure
    hours: Figure
    start: Figure
    run: Figure
    month: Figure
    memory: str


class ServeOption(Record):
    """A machine to serve on.

    Attributes:
        machine: its name.
        hour: USD, of one copy.
        rate: requests per second of a copy at the objective.
        throughput: output tokens per second of a copy, likewise.
        ttft_p99: seconds at that rate.
        copies: that the volume needs.
        load: share of what the copies bear that is used.
        day, month: USD for all copies.
        million: USD for a million output tokens at this volume.
    """

    machine: str
    hour: Figure
    rate: Figure
    throughput: Figure
    ttft_p99: Figure
    copies: int
    load: float
    day: Figure
    month: Figure
    million: Figure

    def copies_for(self, tokens_per_day: float, utilisation: float) -> int:
        """Copies that bear a volume."""
        return max(1, math.ceil(tokens_per_day / (DAY * self.throughput.value * utilisation) - 1e-9))

    def cost_for(self, tokens_per_day: float, utilisation: float) -> float:
        """USD a month for a volume."""
        return self.copies_for(tokens_per_day, utilisation) * self.hour.value * MONTH


class BreakEven(Record):
    """From which volume on another machine is cheaper for serving.

    Attributes:
        machine, other: the two.
        first: output tokens a day above which `other` is cheaper for the first time; None if it never is.
        always: above which it stays so; None if it does not.
        chip_price: USD an hour of a chip or GPU of `other` at which both cost the same at the volume asked for.
        chip_price_now: what it is.
    """

    machine: str
    other: str
    first: float | None
    always: float | None
    chip_price: float
    chip_price_now: float


class Platform(Record):
    """The best of TPUs, or of GPUs, for both.

    Attributes:
        name: "TPU" or "GPU".
        train, serve: machines.
        run: USD, a fine-tuning run.
        million: USD for a million output tokens at this volume.
        month: USD together.
    """

    name: str
    train: str
    serve: str
    run: Figure
    million: Figure
    month: Figure


class Sensitivity(Record):
    """The cheapest machine to serve on if one thing is otherwise.

    Attributes:
        what: the change.
        machine: then the cheapest; empty if none is left.
        month: USD then; None if none is left.
    """

    what: str
    machine: str
    month: float | None


class Answer(Record):
    """The decision; lists are sorted by cost, cheapest first.

    Attributes:
        question: as asked.
        train, serve: what can be rented.
        left_out: machines that cannot, with the reason.
        platforms: TPU and GPU, each with its best machines; only those that can do both.
        break_even: the best machine for serving against each other one.
        sensitivity: to ways of paying, utilisation and volume.
        advice: sentences.
    """

    question: dict[str, str | float]
    train: tuple[TrainOption, ...]
    serve: tuple[ServeOption, ...]
    left_out: tuple[str, ...]
    platforms: tuple[Platform, ...]
    break_even: tuple[BreakEven, ...]
    sensitivity: tuple[Sensitivity, ...]
    advice: tuple[str, ...]


def decide(question: Question, machines: Sequence[Machine]) -> Answer:
    """Compare machines."""
    left_out: list[str] = []
    rows = [serve_row(machine, question.work, question.ttft_p99) for machine in machines]
    train = list(_train_options(question, machines, left_out))
    serve = list(_serve_options(question, rows, left_out))
    train.sort(key=lambda option: option.run.value)
    serve.sort(key=lambda option: (option.month.value, -option.throughput.value))
    return Answer(
        question=_asked(question),
        train=tuple(train),
        serve=tuple(serve),
        left_out=tuple(left_out),
        platforms=tuple(_platforms(train, serve, machines)),
        break_even=tuple(break_even(serve[0], other, question, _chips(other, machines)) for other in serve[1:]),
        sensitivity=tuple(_sensitivity(question, rows)),
        advice=tuple(_advice(question, train, serve, machines)),
    )


def _asked(question: Question) -> dict[str, str | float]:
    return {
        "job": question.job,
        "train_runs": question.train_runs,
        "tokens_per_day": question.tokens_per_day,
        "ttft_p99": question.ttft_p99,
        "work": str(question.work),
        "utilisation": question.utilisation,
        "plan": question.plan,
        "provider": question.provider or "any",
    }


def _price(question: Question, machine: Machine) -> Price | None:
    return price_of(machine, question.plan, provider=question.provider)


def _train_options(question: Question, machines: Sequence[Machine], left_out: list[str]) -> Iterator[TrainOption]:
    for machine in machines:
        row = train_row(question.job, machine)
        price = _price(question, machine)
        if not row.fits:
            left_out.append(f"training on {machine.name}: {_too_large(row)}")
        elif price is None:
            left_out.append(f"training on {machine.name}: no dated {question.plan} price")
        else:
            yield _train_option(question, row, hourly(machine, price))


def _too_large(row: TrainRow) -> str:
    if row.hbm is None:
        return "the weights do not fit"
    return f"the step needs {row.hbm.value:.1f} GiB of {row.usable.value:.1f} a device, compiled"


def _train_option(question: Question, row: TrainRow, hour: Figure) -> TrainOption:
    run = for_hours(row.hours, hour, row.overhead)
    memory = "not compiled for it: whether it fits is not known"
    if row.hbm:
        memory = f"compiled: {row.hbm.value:.1f} GiB of {row.usable.value:.1f} a device"
    month = run.model_copy(update={"value": run.value * question.train_runs})
    return TrainOption(
        machine=row.machine.name, hour=hour, hours=row.hours, start=row.overhead, run=run, month=month, memory=memory
    )


def _serve_options(question: Question, rows: Sequence[ServeRow], left_out: list[str]) -> Iterator[ServeOption]:
    for row in rows:
        price = _price(question, row.machine)
        if row.max_batch < 1:
            left_out.append(f"serving on {row.machine.name}: weights and one sequence do not fit")
        elif row.point is None:
            left_out.append(
                f"serving on {row.machine.name}: misses {question.ttft_p99 * 1e3:,.0f} ms even without load (modelled)"
            )
        elif price is None:
            left_out.append(f"serving on {row.machine.name}: no dated {question.plan} price")
        else:
            yield serve_option(question, row, hourly(row.machine, price))


def serve_option(question: Question, row: ServeRow, hour: Figure) -> ServeOption:
    """What a volume costs on a machine that meets the objective."""
    assert row.point
    throughput = modelled(row.point.output_throughput, "tokens/s")
    usable = DAY * throughput.value * question.utilisation
    copies = max(1, math.ceil(question.tokens_per_day / usable - 1e-9))
    kind = combined((throughput, hour))

    def usd(value: float, unit: str = "USD") -> Figure:
        return hour.model_copy(update={"value": value, "unit": unit, "evidence": kind})

    used = question.tokens_per_day / (copies * DAY)
    return ServeOption(
        machine=row.machine.name,
        hour=hour,
        rate=modelled(row.point.rate, "requests/s"),
        throughput=throughput,
        ttft_p99=modelled(row.point.ttft_p99, "s"),
        copies=copies,
        load=question.tokens_per_day / (copies * DAY * throughput.value),
        day=usd(copies * hour.value * 24),
        month=usd(copies * hour.value * MONTH),
        million=per_million(modelled(used, "tokens/s"), hour),
    )


def break_even(best: ServeOption, other: ServeOption, question: Question, chips: int) -> BreakEven:
    """From which volume on `other` is cheaper than `best` for serving; costs go in steps of whole copies."""
    each = [DAY * option.throughput.value * question.utilisation for option in (best, other)]
    edges = sorted({size * number for size in each for number in range(1, _COPIES + 1)})
    edges = [edge for edge in edges if edge <= min(each) * _COPIES]
    # Costs are the same between two edges: cheaper[i] is about volumes up to edges[i] and above the one before.
    cheaper = [other.cost_for(edge, question.utilisation) < best.cost_for(edge, question.utilisation) for edge in edges]
    starts = [0.0, *edges[:-1]]
    first = next((start for start, good in zip(starts, cheaper, strict=True) if good), None)
    always = None
    if cheaper[-1]:
        last_bad = max((i for i, good in enumerate(cheaper) if not good), default=-1)
        always = starts[last_bad + 1]
    now = other.hour.value / chips
    return BreakEven(
        machine=best.machine,
        other=other.machine,
        first=first,
        always=always,
        chip_price=now * best.month.value / other.month.value,
        chip_price_now=now,
    )


def _chips(option: ServeOption, machines: Sequence[Machine]) -> int:
    return next(machine.chips for machine in machines if machine.name == option.machine)


def _platforms(
    train: Sequence[TrainOption], serve: Sequence[ServeOption], machines: Sequence[Machine]
) -> Iterator[Platform]:
    tpus = {machine.name for machine in machines if machine.part}
    for name, is_tpu in (("TPU", True), ("GPU", False)):
        trains = next((option for option in train if (option.machine in tpus) == is_tpu), None)
        serves = next((option for option in serve if (option.machine in tpus) == is_tpu), None)
        if trains and serves:
            together = serves.month.model_copy(update={"value": trains.month.value + serves.month.value})
            yield Platform(
                name=name,
                train=trains.machine,
                serve=serves.machine,
                run=trains.run,
                million=serves.million,
                month=together,
            )


def _sensitivity(question: Question, rows: Sequence[ServeRow]) -> Iterator[Sensitivity]:
    changes = [(f"paid {plan}", replace(question, plan=plan)) for plan in PLANS]
    changes += [
        (f"utilisation {share:g}", replace(question, utilisation=share)) for share in (0.1, 0.25, 0.5, 0.75, 1.0)
    ]
    changes += [
        (f"{factor:g}x the volume", replace(question, tokens_per_day=question.tokens_per_day * factor))
        for factor in (0.1, 10, 100)
    ]
    for what, asked in changes:
        options = list(_serve_options(asked, rows, []))
        best = min(options, key=lambda option: option.month.value, default=None)
        yield Sensitivity(what=what, machine=best.machine if best else "", month=best.month.value if best else None)


def model_error() -> float:
    """The worst factor between the serving model and a published figure that it was not fitted to."""
    return max(max(check.factor, 1 / check.factor) for check in checks() if not check.fitted)


def _advice(
    question: Question, train: Sequence[TrainOption], serve: Sequence[ServeOption], machines: Sequence[Machine]
) -> Iterator[str]:
    if not serve:
        yield (
            f"No machine here serves {question.work} with 99 of 100 first tokens in {question.ttft_p99 * 1e3:,.0f} ms "
            "at a known price. A larger slice, a shorter prompt or a later objective would do."
        )
    if train:
        best = train[0]
        share = best.start.value / 3600 / (best.hours.value + best.start.value / 3600)
        yield (
            f"Fine-tune on {best.machine} ({best.hour.note}): {best.run.value:,.2f} USD a run, {share:.0%} of it "
            f"before the first step. Memory: {best.memory}."
        )
        if best.memory.startswith("not") and (sure := next((o for o in train if o.memory[0] == "c"), None)):
            yield (
                f"The cheapest whose step the compiler has seen is {sure.machine}: {sure.run.value:,.2f} USD a run, "
                f"{sure.memory}."
            )
    if not serve:
        return
    best_serve, error = serve[0], model_error()
    yield (
        f"Serve on {best_serve.machine} ({best_serve.hour.note}): {best_serve.copies} of it, "
        f"{best_serve.day.value:,.0f} USD a day, {best_serve.month.value:,.0f} USD a month, "
        f"{best_serve.million.value:,.2f} USD per million output tokens; {best_serve.load:.0%} loaded on average."
    )
    if train and (both := train[0].month.value + best_serve.month.value):
        yield (
            f"Together {both:,.0f} USD a month; training is {train[0].month.value / both:.1%} of it: "
            + ("serving decides." if train[0].month.value < both / 2 else "training decides.")
        )
    if len(serve) > 1:
        other = serve[1]
        gap = other.month.value / best_serve.month.value
        price = break_even(best_serve, other, question, _chips(other, machines))
        yield (
            f"Next is {other.machine}, {gap:.2f}x as dear; at {price.chip_price:.2f} USD an hour for a chip or GPU, "
            f"now {price.chip_price_now:.2f}, it would cost the same."
        )
        if gap < error:
            yield (
                f"That gap is smaller than the model's error (up to {error:.1f}x beside published runs): measure both "
                "with `portlab-bench serve` before you commit."
            )
    if best_serve.copies == 1 and best_serve.load < question.utilisation / 2:
        yield "One copy is more than the volume needs: the cheapest hour decides, not the cheapest token."


def to_json(answer: Answer) -> str:
    """For machines."""
    return json.dumps(answer.model_dump(mode="json"), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
