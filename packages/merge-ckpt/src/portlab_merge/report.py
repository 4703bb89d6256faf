"""What the commands print for people, and the same as JSON."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from portlab_merge.plan import Plan

WIDTH = 110


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan for a machine: one entry per tensor that changes."""
    metadata = plan.checkpoint.metadata
    return {
        "step": plan.checkpoint.step.number,
        "skipped_steps": list(plan.checkpoint.step.skipped),
        "base": {"path": str(plan.base.folder), "id": metadata.base.id, "revision": metadata.base.revision},
        "adapter_sha256": plan.checkpoint.digest,
        "tensors": [
            {
                "tensor": t.tensor,
                "shape": list(t.shape),
                "dtype": t.dtype,
                "leaf": f"lora/{t.leaf}",
                "row": t.row,
                "rank": t.rank,
                "scaling": t.scaling,
                "delta_norm": plan.delta_norm(t),
            }
            for t in plan.targets
        ],
        "token_rows": {"tensor": plan.rows.tensor, "ids": list(plan.rows.ids)} if plan.rows else None,
        "bytes": sum(header.data_bytes for header in plan.base.shards.values()),
    }


def print_plan(plan: Plan) -> None:
    """The plan as a table; |dW| comes from the factors alone."""
    table = _table("shape", "rank", "scale", "|dW|")
    for t in plan.targets:
        table.add_row(t.tensor, _shape(t.shape), str(t.rank), f"{t.scaling:g}", f"{plan.delta_norm(t):.4g}")
    if plan.rows:
        table.add_row(plan.rows.tensor, _shape(plan.rows.shape), "", "", f"{len(plan.rows.ids)} rows")
    _print(table)
    changed = len(plan.targets) + (plan.rows is not None)
    print(
        f"Step {plan.checkpoint.step.number}: {changed} of {len(plan.base.tensors)} tensors change; "
        f"every leaf is used exactly once. Nothing was written."
    )


def print_merge(plan: Plan, manifest: dict[str, Any], out: Path) -> None:
    """What the merge did to each tensor, and a warning if rounding took much of it."""
    table = _table("rank", "scale", "|dW|", "|dW|/|W|", "changed", "survived")
    ranks = {t.tensor: (str(t.rank), f"{t.scaling:g}") for t in plan.targets}
    for name, stats in manifest["tensors"].items():
        rank, scale = ranks.get(name, ("rows", ""))
        table.add_row(
            name,
            rank,
            scale,
            f"{stats['delta_norm']:.4g}",
            f"{stats['relative_norm']:.2e}",
            f"{stats['changed']:.1%}",
            f"{stats['survival']:.1%}",
        )
    _print(table)
    print(
        f"Merged step {manifest['checkpoint']['step']} into {out}: {len(manifest['tensors'])} tensors changed, "
        f"{len(plan.base.tensors) - len(manifest['tensors'])} copied unchanged."
    )
    lost = [name for name, stats in manifest["tensors"].items() if stats["survival"] < 0.5]
    if lost:
        print(
            f"Rounding to the stored dtype took more than half of the update in {len(lost)} tensors (first "
            f"{lost[0]}): use --dtype float32, or serve the adapter."
        )


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column("tensor", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _print(table: Table) -> None:
    # A pipe gets whole lines; a terminal gets its own width.
    console = Console()
    (console if console.is_terminal else Console(width=WIDTH)).print(table)


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
