"""`portlab-bench serve | mock | ...`; each command's module holds its options and its `run`."""

from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import tyro

from portlab_bench.commands_serve import MockCommand, ServeCommand, run_mock, run_serve
from portlab_spec import cli

PROG = "portlab-bench"
Command = Annotated[ServeCommand, tyro.conf.subcommand("serve")] | Annotated[MockCommand, tyro.conf.subcommand("mock")]
RUN: dict[type, Callable[[Any], int]] = {ServeCommand: run_serve, MockCommand: run_mock}


def entry() -> NoReturn:
    """The console script."""
    cli.run(PROG, main)


def main(args: list[str]) -> int:
    """Run one command; its exit code."""
    command: Any = tyro.cli(
        Command,
        prog=PROG,
        description="TPU against GPU on speed, cost and time to first token.",
        args=args,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    return RUN[type(command)](command)
