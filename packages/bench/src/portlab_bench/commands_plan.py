"""`portlab-bench plan`: what the TPU compiler says, by `plan-tpu`, kept where tables find it."""

import dataclasses
import datetime
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from portlab_bench.records import read_record
from portlab_spec.conversation import Record
from portlab_spec.errors import UserError
from portlab_spec.files import parse_json, write_json

PROGRAM = "plan-tpu"
HELP = """usage: portlab-bench plan [--out FILE] [OPTIONS of plan-tpu]

--out FILE  Keep what plan-tpu says as a record for tables, instead of printing its tables. All else is plan-tpu's:
"""


@dataclasses.dataclass(frozen=True)
class PlanCommand:
    """Compile a recipe for TPU slices with plan-tpu, which gets every argument but --out as it is.

    Without --out its tables are printed; with it, its JSON is kept in that file.
    """

    arguments: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Of plan-tpu, such as --recipe gemma4-31b-lora --slice v6e-8 v5p-8."""
    out: Path | None = None
    """File for the record."""


class PlanRecord(Record):
    """`plan.json`: what `plan-tpu --json` printed, and how it was asked.

    Attributes:
        when: ISO 8601.
        arguments: of plan-tpu.
        plans: as it printed them, one for each slice, or each step and slice of an inference. Of each the part
            `compiled` is the compiler's, what is `modelled` follows from it; `price` names source and date.
    """

    schema_version: Literal[1] = 1
    when: str
    arguments: tuple[str, ...]
    plans: tuple[dict[str, Any], ...]


def split_arguments(args: Sequence[str]) -> PlanCommand:
    """The command from what stands behind `portlab-bench plan`: --out is ours, all else is plan-tpu's.

    Raises:
        UserError: --out without a file, or twice.
    """
    rest: list[str] = []
    out: Path | None = None
    items = iter(args)
    for item in items:
        if item != "--out" and not item.startswith("--out="):
            rest.append(item)
            continue
        value = item.partition("=")[2] if "=" in item else next(items, "")
        if not value or value.startswith("--") or out is not None:
            raise UserError("needs one file, once", where="--out", fix="For instance --out plan.json")
        out = Path(value)
    return PlanCommand(tuple(rest), out)


def run_plan(command: PlanCommand) -> int:
    """Run plan-tpu; its exit code: 0 if something fits, 1 if nothing does.

    Raises:
        UserError: it is not installed, refuses its arguments, or does not print JSON.
    """
    asks = bool({"--help", "-h"} & set(command.arguments))
    if asks:
        print(HELP, flush=True)
    program = find_planner()
    if command.out is None or asks:
        return subprocess.run([program, *command.arguments], check=False).returncode
    arguments = [*(arg for arg in command.arguments if arg != "--json"), "--json"]
    done = subprocess.run([program, *arguments], stdout=subprocess.PIPE, check=False)
    if done.returncode not in (0, 1) or not done.stdout.strip():
        # It has said why on stderr; what it did not finish is not kept.
        return done.returncode or 1
    record = PlanRecord(
        when=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        arguments=tuple(arguments),
        plans=tuple(_plans(done.stdout)),
    )
    write_json(command.out, record.model_dump(mode="json"))
    print(f"{len(record.plans)} plans -> {command.out}")
    return done.returncode


def _plans(output: bytes) -> list[dict[str, Any]]:
    try:
        plans = parse_json(output)
    except ValueError as error:
        raise UserError(f"{PROGRAM} printed no JSON ({error})", where=PROGRAM, fix="Install the same version") from None
    if not isinstance(plans, list) or not plans or not all(isinstance(plan, dict) for plan in plans):
        raise UserError(f"{PROGRAM} printed no plans", where=PROGRAM, fix="Install the same version")
    return plans


def find_planner(root: Path | None = None) -> str:
    """Where plan-tpu is: beside this interpreter, in the repository's .nox/train_jax_tpu, or on PATH.

    Args:
        root: of the repository; by default the working folder.

    Raises:
        UserError: in none of them.
    """
    folders = (Path(sys.executable).parent, (root or Path()).absolute() / ".nox/train_jax_tpu/bin")
    for folder in folders:
        if (program := folder / PROGRAM).exists():
            return str(program)
    if found := shutil.which(PROGRAM):
        return found
    raise UserError(
        f"{PROGRAM} is not installed: not beside this interpreter, not in .nox/train_jax_tpu, not on PATH",
        where="portlab-bench plan",
        fix='Run: pip install "portlab-train-jax[plan]", or nox -s plan_tpu in the repository',
    )


def load_plan(path: Path) -> PlanRecord:
    """Read a record.

    Raises:
        UserError: missing, not JSON, or not of this schema.
    """
    return read_record(path, PlanRecord, "record of a plan", "Write it with: portlab-bench plan --out FILE")


def main_plan(args: Sequence[str]) -> int:
    """Behind `portlab-bench plan`: every argument as plan-tpu takes it, without a `--` before them."""
    return run_plan(split_arguments(args))
