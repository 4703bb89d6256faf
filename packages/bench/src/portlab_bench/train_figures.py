"""From what trainers leave to figures: step times, rates, guards, the table. Pure."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from portlab_bench.metrics import distribution
from portlab_bench.schema import Finding
from portlab_bench.train_schema import BackendRun, Steady, StepTime
from portlab_spec.errors import UserError

FEWEST_STEPS = 3
MOST_SPREAD = 2.0  # between p90 and p10 of the time per token: above, something else was using the machine
# Losses of one step on the same weights and rows may differ by the order of sums alone.
TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2}
# Trainers draw the first values of an adapter each in its own way. Its output is zero until the first update, so that
# the first loss must agree; later curves may part, but by no more than this share, over the last quarter of the steps.
CURVE_TOLERANCE = 0.25
CURVE_FLOOR = 0.05  # nats: below, losses are mostly noise
_RATES = ("seconds_per_step", "examples_per_second", "tokens_per_second")


def step_times(lines: Iterable[str], where: str) -> list[StepTime]:
    """The single steps behind the running means of a run's metrics.jsonl.

    Trainers write means over all steps so far that did not compile. The k-th such step took k times the k-th mean less
    k - 1 times the one before; rows, tokens and FLOPs likewise, being rates times seconds. A step that compiled leaves
    all means as they were; so would one that took exactly the mean time for exactly the mean tokens, which no clock of
    nanoseconds gives.

    Raises:
        UserError: a line is not what trainers write, or a step comes out with a time that is not positive.
    """
    steps: list[StepTime] = []
    total = [0.0] * 5  # seconds, examples, tokens, computed tokens, seconds at the peak
    last: tuple[float, ...] | None = None
    for number, line in enumerate(lines, start=1):
        values = _object(line, f"{where}, line {number}")
        if values.get("seconds_per_step") is None:
            continue
        try:
            rates = [float(values[name]) for name in _RATES]
            rest = [values.get("computed_tokens_per_second"), values.get("mfu")]
            rates += [math.nan if value is None else float(value) for value in rest]
            step = int(values["step"])
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"is not what a trainer writes ({error})", where=f"{where}, line {number}", fix="Repeat the run"
            ) from None
        if last == (key := tuple(rates[:3])):
            continue
        last = key
        seconds = rates[0] * (len(steps) + 1)
        now = [seconds, *(rate * seconds for rate in rates[1:])]
        gained = [b - a for a, b in zip(total, now, strict=True)]
        if not gained[0] > 0:
            raise UserError(f"step {step} took {gained[0]:.3g} s", where=where, fix="Repeat the run")
        computed, peak = (None if math.isnan(value) else value for value in gained[3:])
        steps.append(
            StepTime(
                step=step,
                seconds=gained[0],
                examples=gained[1],
                tokens=gained[2],
                computed=computed,
                peak_seconds=peak,
            )
        )
        total = now
    return steps


def _object(line: str, where: str) -> Mapping[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UserError(f"is not JSON ({error})", where=where, fix="Repeat the run") from None
    if not isinstance(value, dict):
        raise UserError("is not an object", where=where, fix="Repeat the run")
    return value


def steady(times: Sequence[StepTime], warm_up: int) -> Steady | None:
    """Rates over the steps behind the warm-up; None if fewer than FEWEST_STEPS are left."""
    kept = [time for time in times if time.step > warm_up]
    seconds = sum(time.seconds for time in kept)
    spread = distribution(time.seconds for time in kept)
    if len(kept) < FEWEST_STEPS or spread is None:
        return None

    def per_second(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / seconds if len(known) == len(kept) else None

    return Steady(
        steps=tuple(time.step for time in kept),
        seconds=spread,
        examples_per_second=sum(time.examples for time in kept) / seconds,
        tokens_per_second=sum(time.tokens for time in kept) / seconds,
        computed_tokens_per_second=per_second(time.computed for time in kept),
        mfu=per_second(time.peak_seconds for time in kept),
    )


def run_findings(
    steady: Steady | None, times: Sequence[StepTime], steps: int, losses: Sequence[float], warm_up: int
) -> tuple[Finding, ...]:
    """What the guards say of one run.

    Args:
        steady: its rates.
        times: of all steps that did not compile.
        steps: that it was to take.
        losses: of the steps that it took.
        warm_up: steps that count in no rate.
    """
    count = len(steady.steps) if steady else 0
    findings = [
        Finding(guard="steps", ok=len(losses) == steps, what=f"{len(losses)} of {steps} steps were taken"),
        Finding(
            guard="steady",
            ok=steady is not None,
            what=f"{count} steady steps behind {warm_up} of warm-up"
            if steady
            else f"fewer than {FEWEST_STEPS} steps behind {warm_up} of warm-up did not compile",
        ),
        Finding(guard="finite", ok=all(map(math.isfinite, losses)), what="every loss is a number"),
    ]
    if steady:
        findings.append(_spread_of([time for time in times if time.step in set(steady.steps)]))
    if steady and steady.mfu is not None:
        ok = 0 < steady.mfu <= 1
        findings.append(Finding(guard="peak", ok=ok, what=f"{steady.mfu:.1%} of the devices' peak"))
    return tuple(findings)


def same_rows(found: Mapping[str, int], expected: Mapping[str, int]) -> Finding:
    """Whether a trainer counted the tokens that the recipe gives, in its rows, its run and its targets."""
    ok = dict(found) == dict(expected)
    what = "as the recipe gives them" if ok else f"{dict(found)}, of the recipe {dict(expected)}"
    return Finding(guard="rows of the recipe", ok=ok, what=what)


def _spread_of(times: Sequence[StepTime]) -> Finding:
    """Whether the machine was left alone: like work takes like time, by the tokens computed where steps differ."""
    alike = distribution(time.seconds / (time.computed or time.tokens) for time in times)
    assert alike is not None
    low, high = alike.quantiles["p10"].value, alike.quantiles["p90"].value
    ratio = high / low
    return Finding(guard="spread", ok=ratio <= MOST_SPREAD, what=f"p90 of the time per token is {ratio:.2f} times p10")


def compare(runs: Sequence[BackendRun], dtype: str, *, same_start: bool) -> tuple[Finding, ...]:
    """What must be the same in all runs that ended: recipe, rows, losses.

    Args:
        runs: of all trainers; those that failed are left out.
        dtype: in which the base computes; "auto" allows what bfloat16 does unless all ran on CPUs.
        same_start: whether all began from one adapter, so that every loss must agree and not the first alone.
    """
    ended = [run for run in runs if not run.failure and run.loss]
    if len(ended) < 2:
        return ()
    findings = [_same("recipe", {run.backend: run.recipe_digest for run in ended})]
    findings.append(_same("rows", {run.backend: json.dumps(run.counts, sort_keys=True) for run in ended}))
    if dtype == "auto":
        dtype = "float32" if all(run.device.get("platform") == "cpu" for run in ended) else "bfloat16"
    allowed = TOLERANCE[dtype]
    first = _spread([run.loss[0] for run in ended])
    listed = ", ".join(f"{run.backend} {run.loss[0]:.5f}" for run in ended)
    findings.append(
        Finding(guard="first loss", ok=first <= allowed, what=f"differs by {first:.1e} ({listed}); {allowed:g} allowed")
    )
    if len({len(run.loss) for run in ended}) > 1:
        findings.append(Finding(guard="losses", ok=False, what="the runs have different numbers of steps"))
    elif same_start:
        worst = max(_spread(losses) for losses in zip(*(run.loss for run in ended), strict=True))
        findings.append(
            Finding(guard="losses", ok=worst <= allowed, what=f"differ by {worst:.1e} at most; {allowed:g} allowed")
        )
    else:
        ends = [_end(run.loss) for run in ended]
        apart = max(ends) - min(ends)
        ok = apart <= max(CURVE_TOLERANCE * max(ends), CURVE_FLOOR)
        what = ", ".join(f"{run.backend} {end:.4f}" for run, end in zip(ended, ends, strict=True))
        findings.append(Finding(guard="losses", ok=ok, what=f"mean of the last quarter: {what}"))
    return tuple(findings)


def _same(guard: str, values: Mapping[str, str]) -> Finding:
    ok = len(set(values.values())) == 1
    what = "the same in all" if ok else "; ".join(f"{name}: {value}" for name, value in values.items())
    return Finding(guard=guard, ok=ok, what=what)


def _spread(losses: Sequence[float]) -> float:
    largest = max(map(abs, losses))
    return (max(losses) - min(losses)) / largest if largest else 0.0


def _end(losses: Sequence[float]) -> float:
    kept = losses[-max(1, len(losses) // 4) :]
    return sum(kept) / len(kept)


def table(runs: Sequence[BackendRun]) -> str:
    """Markdown, one line a trainer; all that it holds is measured."""
    lines = [
        "| trainer | device | examples/s | tokens/s | step, s (median) | p10 to p90, s | first step, s | MFU "
        "| peak memory, GiB | last loss | |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    return "\n".join(lines + [_row(run) for run in runs]) + "\n"


def _row(run: BackendRun) -> str:
    device = f"{run.device.get('count', '')} x {run.device.get('kind', '')}" if run.device else ""
    cells = [run.backend, device]
    # What a guard refused has no figures here: they stand in the record, with the guard's words.
    if run.steady is None or not run.valid:
        cells += [""] * 5
    else:
        s, q = run.steady, run.steady.seconds.quantiles
        cells += [
            f"{s.examples_per_second:.2f}",
            f"{s.tokens_per_second:.0f}",
            f"{q['p50'].value:.3f}",
            f"{q['p10'].value:.3f} to {q['p90'].value:.3f}",
            "" if run.first_step_seconds is None else f"{run.first_step_seconds:.1f}",
        ]
    cells.append(f"{run.steady.mfu:.1%}" if run.valid and run.steady and run.steady.mfu is not None else "")
    cells.append(_memory(run))
    cells.append(f"{run.loss[-1]:.4f}" if run.loss else "")
    refused = [f"{finding.guard}: {finding.what}" for finding in run.findings if not finding.ok]
    cells.append("; ".join([run.failure, *refused] if run.failure else refused).replace("|", "\\|"))
    return "| " + " | ".join(cells) + " |"


def _memory(run: BackendRun) -> str:
    if run.peak_device_bytes is not None:
        return f"{run.peak_device_bytes / 2**30:.2f} (device)"
    return f"{run.peak_rss_bytes / 2**30:.2f} (host)" if run.peak_rss_bytes else ""
