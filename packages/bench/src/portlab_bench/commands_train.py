"""`portlab-bench train`: trainers side by side on one recipe."""

import dataclasses
import sys
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from portlab_bench import train_run
from portlab_bench.train_figures import table
from portlab_bench.train_schema import BackendName, TrainRun
from portlab_spec.errors import EXIT_FAILED_CHECK, UserError
from portlab_spec.files import write_text
from portlab_spec.recipe import load_recipe
from portlab_spec.run.command_line import DEFAULT_RECIPE


@dataclasses.dataclass(frozen=True)
class TrainCommand:
    """Train one recipe with several trainers, one after the other, and compare step times, memory and losses.

    Each trainer runs in its own environment, by default those of nox: .nox/train_jax, .nox/train_xla,
    .nox/train_torchax.
    """

    out: Path
    """New folder for train.json, train.md, and each trainer's run and log."""
    recipe: str = DEFAULT_RECIPE
    """Recipe by name or path to a YAML file."""
    backends: str = "jax,xla,torchax"
    """Trainers in the order of running, with commas: jax, xla, torchax, and trl: TRL as it is, in a checkout."""
    steps: int | None = None
    """Optimiser steps instead of the recipe's."""
    set: tuple[str, ...] = ()
    """Other values of the recipe, KEY=VALUE, such as lora.rank=8."""
    python: tuple[str, ...] = ()
    """Interpreters of the trainers' environments, BACKEND=PATH, where they are not nox's."""
    finished: tuple[str, ...] = ()
    """Finished runs of the same recipe that are read instead, BACKEND=FOLDER: of another machine, say."""
    trl_rows: int = 2
    """Rows that TRL computes at a time; the others do what the recipe says."""
    device: Literal["auto", "cpu", "cuda", "tpu"] = "auto"
    """Device for all; auto leaves it to each trainer."""
    warm_up: int = 2
    """Steps from the first that count in no rate, beside those that compile."""
    timeout: float | None = None
    """Seconds that a trainer may take."""


def run_train(command: TrainCommand) -> int:
    """Run the trainers, print the table; 1 if one failed or a guard refuses a figure.

    Raises:
        UserError: bad options, a trainer that is not installed, data that cannot be read; nothing has run then.
    """
    names = parse_backends(command.backends)
    if command.warm_up < 1:
        raise UserError("the first step compiles: it is always warm-up", where="--warm-up", fix="Give 1 or more")
    if command.trl_rows < 1:
        raise UserError("must be 1 or more", where="--trl-rows", fix="Leave it out for 2")
    if command.timeout is not None and not command.timeout > 0:
        raise UserError("must be above 0", where="--timeout", fix="Leave it out for no limit")
    overrides = parse_overrides(command.set) | ({"steps": command.steps} if command.steps is not None else {})
    recipe = load_recipe(command.recipe, overrides)
    pythons = parse_pairs("--python", command.python, names)
    finished = parse_pairs("--finished", command.finished, names)
    trainers = [
        train_run.find_trainer(name, python=pythons.get(name), device=command.device)
        for name in names
        if name not in finished
    ]
    record = train_run.run_all(
        recipe,
        trainers,
        command.out,
        warm_up=command.warm_up,
        timeout=command.timeout,
        say=lambda line: print(line, file=sys.stderr, flush=True),
        load=train_run.load_work,
        trl_rows=command.trl_rows,
        finished=finished,
    )
    text = render(record)
    write_text(command.out / "train.md", text)
    print(text, end="")
    return 0 if all(run.valid for run in record.runs) and all(f.ok for f in record.findings) else EXIT_FAILED_CHECK


def render(record: TrainRun) -> str:
    """The table and what the guards say of all runs together."""
    lines = [f"- {'holds' if found.ok else '**FAILS**'}: {found.guard}: {found.what}" for found in record.findings]
    head = f"{record.recipe['name']}: {record.recipe['steps']} steps of {record.recipe['batch_size']} rows, measured"
    return "\n".join([head, "", table(record.runs), *lines]) + ("\n" if lines else "")


def parse_backends(text: str) -> list[BackendName]:
    """Names from a list with commas.

    Raises:
        UserError: empty, unknown or twice.
    """
    known = get_args(BackendName)
    names: list[Any] = [part.strip() for part in text.split(",") if part.strip()]
    if not names or len(set(names)) != len(names) or (unknown := [name for name in names if name not in known]):
        what = f"unknown {', '.join(unknown)}" if names and len(set(names)) == len(names) else "each once, at least one"
        raise UserError(what, where=f"--backends {text}", fix=f"There are: {', '.join(known)}")
    return names


def parse_overrides(pairs: tuple[str, ...]) -> dict[str, Any]:
    """Recipe values from KEY=VALUE, the value as in YAML.

    Raises:
        UserError: no "=", or not YAML.
    """
    values = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            equals, value = "", None
        if not equals or not key:
            raise UserError("is not KEY=VALUE", where=f"--set {pair}", fix="For instance --set lora.rank=8")
        values[key] = value
    return values


def parse_pairs(option: str, pairs: tuple[str, ...], names: list[BackendName]) -> dict[BackendName, Path]:
    """Paths by backend, from BACKEND=PATH.

    Raises:
        UserError: not of that form, or of a backend that does not run.
    """
    found: dict[BackendName, Path] = {}
    for pair in pairs:
        text, equals, path = pair.partition("=")
        name = next((known for known in names if known == text), None)
        if not equals or not path or name is None:
            raise UserError(
                "is not BACKEND=PATH of a backend that runs",
                where=f"{option} {pair}",
                fix=f"Backends: {', '.join(names)}",
            )
        found[name] = Path(path)
    return found
