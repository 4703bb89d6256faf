"""`portlab-bench serve`, `mock`, `train`, `import`, `plan`, `table`, `decide`; a command's module has its options."""

from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import tyro

from portlab_bench.commands_import import ImportCommand, run_import
from portlab_bench.commands_plan import PlanCommand, main_plan, run_plan
from portlab_bench.commands_prices import CollectCommand, ImportPricesCommand, run_collect, run_import_prices
from portlab_bench.commands_serve import MockCommand, ServeCommand, run_mock, run_serve
from portlab_bench.commands_table import DecideCommand, TableCommand, run_decide, run_table
from portlab_bench.commands_train import TrainCommand, run_train
from portlab_spec import cli

PROG = "portlab-bench"
Command = (
    Annotated[ServeCommand, tyro.conf.subcommand("serve")]
    | Annotated[TrainCommand, tyro.conf.subcommand("train")]
    | Annotated[ImportCommand, tyro.conf.subcommand("import")]
    | Annotated[PlanCommand, tyro.conf.subcommand("plan")]
    | Annotated[TableCommand, tyro.conf.subcommand("table")]
    | Annotated[DecideCommand, tyro.conf.subcommand("decide")]
    | Annotated[ImportPricesCommand, tyro.conf.subcommand("import-prices")]
    | Annotated[CollectCommand, tyro.conf.subcommand("collect")]
    | Annotated[MockCommand, tyro.conf.subcommand("mock")]
)
RUN: dict[type, Callable[[Any], int]] = {
    ServeCommand: run_serve,
    TrainCommand: run_train,
    ImportCommand: run_import,
    PlanCommand: run_plan,
    TableCommand: run_table,
    DecideCommand: run_decide,
    ImportPricesCommand: run_import_prices,
    CollectCommand: run_collect,
    MockCommand: run_mock,
}


def entry() -> NoReturn:
    """The console script."""
    cli.run(PROG, main)


def main(args: list[str]) -> int:
    """Run one command; its exit code."""
    if args[:1] == ["plan"]:  # its options are another program's
        return main_plan(args[1:])
    command: Any = tyro.cli(
        Command,
        prog=PROG,
        description="TPU against GPU on speed, cost and time to first token.",
        args=args,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    return RUN[type(command)](command)
