"""Base, adapter and merged model on servers, scored like the run that made them: same questions, same metrics."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fitnesscoach.backends.endpoint import Endpoint
from fitnesscoach.evaluate import Scored, compare, score_model
from portlab_spec.conversation import Conversation
from portlab_spec.report import Evaluation, Report
from vllm_server import VllmServer

METRICS = ("call_exact", "name_accuracy", "schema_valid_rate", "hallucinated_tool_rate")


def score(server: VllmServer, model: str, name: str, rows: Sequence[Conversation], max_tokens: int) -> Scored:
    """Scores of one model of a server over HTTP, under a name of its own."""

    async def ask() -> Scored:
        backend = Endpoint(f"{server.root}/v1", model, timeout=600, max_tokens=max_tokens)
        backend.name = name
        try:
            return await score_model(backend, rows, 16, lambda: None)
        finally:
            await backend.close()

    return asyncio.run(ask())


def figures(scored: Sequence[Scored], report: Report) -> dict[str, Any]:
    """Counts of each server beside those of the run, and what differs from the merged model."""
    out: dict[str, Any] = {
        "trained run, before": _counts(report.before),
        "trained run, after": _counts(report.after),
        **{
            s.model: {
                **{m: [s.metrics[m].hits, s.metrics[m].count] for m in METRICS if m in s.metrics},
                "seconds": round(s.seconds, 1),
            }
            for s in scored
        },
    }
    return out


def _counts(evaluation: Evaluation) -> dict[str, list[int]]:
    return {m: [evaluation.metrics[m].hits, evaluation.metrics[m].count] for m in METRICS if m in evaluation.metrics}


def faults(base: Scored, adapter: Scored, merged: Scored, report: Report) -> list[str]:
    """Where servers and run disagree by more than the intervals of the run and of paired differences allow.

    Two questions beyond an interval are let pass: an interval of none of 63 has no width, and one answer in float32
    and in bfloat16 may differ.
    """
    found = []
    for scored, evaluation in ((base, report.before), (adapter, report.after), (merged, report.after)):
        metric, measured = evaluation.metrics["call_exact"], scored.metrics["call_exact"]
        slack = 2 / metric.count
        if not metric.low - slack <= measured.value <= metric.high + slack:
            wanted = f"{metric.low:.3f} to {metric.high:.3f}"
            found.append(f"{scored.model}: call_exact {measured.value:.3f} is outside of the run's {wanted}")
    difference = compare(adapter, merged)["call_exact"]
    if not difference.low <= 0 <= difference.high:
        found.append(f"merged differs from the adapter by {difference.value:+.3f} in call_exact")
    return found


def read_report(run: Path) -> Report:
    """The report of a run."""
    return Report.model_validate_json((run / "report.json").read_text(encoding="utf-8"))
