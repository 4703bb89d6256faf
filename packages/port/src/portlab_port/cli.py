"""`portlab-port FILE`: read a GPU recipe, write a Portlab recipe and say what became of every setting."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import tyro
import yaml

from portlab_port.build import Answers
from portlab_port.port import port
from portlab_port.read import read
from portlab_port.recipe_file import recipe_text
from portlab_port.report import as_json, counts, markdown
from portlab_port.settings import Style
from portlab_spec import cli
from portlab_spec.errors import UserError
from portlab_spec.files import write_json, write_text

_DESCRIPTION = """Reads a GPU fine-tuning recipe (TRL, Axolotl, LLaMA-Factory or Unsloth YAML, a Python script or
notebook, a command line) and writes a Portlab recipe. Scripts are parsed, never run. Without --out, the report and the
recipe are printed."""
_MOST_BYTES = 4_000_000


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `portlab-port`."""

    file: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="FILE")]]
    """The GPU recipe."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="RECIPE.yaml")] = None
    """Recipe to write; must not exist."""
    report: Annotated[Path | None, tyro.conf.arg(metavar="REPORT.md|.json")] = None
    """Report to write instead of printing it; must not exist."""
    style: Style | None = None
    """What the file is; left out, its name and keys tell."""
    devices: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """GPUs that the recipe ran on; left out, what the file says, or 1."""
    rows: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Rows of the training split: epochs become steps."""
    examples_per_row: Annotated[float | None, tyro.conf.arg(metavar="X")] = None
    """Mean number of examples in a packed row of the GPU run: packed rows become examples."""
    data: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None
    """Data set of the new recipe."""
    format: str | None = None
    """Wire format, where the model's family does not decide it."""
    set: tyro.conf.UseAppendAction[Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY=VALUE")]] = ()
    """A setting in place of the file's, by its own name: what only running a script would tell."""
    accept: tyro.conf.UseAppendAction[Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY")]] = ()
    """A setting that may be lost though it changes what is learnt."""
    strict: bool = False
    """A key that is not understood is an error."""
    json: bool = False
    """Print the report as JSON."""


def entry() -> NoReturn:
    """Console script `portlab-port`."""
    cli.run("portlab-port", main)


def main(argv: list[str]) -> int:
    """Run; returns the exit code."""
    options = tyro.cli(
        Options, prog="portlab-port", description=_DESCRIPTION, args=argv, config=(tyro.conf.FlagCreatePairsOff,)
    )
    for path in (options.out, options.report):
        if path is not None and path.exists():
            raise UserError("already exists", where=str(path), fix="Choose another name, or remove it")
    for name in ("devices", "rows", "examples_per_row"):
        value = getattr(options, name)
        if value is not None and not value >= 1:
            raise UserError(f"--{name.replace('_', '-')} must be 1 or more, not {value}", fix="Mend the option")
    gpu = read(_text(options.file), options.file.name, options.style, _assignments(options.set))
    if gpu.unknown and options.strict:
        named = ", ".join(f"{u.key} ({u.where})" for u in gpu.unknown)
        raise UserError(f"not understood: {named}", where=gpu.source, fix="Remove them, or leave out --strict")
    answers = Answers(
        options.rows, options.examples_per_row, options.data, options.format,
        options.out.stem if options.out else None, frozenset(options.accept),
    )  # fmt: skip
    ported = port(gpu, options.devices, answers)
    text = recipe_text(ported, gpu)
    if options.out is not None:
        write_text(options.out, text)
    if options.report is not None:
        if options.report.suffix == ".json":
            write_json(options.report, as_json(ported, gpu))
        else:
            write_text(options.report, markdown(ported, gpu))
    if options.json:
        print(json.dumps(as_json(ported, gpu), indent=2, ensure_ascii=False))
    elif options.report is None:
        print(markdown(ported, gpu), end="")
        if options.out is None:
            print(f"\n## Recipe\n\n```yaml\n{text}```")
    else:
        print(f"{options.file.name}: {counts(ported)}")
    return 0


def _text(path: Path) -> str:
    if path.is_dir():
        raise UserError("is a folder", where=str(path), fix="Give one file")
    if path.exists() and path.stat().st_size > _MOST_BYTES:
        raise UserError("is too large for a recipe", where=str(path), fix="Check the path")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UserError("is not text", where=str(path), fix="Check the path") from None


def _assignments(words: tuple[str, ...]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise UserError(f"--set {word} is no KEY=VALUE", fix="Write --set learning_rate=2e-4")
        try:
            values[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            values[key] = value
    return values
