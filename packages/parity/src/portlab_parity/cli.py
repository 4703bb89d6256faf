"""`portlab-parity --recipe R --backends A,B`, and `portlab-parity compare A_DIR B_DIR`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import tyro
import yaml

from portlab_parity.causes import Finding, explain
from portlab_parity.compare import Comparison, compare
from portlab_parity.prepare import ROWS, STEPS, prepare
from portlab_parity.report import as_json, describe
from portlab_parity.run import find_backend, folder_for, run_backend
from portlab_spec import cli
from portlab_spec.errors import CheckFailed, UserError
from portlab_spec.evidence import Evidence
from portlab_spec.recipe import load_recipe

PROG = "portlab-parity"


@dataclass(frozen=True, kw_only=True)
class RunCommand:
    """Run backends on a few rows of a recipe and compare each with the first, up to the first difference."""

    recipe: str
    """A shipped recipe's name, or a YAML file."""
    backends: str
    """Two or more of jax, xla, torchax, plain and scripts (mine.py), comma-separated; the first is the reference."""
    set: tuple[str, ...] = ()
    """Other values for the recipe's fields: model=FOLDER lora.rank=8 lora.train_control_rows=false."""
    rows: int = ROWS
    """Rows of a step."""
    steps: int = STEPS
    """Steps to take."""
    dtype: str = "float32"
    """Compute type; in bfloat16 less can be told from rounding."""
    python: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=PATH")] = ()
    """Interpreters that have the backends, jax=PATH xla=PATH; by default those of the repository's environments."""
    device: str = "cpu"
    """cpu, or auto: what each backend finds."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder to keep work and evidence in; by default they go."""
    timeout: float | None = None
    """Seconds that a backend may take."""
    json: bool = False
    """Print JSON for a machine instead of text."""


@dataclass(frozen=True, kw_only=True)
class CompareCommand:
    """Compare evidence that is there already."""

    a: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="A_DIR")]
    """Evidence of one backend."""
    b: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="B_DIR")]
    """Evidence of the other."""
    json: bool = False
    """Print JSON for a machine instead of text."""


def entry() -> NoReturn:
    """The console script."""
    cli.run(PROG, main)


def main(args: list[str]) -> int:
    """Run the command; its exit code."""
    config = (tyro.conf.FlagCreatePairsOff,)
    if args[:1] == ["compare"]:
        command = tyro.cli(CompareCommand, prog=f"{PROG} compare", args=args[1:], config=config)
        return finish([(Evidence.load(command.a), Evidence.load(command.b))], as_text=not command.json)
    if args[:1] == ["run"]:
        args = args[1:]
    return run(tyro.cli(RunCommand, prog=PROG, args=args, config=config))


def run(command: RunCommand) -> int:
    """Run the backends and compare them.

    Raises:
        UserError: fewer than two backends, or one that cannot be found.
        CheckFailed: they differ.
    """
    names = [name.strip() for name in command.backends.split(",") if name.strip()]
    if len(names) < 2 or len(set(names)) < len(names):
        raise UserError("two different backends are compared", where="--backends", fix="Give --backends jax,xla")
    pythons = dict(_python(entry) for entry in command.python)
    backends = [find_backend(name, pythons, Path(), command.device) for name in names]
    recipe = load_recipe(command.recipe, {"dtype": command.dtype} | _changes(command.set))
    with folder_for(command.out) as folder:
        prepare(recipe, folder / "work", rows=command.rows, steps=command.steps)
        found = []
        for backend in backends:
            evidence, seconds = run_backend(backend, folder / "work", folder / backend.name, command.timeout)
            if not command.json:
                print(f"{backend.name}: evidence in {seconds:.0f} s, on {evidence.about.device}", flush=True)
            found.append(evidence)
        return finish([(found[0], other) for other in found[1:]], as_text=not command.json)


def _changes(texts: Sequence[str]) -> dict[str, Any]:
    """Values of the recipe's fields, as YAML reads them."""
    changes = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"{text!r} sets no field", where="--set", fix="Give KEY=VALUE, as in lora.rank=8")
        changes[key] = yaml.safe_load(value)
    return changes


def _python(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not equals:
        raise UserError(
            f"{text!r} names no backend", where="--python", fix="Give NAME=PATH, as in jax=.venv/bin/python"
        )
    return name, Path(path)


def finish(pairs: list[tuple[Evidence, Evidence]], *, as_text: bool) -> int:
    """Compare, print, and fail where two differ.

    Raises:
        CheckFailed: names the first pair that differs.
    """
    results: list[tuple[Comparison, Finding | None]] = []
    for a, b in pairs:
        comparison = compare(a, b)
        finding, untested = explain(comparison, a, b)
        results.append((comparison, finding))
        if as_text:
            print(describe(comparison, finding, untested), flush=True)
    if not as_text:
        print(json.dumps([as_json(*result) for result in results], indent=2))
    for comparison, finding in results:
        if comparison.difference is not None:
            cause = f": {finding.cause.name} in {finding.backend}" if finding else ""
            raise CheckFailed(
                f"{comparison.backends[0]} and {comparison.backends[1]} differ in {comparison.difference.stage}{cause}",
                fix=finding.cause.fix if finding else "No known cause fits",
            )
    return 0
