"""What the commands print for people, and the same as JSON."""

import re
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from portlab_merge.diff import Difference
from portlab_merge.plan import Plan

if TYPE_CHECKING:
    from portlab_merge.logits import LogitReport

WIDTH = 110


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan for a machine: one entry per tensor that changes."""
    checkpoint = plan.checkpoint
    base = checkpoint.adapter.base
    return {
        "format": checkpoint.adapter.origin,
        "step": checkpoint.step,
        "skipped_steps": list(checkpoint.skipped),
        "base": {"path": str(plan.base.folder), "id": base.id, "revision": base.revision},
        "adapter_sha256": checkpoint.adapter.digest,
        "tensors": [
            {
                "tensor": t.tensor,
                "shape": list(t.shape),
                "dtype": t.dtype,
                "module": t.module,
                "leaf": t.leaf,
                "rank": t.rank,
                "scaling": t.scaling,
                "delta_norm": plan.delta_norm(t),
            }
            for t in plan.targets
        ],
        "token_rows": {"tensor": plan.rows.tensor, "ids": list(plan.rows.ids)} if plan.rows else None,
        "warnings": list(plan.warnings),
        "bytes": sum(header.data_bytes for header in plan.base.shards.values()),
    }


def print_plan(plan: Plan) -> None:
    """The plan as a table; |dW| comes from the factors alone."""
    table = _table("tensor", "shape", "rank", "scale", "|dW|")
    for t in plan.targets:
        table.add_row(t.tensor, _shape(t.shape), str(t.rank), f"{t.scaling:g}", f"{plan.delta_norm(t):.4g}")
    if plan.rows:
        table.add_row(plan.rows.tensor, _shape(plan.rows.shape), "", "", f"{len(plan.rows.ids)} rows")
    _print(table)
    changed = len(plan.targets) + (plan.rows is not None)
    print(
        f"{_capital(plan.checkpoint.title)}: {changed} of {len(plan.base.tensors)} tensors change; "
        f"every leaf is used exactly once. Nothing was written."
    )


def print_merge(plan: Plan, manifest: dict[str, Any], out: Path, verbose: bool = False) -> None:
    """What the merge did to each target, or with `verbose` to each tensor; a warning if rounding took much of it."""
    changes = manifest["tensors"]
    _print(_tensor_table(plan, changes) if verbose else _target_table(plan, changes))
    print(
        f"Merged {plan.checkpoint.title} into {out}: {len(changes)} tensors changed, "
        f"{len(plan.base.tensors) - len(changes)} copied unchanged."
    )
    lost = [name for name, change in changes.items() if change["survival"] < 0.5]
    if lost:
        print(
            f"Rounding to the stored dtype took more than half of the update in {len(lost)} tensors (first "
            f"{lost[0]}): use --dtype float32, or serve the adapter."
        )


def diff_json(differences: list[Difference], files: list[str], faults: list[str]) -> dict[str, Any]:
    """For a machine: tensors that are not the same, files beside the weights, what contradicts the manifest."""
    return {
        "same": sum(d.state == "same" for d in differences),
        "tensors": [asdict(d) for d in differences if d.state != "same"],
        "files": files,
        "faults": faults,
    }


def print_diff(differences: list[Difference], files: list[str], limit: int) -> None:
    """One line per kind of tensor, over its layers, then what is not a change of values."""
    table = _table("tensors that changed", "", "mean |dW|/|W|", "changed", "rows", "rank")
    kinds: dict[str, list[Difference]] = {}
    for d in differences:
        if d.state == "changed":
            kinds.setdefault(_kind(d.tensor), []).append(d)
    for name, found in kinds.items():
        table.add_row(
            name,
            str(len(found)),
            f"{fmean(d.relative_norm for d in found):.2e}",
            f"{fmean(d.changed for d in found):.1%}",
            str(max(d.rows for d in found)),
            _ranks([d.rank for d in found if not d.is_rows], limit),
        )
    if kinds:
        _print(table)
    for d in differences:
        if d.state not in ("same", "changed", "converted"):
            print(f"{d.tensor}: {d.state}")
    for line in files:
        print(f"{line}")
    counts = Counter(d.state for d in differences)
    print("Tensors: " + ", ".join(f"{count} {state}" for state, count in counts.items()) + ".")


def print_logits(report: "LogitReport") -> None:
    """How the logits of three models and of the trainer agree."""
    rows = [("base", report.base), ("merged", report.merged), ("trainer", report.golden)]
    table = _table("against base + adapter in f32", "positions", "largest |d logit|", "mean KL, nats", "first choice")
    for name, found in rows:
        if found:
            figures = (f"{found.largest:.2e}", f"{found.kl:.2e}", f"{found.first_choice:.1%}")
            table.add_row(name, str(found.positions), *figures)
    _print(table)
    if report.greedy:
        same, length = report.greedy
        print(f"Greedy answer to the probe's prompt: the first {same} of {length} tokens are the same.")


def _target_table(plan: Plan, changes: dict[str, dict[str, float]]) -> Table:
    """One line per target, over its layers: mean and largest relative norm, mean shares."""
    table = _table("target", "", "mean |dW|/|W|", "max", "changed", "survived")
    layers: dict[str, list[str]] = {}
    for target in plan.targets:
        layers.setdefault(_kind(target.module), []).append(target.tensor)
    lines = [(leaf, f"{len(tensors)} layers", tensors) for leaf, tensors in layers.items()]
    if plan.rows:
        lines.append((plan.rows.tensor, f"{len(plan.rows.ids)} rows", [plan.rows.tensor]))
    for name, size, tensors in lines:
        norms = [changes[tensor]["relative_norm"] for tensor in tensors]
        shares = [f"{fmean(changes[tensor][key] for tensor in tensors):.1%}" for key in ("changed", "survival")]
        table.add_row(name, size, f"{fmean(norms):.2e}", f"{max(norms):.2e}", *shares)
    return table


def _tensor_table(plan: Plan, changes: dict[str, dict[str, float]]) -> Table:
    table = _table("tensor", "rank", "scale", "|dW|", "|dW|/|W|", "changed", "survived")
    ranks = {t.tensor: (str(t.rank), f"{t.scaling:g}") for t in plan.targets}
    for name, change in changes.items():
        table.add_row(
            name,
            *ranks.get(name, ("rows", "")),
            f"{change['delta_norm']:.4g}",
            f"{change['relative_norm']:.2e}",
            f"{change['changed']:.1%}",
            f"{change['survival']:.1%}",
        )
    return table


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _print(table: Table) -> None:
    # A pipe gets whole lines; a terminal gets its own width.
    console = Console()
    (console if console.is_terminal else Console(width=WIDTH)).print(table)


def _ranks(ranks: list[int | None], limit: int) -> str:
    """Smallest to largest."""
    known = [rank for rank in ranks if rank is not None]
    ends = [str(end) for end in dict.fromkeys([min(known), max(known)])] if known else []
    return " to ".join([*ends[:1], f"> {limit}"] if len(known) < len(ranks) else ends)


def _kind(module: str) -> str:
    """What a module is called in every layer."""
    return re.sub(r"^.*layers\.\d+\.", "", module)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
