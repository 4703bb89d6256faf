"""`merge-ckpt plan | merge | adapter | verify | diff`.

Heavy imports wait until a command runs, so that `--help` answers at once.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import tyro

from portlab_spec import cli
from portlab_spec.errors import CheckFailed, UserError

if TYPE_CHECKING:
    from portlab_merge.logits import LogitReport
    from portlab_merge.plan import Plan

BasePath = Annotated[Path | None, tyro.conf.arg(metavar="DIR")]
RunPath = Annotated[str, tyro.conf.arg(metavar="RUN")]
OutPath = Annotated[Path, tyro.conf.arg(metavar="DIR")]
FolderPath = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
StepName = Annotated[str, tyro.conf.arg(metavar="latest|N|best:METRIC")]


@dataclass(frozen=True, kw_only=True)
class _Inputs:
    ckpt: RunPath
    """Run folder, its checkpoints folder, or one step; local or gs://."""
    base: BasePath = None
    """Model folder that was fine-tuned; left out, where the run says it was."""
    step: StepName = "latest"
    """Step to read; incomplete ones are never taken."""
    alpha: float | None = None
    """LoRA's alpha, for checkpoints that do not carry it, such as Tunix's."""
    rslora: bool = False
    """With --alpha: scale by alpha / sqrt(rank) instead of alpha / rank."""
    accept_unquantized: bool = False
    """Take an adapter that was trained beside a quantised copy of the base."""
    json: bool = False
    """Print JSON for a machine instead of text."""


@dataclass(frozen=True, kw_only=True)
class PlanCommand(_Inputs):
    """Match every adapter leaf with a tensor of the base; writes nothing."""


@dataclass(frozen=True, kw_only=True)
class MergeCommand(_Inputs):
    """Write the base with the adapter merged in: safetensors that any server loads."""

    out: OutPath
    """Folder to make; must not exist."""
    dtype: Literal["keep", "float32", "bfloat16"] = "keep"
    """Dtype of the float tensors written."""
    max_shard_size: Annotated[str | None, tyro.conf.arg(metavar="5GB")] = None
    """Most bytes in a weights file; left out, the files are those of the base."""
    scale: float = 1.0
    """Factor on the whole update."""
    threads: int = field(default_factory=lambda: min(4, os.cpu_count() or 1))
    """Workers; the bytes written do not depend on it."""
    resume: bool = False
    """Go on where a killed merge of the same inputs stopped; finished files are hashed, not written again."""
    verbose: bool = False
    """Print a line for every tensor instead of one for every target."""


@dataclass(frozen=True, kw_only=True)
class AdapterCommand(_Inputs):
    """Write the adapter as a PEFT folder."""

    out: OutPath
    """Folder to make; must not exist."""
    rows_into: BasePath = None
    """Leave trained token rows out and write the base with them to this folder: servers apply none of an adapter."""
    key_style: Literal["new", "old"] = "new"
    """Names of modules inside multimodal models: of transformers since 4.52, or before."""
    check_server: Literal["none", "vllm", "vllm-tpu"] = "none"
    """Refuse if this server would not apply all of it; else print the command that serves it."""


@dataclass(frozen=True, kw_only=True)
class VerifyCommand(_Inputs):
    """Check a merged model or a PEFT folder against base and checkpoint, from disk."""

    merged: BasePath = None
    """Folder that merge wrote."""
    adapter: BasePath = None
    """Folder that adapter wrote."""
    rows_into: BasePath = None
    """The base with the token rows that adapter wrote beside it."""
    logits: bool = False
    """Also run base, base + adapter and merged model; needs the extra [logits] and room for one model in f32."""


@dataclass(frozen=True, kw_only=True)
class DiffCommand:
    """Compare two model folders: which tensors differ, by how much, and the rank of the difference."""

    a: FolderPath
    """Base."""
    b: FolderPath
    """What was made of it; if it holds a manifest, the difference is held to it."""
    max_rank: int = 128
    """Largest rank that is told from full rank."""
    json: bool = False
    """Print JSON for a machine instead of text."""


Command = (
    Annotated[PlanCommand, tyro.conf.subcommand("plan")]
    | Annotated[MergeCommand, tyro.conf.subcommand("merge")]
    | Annotated[AdapterCommand, tyro.conf.subcommand("adapter")]
    | Annotated[VerifyCommand, tyro.conf.subcommand("verify")]
    | Annotated[DiffCommand, tyro.conf.subcommand("diff")]
)


def entry() -> NoReturn:
    """Console script `merge-ckpt`."""
    # Our threads share the work; a BLAS that starts its own for each small product only slows them down.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    cli.run("merge-ckpt", main)


def main(args: list[str]) -> int:
    """Run one command; returns the exit code."""
    command: Any = tyro.cli(
        Command,
        prog="merge-ckpt",
        description="Orbax LoRA checkpoint + Hugging Face base -> merged safetensors or PEFT adapter.",
        args=args,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    commands: dict[type, Callable[[Any], int]] = {
        PlanCommand: _plan,
        MergeCommand: _merge,
        AdapterCommand: _adapter,
        VerifyCommand: _verify,
        DiffCommand: _diff,
    }
    return commands[type(command)](command)


def _plan(command: PlanCommand) -> int:
    from portlab_merge.report import plan_json, print_plan

    plan = _make_plan(command)
    if command.json:
        _print_json(plan_json(plan))
    else:
        print_plan(plan)
    return 0


def _merge(command: MergeCommand) -> int:
    from portlab_merge.overlay import MergeOptions, merge
    from portlab_merge.report import print_merge
    from portlab_merge.shards import parse_size

    plan = _make_plan(command)
    size = None if command.max_shard_size is None else parse_size(command.max_shard_size)
    options = MergeOptions(command.dtype, command.scale, size, command.threads, command.resume)
    total = sum(header.data_bytes for header in plan.base.shards.values())
    with _progress("merging", total) as progress:
        manifest = merge(plan, command.out, options, progress)
    if command.json:
        _print_json({"out": str(command.out), **manifest})
    else:
        print_merge(plan, manifest, command.out, command.verbose)
    return 0


def _adapter(command: AdapterCommand) -> int:
    from portlab_merge.overlay import MergeOptions, merge
    from portlab_merge.peft_adapter import export_adapter
    from portlab_merge.plan import refuse_overlap
    from portlab_merge.server_check import check_server

    plan, rows_into = _make_plan(command), command.rows_into
    if rows_into:
        rows, plan = plan.split()
        if rows_into.resolve() == command.out.resolve():
            raise UserError("is --rows-into too", where=f"--out {command.out}", fix="Choose two folders")
        refuse_overlap(command.out, plan.base.folder, plan.checkpoint)
    server = None if command.check_server == "none" else check_server(plan, command.check_server, command.key_style)
    if server and not server.works:
        _print_lines(list(server.reasons))
        instead = "serve the merged model: merge-ckpt merge"
        if plan.rows:
            instead = f"put the rows into the base: --rows-into DIR. Or {instead}"
        raise CheckFailed(
            f"{server.release} would not serve it: {_first_of(list(server.reasons))}",
            fix=f"Nothing was written; {instead}",
        )
    if rows_into:
        merge(rows, rows_into, MergeOptions())
    config = export_adapter(plan, command.out, command.key_style, rows_into)
    tensors = 2 * len(plan.targets) + (plan.rows is not None)
    serve = server.command(str(rows_into or plan.base.folder), str(command.out)) if server else ""
    if command.json:
        served = {"serve": serve, "notes": list(server.notes)} if server else {}
        rows_out = {"rows_into": str(rows_into)} if rows_into else {}
        _print_json({"out": str(command.out), **rows_out, "tensors": tensors, "config": config, **served})
        return 0
    print(f"Wrote {tensors} tensors, rank {config['r']}, to {command.out}.")
    if rows_into and rows.rows:
        print(f"Wrote the base with {len(rows.rows.ids)} token rows, to which the adapter belongs, to {rows_into}.")
    if server:
        print(f"{server.release} ({server.path}) serves it with:\n  {serve}")
        for note in server.notes:
            print(f"  - {note}")
    return 0


def _verify(command: VerifyCommand) -> int:
    from portlab_merge.base_model import check_base_weights
    from portlab_merge.report import print_logits
    from portlab_merge.verify import verify_adapter, verify_merged

    if command.merged is None and command.adapter is None:
        raise UserError("nothing to verify", fix="Pass --merged DIR, --adapter DIR or both")
    if command.rows_into and command.adapter is None:
        raise UserError("--rows-into is a part of an adapter", fix="Pass --adapter DIR too")
    if command.logits and command.merged is None:
        raise UserError("--logits compares a merged model", fix="Pass --merged DIR too")
    plan = _make_plan(command)
    check_base_weights(plan.base, plan.checkpoint.adapter.base)
    faults: list[str] = []
    logits = None
    if command.merged is not None:
        total = sum(header.data_bytes for header in plan.base.shards.values())
        with _progress("verifying", total) as progress:
            faults += [f"{command.merged}: {fault}" for fault in verify_merged(plan, command.merged, progress)]
    if command.adapter is not None and command.rows_into:
        rows, updates = plan.split()
        faults += [f"{command.rows_into}: {fault}" for fault in verify_merged(rows, command.rows_into)]
        faults += [
            f"{command.adapter}: {fault}" for fault in verify_adapter(updates, command.adapter, command.rows_into)
        ]
    elif command.adapter is not None:
        faults += [f"{command.adapter}: {fault}" for fault in verify_adapter(plan, command.adapter)]
    if command.logits and command.merged is not None and not faults:
        logits = _compare_logits(plan, command.merged)
        faults += [f"{command.merged}: {fault}" for fault in logits.faults()]
    if command.json:
        more = {"logits": asdict(logits)} if logits else {}
        _print_json({"ok": not faults, "faults": faults, **more, "step": plan.checkpoint.step})
    if faults:
        _print_lines(faults)
        raise CheckFailed(_first_of(faults), fix="Write it again from this checkpoint and base")
    if not command.json:
        if logits:
            print_logits(logits)
        print(f"Verified against {plan.checkpoint.title}: every tensor is what it should be.")
    return 0


def _compare_logits(plan: "Plan", merged: Path) -> "LogitReport":
    try:
        from portlab_merge.logits import compare_logits
    except ImportError as error:
        raise UserError(
            f"--logits needs {error.name}", fix="Install portlab-merge-ckpt[logits], or torch and transformers"
        ) from None
    return compare_logits(plan, merged)


def _diff(command: DiffCommand) -> int:
    from portlab_merge.base_model import open_base
    from portlab_merge.diff import contradictions, diff_models, read_claim, side_file_differences
    from portlab_merge.report import diff_json, print_diff

    if command.max_rank < 1:
        raise UserError(f"--max-rank {command.max_rank} must be at least 1", fix="Pass --max-rank 128")
    a, b = open_base(command.a), open_base(command.b)
    claim = read_claim(command.b)
    limit = max(command.max_rank, claim.rank if claim else 0)
    total = sum(header.data_bytes for header in a.shards.values())
    with _progress("comparing", total) as progress:
        differences = diff_models(a, b, limit, progress)
    files = side_file_differences(a, b)
    faults = contradictions(differences, claim) if claim else []
    if command.json:
        _print_json(diff_json(differences, files, faults))
    else:
        print_diff(differences, files, limit)
    if faults:
        _print_lines(faults)
        raise CheckFailed(_first_of(faults), where=str(command.b), fix="It is not what its manifest says: merge again")
    return 0


def _make_plan(command: _Inputs) -> "Plan":
    from portlab_merge.base_model import open_base
    from portlab_merge.checkpoint import read_checkpoint
    from portlab_merge.plan import PlanRefused, is_tied, make_plan
    from portlab_merge.sources import Given

    opened = None if command.base is None else open_base(command.base)
    given = Given(command.alpha, command.rslora, opened is None or is_tied(opened))
    checkpoint = read_checkpoint(command.ckpt, command.step, given)
    for line in checkpoint.skipped:
        print(f"merge-ckpt: passed over {line}", file=sys.stderr)
    if opened is None:
        recorded = checkpoint.adapter.base
        if not (recorded.path and Path(recorded.path).is_dir()):
            raise UserError(
                f"the run's base {recorded.id} is not at {recorded.path or 'a recorded path'}", fix="Pass --base DIR"
            )
        opened = open_base(Path(recorded.path))
    try:
        plan = make_plan(opened, checkpoint, accept_unquantized=command.accept_unquantized)
    except PlanRefused as error:
        if len(error.problems) > 1:
            _print_lines(list(error.problems))
        raise
    for line in plan.warnings:
        print(f"merge-ckpt: warning: {line}", file=sys.stderr)
    return plan


def _first_of(lines: list[str]) -> str:
    return f"{lines[0]} (and {len(lines) - 1} more)" if len(lines) > 1 else lines[0]


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def _print_lines(lines: list[str]) -> None:
    for line in lines:
        print(f"  - {line}", file=sys.stderr)


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (what, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)
