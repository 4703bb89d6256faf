"""`toolspec lint | render | parse | convert | stats | split | eval | grammar`.

Imports wait until a command runs, so that `--help` answers at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import tyro
from tyro.conf import Positional

from portlab_spec import cli

Source = Annotated[str, tyro.conf.arg(metavar="DATA")]
FormatName = Annotated[str, tyro.conf.arg(metavar="FORMAT")]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How rows are read."""

    shape: str | None = None
    """Shape of every row; left out, each row's is told by its keys (docs/data.md lists them)."""
    tools: Path | None = None
    """JSON file with the tools on offer in rows that have none."""
    calls_with_text: Literal["reject", "drop", "split"] = "reject"
    """What becomes of a message with text and calls: rejected, the text dropped, or two messages."""


@dataclass(frozen=True, kw_only=True)
class LintCommand:
    """Name what the templates drop or mangle in tools, and how to rewrite it."""

    tools: Positional[Annotated[str, tyro.conf.arg(metavar="TOOLS")]] = "-"
    """JSON file of tools in any shape, or a data set, whose tools are taken; `-` is stdin."""
    format: FormatName | None = None
    """Format to lint for; left out, all of them."""
    strict: bool = False
    """Fail on warnings too."""
    fix: bool = False
    """Print the tools lowered, with limits and defaults written into their descriptions, instead of findings."""
    json: bool = False
    """Print JSON for a machine."""


@dataclass(frozen=True, kw_only=True)
class RenderCommand(Reading):
    """Show conversations as a format writes them."""

    data: Positional[Source]
    """A built-in data set, a file or folder of any shape, or `-` for stdin."""
    format: FormatName = "functiongemma"
    """Wire format."""
    id: str | None = None
    """Only the row of this id."""
    limit: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Only the first N rows; one on a terminal unless given."""
    prompt: bool = False
    """Leave out the answer, and end where the model goes on."""
    show_mask: bool = False
    """Colour what carries loss, control tokens and line ends."""
    model: str = "default"
    """Model whose tokenizer gives the ids under --json and --show-mask."""
    json: bool = False
    """One object per row: segments, token ids, mask."""


@dataclass(frozen=True, kw_only=True)
class ParseCommand:
    """Read calls and text from what a model wrote."""

    output: Positional[Annotated[str, tyro.conf.arg(metavar="FILE")]] = "-"
    """The output, control tokens written out; `-` is stdin."""
    format: FormatName = "functiongemma"
    """Wire format."""
    lenient: bool = False
    """Also read what models are known to write instead of the format."""
    ids: bool = False
    """The file holds token ids, separated by spaces or commas."""
    model: str = "default"
    """Model whose tokenizer the ids belong to."""
    json: bool = False
    """Print JSON for a machine."""


@dataclass(frozen=True, kw_only=True)
class ConvertCommand(Reading):
    """Turn rows of any shape into checked records."""

    data: Positional[Source]
    """A built-in data set, a file or folder, `-` for stdin, or the bfcl-eval wheel."""
    out: Positional[Annotated[Path, tyro.conf.arg(metavar="OUT")]] = Path("-")
    """File to write: .jsonl, .jsonl.gz or .parquet; `-` prints JSON lines."""
    to: Literal["portlab", "openai", "trl"] = "portlab"
    """Shape of what is written."""
    rejects: Path | None = None
    """File for the rows that cannot be used, with the reason of each."""
    allow_rejects: bool = False
    """Exit with 0 although some rows cannot be used."""
    json: bool = False
    """Print the summary as JSON."""


@dataclass(frozen=True, kw_only=True)
class StatsCommand(Reading):
    """Count rows, tokens, supervised share, shared prefixes, tools and arguments."""

    data: Positional[Source]
    """A built-in data set, a file or folder, or `-` for stdin."""
    format: tuple[FormatName, ...] = ("functiongemma",)
    """Formats to compare."""
    model: str = "default"
    """Model whose tokenizer counts."""
    max_length: int | None = None
    """Also count the rows that are longer."""
    json: bool = False
    """Print JSON for a machine."""


@dataclass(frozen=True, kw_only=True)
class SplitCommand(Reading):
    """Assign splits by hash, stratified by tool, and report questions that two splits share."""

    data: Positional[Source]
    """A built-in data set, a file or folder, or `-` for stdin."""
    out: Positional[Annotated[Path | None, tyro.conf.arg(metavar="OUT")]] = None
    """File to write; left out, the splits that are there are only checked."""
    validation: float = 0.0
    """Share of the validation split."""
    test: float = 0.2
    """Share of the test split."""
    seed: int = 0
    """Another seed, another split."""
    stratify: Literal["tool", "none"] = "tool"
    """Give every tool the same shares, or split by hash alone, so that added rows move none."""
    similarity: float | None = None
    """Keep questions that are at least this alike (0 to 1) in one split."""
    leak_threshold: float = 0.8
    """Report questions of two splits that are at least this alike."""
    json: bool = False
    """Print JSON for a machine."""


@dataclass(frozen=True, kw_only=True)
class EvalCommand(Reading):
    """Score a model's outputs against a data set."""

    data: Positional[Source]
    """A built-in data set, a file or folder, or the bfcl-eval wheel."""
    predictions: Positional[Annotated[str, tyro.conf.arg(metavar="PREDICTIONS")]]
    """JSON lines {"id", "output"} or {"id", "ids"}; `-` is stdin."""
    format: FormatName = "functiongemma"
    """Wire format of the outputs."""
    split: Literal["train", "validation", "test", "all"] = "test"
    """Rows to score."""
    model: str = "default"
    """Model whose tokenizer the ids belong to."""
    per_example: bool = False
    """One line per example, with the reason where it is wrong."""
    json: bool = False
    """Print JSON for a machine."""


@dataclass(frozen=True, kw_only=True)
class GrammarCommand:
    """Write the grammar that admits exactly the calls that the tools allow (llguidance Lark)."""

    tools: Positional[Annotated[str, tyro.conf.arg(metavar="TOOLS")]]
    """JSON file of tools in any shape, or a data set, whose tools are taken; `-` is stdin."""
    format: FormatName = "functiongemma"
    """Wire format."""
    calls: Literal["any", "one", "required", "none"] = "any"
    """How many calls an answer may or must hold."""
    check: bool = False
    """Compile it with llguidance and the model's tokenizer."""
    model: str = "default"
    """Model whose tokenizer --check uses."""
    json: bool = False
    """Print JSON for a machine."""


Command = (
    Annotated[LintCommand, tyro.conf.subcommand("lint")]
    | Annotated[RenderCommand, tyro.conf.subcommand("render")]
    | Annotated[ParseCommand, tyro.conf.subcommand("parse")]
    | Annotated[ConvertCommand, tyro.conf.subcommand("convert")]
    | Annotated[StatsCommand, tyro.conf.subcommand("stats")]
    | Annotated[SplitCommand, tyro.conf.subcommand("split")]
    | Annotated[EvalCommand, tyro.conf.subcommand("eval")]
    | Annotated[GrammarCommand, tyro.conf.subcommand("grammar")]
)


def entry() -> NoReturn:
    """Console script `toolspec`."""
    cli.run("toolspec", main)


def main(args: list[str]) -> int:
    """Run one command; returns the exit code."""
    command: Any = tyro.cli(
        Command,
        prog="toolspec",
        description="Tools, conversations and wire formats: lint, render, parse, convert, count, split, score.",
        args=args,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    from portlab_spec.toolspec import data_commands, format_commands, tool_commands

    commands: dict[type, Callable[[Any], int]] = {
        LintCommand: tool_commands.lint,
        GrammarCommand: tool_commands.grammar,
        RenderCommand: format_commands.render,
        ParseCommand: format_commands.parse,
        EvalCommand: format_commands.evaluate,
        ConvertCommand: data_commands.convert,
        StatsCommand: data_commands.stats,
        SplitCommand: data_commands.split,
    }
    return commands[type(command)](command)
