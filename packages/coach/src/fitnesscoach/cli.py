"""`fitnesscoach summary | chat | ask | eval | web | login`.

Heavy imports wait until a command runs, so that `--help` answers at once.
"""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import tyro

from portlab_spec import cli
from portlab_spec.errors import EXIT_FAILED_CHECK, UserError

if TYPE_CHECKING:
    from fitnesscoach.backends import Backend
    from fitnesscoach.providers import FitnessData
    from fitnesscoach.session import Session
    from fitnesscoach.trace import Trace

API_KEY = "FITNESSCOACH_API_KEY"
Dataset = Literal["fitness-213", "fitness-plus", "fitness-plus-fixed"]


@dataclass(frozen=True, kw_only=True)
class _Data:
    data: Annotated[str, tyro.conf.arg(metavar="sample|garmin|DIR")] = "sample"
    """Where the data comes from: built-in sample, Garmin Connect, or a folder of .fit, .tcx and .gpx files."""


@dataclass(frozen=True, kw_only=True)
class _Server:
    endpoint: Annotated[str | None, tyro.conf.arg(metavar="URL")] = None
    """Base of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1. Left out, --model is a folder."""
    timeout: float = 60.0
    """Seconds for one answer of the model."""
    max_tokens: int = 256
    """Most tokens of one answer."""
    system_role: Literal["developer", "system"] = "developer"
    """Role under which a server is sent the instructions: system for models other than FunctionGemma."""
    format: str = ""
    """Wire format of a model folder; left out, what its tokenizer speaks for."""
    runtime: Literal["jax", "transformers"] | None = None
    """Who runs a model folder; left out, the first of them that is installed and knows the model."""


@dataclass(frozen=True, kw_only=True)
class _Coach(_Data, _Server):
    model: Annotated[str, tyro.conf.arg(metavar="NAME|DIR")] = ""
    """Model, as the endpoint calls it (left out, its only one); without endpoint a model folder."""
    tools: Literal["basic", "plus"] = "basic"
    """basic: seven questions about today. plus: dates, periods, workouts, goals."""
    trace: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Append every step to this file, as JSON Lines."""
    memory: int = 3
    """Earlier questions that the model still sees."""
    rounds: int = 4
    """Answers with calls that are accepted in one turn."""
    words: Literal["model", "data"] = "model"
    """Who puts results into words: the model, or nobody (for models that were trained on calls alone)."""


@dataclass(frozen=True, kw_only=True)
class SummaryCommand(_Data):
    """Show what was recorded today; needs no model."""

    json: bool = False
    """Print JSON for a machine instead of text."""


@dataclass(frozen=True, kw_only=True)
class ChatCommand(_Coach):
    """Talk to the coach on the terminal."""


@dataclass(frozen=True, kw_only=True)
class AskCommand(_Coach):
    """Ask one question; exit code 1 if it got no answer."""

    question: tyro.conf.Positional[str]
    """What you want to know."""
    json: bool = False
    """Print JSON for a machine instead of text."""


@dataclass(frozen=True, kw_only=True)
class WebCommand(_Coach):
    """Talk to the coach on a local web page."""

    host: str = "127.0.0.1"
    """Address to listen on; anything but this machine's own shows your data to the network."""
    port: int = 8037
    """Port to listen on; 0 takes a free one."""


@dataclass(frozen=True, kw_only=True)
class EvalCommand(_Server):
    """Score models on the test split of a data set."""

    model: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME|DIR")] = ()
    """Model; repeat it to score several, the first being what others are compared with."""
    dataset: Annotated[tuple[Dataset, ...], tyro.conf.UseAppendAction] = ()
    """Data set; repeat it for both. Left out: fitness-213."""
    compare: bool = False
    """Add paired differences from the first model to the table."""
    concurrency: int = 8
    """Requests at the same time."""
    limit: int = 0
    """Only the first examples of the split; 0 for all."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write everything measured, answers included, to this JSON file."""
    json: bool = False
    """Print JSON for a machine instead of tables."""


@dataclass(frozen=True, kw_only=True)
class LoginCommand:
    """Log in to Garmin Connect once and keep the tokens where the garminconnect library looks for them."""


Command = (
    Annotated[SummaryCommand, tyro.conf.subcommand("summary")]
    | Annotated[ChatCommand, tyro.conf.subcommand("chat")]
    | Annotated[AskCommand, tyro.conf.subcommand("ask")]
    | Annotated[EvalCommand, tyro.conf.subcommand("eval")]
    | Annotated[WebCommand, tyro.conf.subcommand("web")]
    | Annotated[LoginCommand, tyro.conf.subcommand("login")]
)


def entry() -> NoReturn:
    """Console script `fitnesscoach`."""
    cli.run("fitnesscoach", main)


def main(args: list[str]) -> int:
    """Run one command; returns the exit code."""
    command: Any = tyro.cli(
        Command,
        prog="fitnesscoach",
        description="A fitness coach on a small tool-calling model.",
        args=args,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    commands: dict[type, Callable[[Any], int]] = {
        SummaryCommand: _summary,
        ChatCommand: _chat,
        AskCommand: _ask,
        EvalCommand: _eval,
        WebCommand: _web,
        LoginCommand: _login,
    }
    return commands[type(command)](command)


def _summary(command: SummaryCommand) -> int:
    from rich.console import Console

    from fitnesscoach import summary
    from fitnesscoach.providers import open_data

    data = open_data(command.data)
    results = asyncio.run(summary.today(data))
    if command.json:
        _print_json(summary.as_json(data, results))
    else:
        Console(highlight=False).print(summary.as_table(data, results))
    return 0


def _chat(command: ChatCommand) -> int:
    from rich.console import Console

    from fitnesscoach.chat import Chat
    from fitnesscoach.providers import open_data
    from fitnesscoach.trace import Trace

    data = open_data(command.data)
    with asyncio.Runner() as runner, contextlib.closing(Trace.open(command.trace)) as trace:
        backend = runner.run(_open_backend(command, command.model))
        session = _session(command, backend, data, trace)
        try:
            Chat(session, trace, Console()).run(runner)
        finally:
            runner.run(backend.close())
    return 0


def _ask(command: AskCommand) -> int:
    return asyncio.run(_ask_once(command))


async def _ask_once(command: AskCommand) -> int:
    from rich.console import Console

    from fitnesscoach.providers import open_data
    from fitnesscoach.terminal import TurnView
    from fitnesscoach.trace import Trace

    data = open_data(command.data)
    with contextlib.closing(Trace.open(command.trace)) as trace:
        backend = await _open_backend(command, command.model)
        session = _session(command, backend, data, trace)
        try:
            if command.json:
                finish = await session.ask(command.question)
            else:
                with TurnView(Console()) as view:
                    finish = await session.ask(command.question, view.show)
                    view.finish(finish)
        finally:
            await backend.close()
    if command.json:
        calls = [{**r.call.model_dump(), "status": r.status, "response": r.response} for r in finish.results]
        rows = {"outcome": finish.outcome, "answer": finish.spoken, "detail": finish.detail, "calls": calls}
        _print_json(rows)
    return 0 if finish.told else EXIT_FAILED_CHECK


def _eval(command: EvalCommand) -> int:
    from rich.console import Console

    from fitnesscoach import evaluate
    from portlab_spec.files import write_json

    scored = asyncio.run(_score(command))
    rows = [evaluate.as_json(dataset, models) for dataset, models in scored.items()]
    if command.out:
        write_json(command.out, rows)
    if command.json:
        _print_json(rows)
        return 0
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    for dataset, models in scored.items():
        console.print(evaluate.as_table(dataset, models, differences=command.compare))
    return 0


async def _score(command: EvalCommand) -> dict[str, list[Any]]:
    """Scores of every model on every data set."""
    from fitnesscoach.evaluate import score_model
    from portlab_spec.data import load_dataset

    if command.compare and len(command.model) < 2:
        raise UserError("--compare needs two models", fix="Pass --model twice, the base first")
    if len(set(command.model)) < len(command.model):
        raise UserError("a model is given twice", fix="Give each --model once")
    if command.concurrency < 1 or command.limit < 0:
        raise UserError("--concurrency must be at least 1, --limit at least 0", fix="Leave them out")
    datasets: tuple[Dataset, ...] = command.dataset or ("fitness-213",)
    rows = {name: [c for c in load_dataset(name) if c.split == "test"] for name in datasets}
    scored: dict[str, list[Any]] = {name: [] for name in datasets}
    for model in command.model or ("",):  # one after the other: two folders need not fit in memory together
        backend = await _open_backend(command, model)
        try:
            for name in datasets:
                chosen = rows[name][: command.limit or None]
                with _progress(f"{backend.name}, {name}", len(chosen)) as advance:
                    scored[name].append(await score_model(backend, chosen, command.concurrency, advance))
        finally:
            await backend.close()
    return scored


def _web(command: WebCommand) -> int:
    from fitnesscoach.providers import open_data
    from fitnesscoach.trace import Trace
    from fitnesscoach.web import serve

    data = open_data(command.data)
    with contextlib.closing(Trace.open(command.trace)) as trace:

        async def run() -> None:
            backend = await _open_backend(command, command.model)
            try:
                await serve(lambda: _session(command, backend, data, trace.for_session()), command.host, command.port)
            finally:
                await backend.close()

        with contextlib.suppress(KeyboardInterrupt):  # how one stops a server
            asyncio.run(run())
    return 0


def _login(command: LoginCommand) -> int:
    from fitnesscoach.providers.garmin import login

    print(f"Logged in; the tokens are in {login()}.")
    return 0


def _session(command: _Coach, backend: "Backend", data: "FitnessData", trace: "Trace") -> "Session":
    from fitnesscoach.session import Session
    from fitnesscoach.tools import tool_set

    if command.memory < 0 or command.rounds < 1:
        raise UserError("--memory must be at least 0, --rounds at least 1", fix="Leave them out")
    return Session(
        backend,
        tool_set(command.tools, data),
        data,
        memory=command.memory,
        rounds=command.rounds,
        own_words=command.words == "model",
        trace=trace,
    )


async def _open_backend(server: _Server, model: str) -> "Backend":
    """The model that a command names.

    Raises:
        UserError: it names none, or it cannot be had.
    """
    if server.timeout <= 0 or server.max_tokens < 1:
        raise UserError("--timeout and --max-tokens must be above 0", fix="Leave them out")
    if server.endpoint:
        from fitnesscoach.backends.endpoint import Endpoint, list_models

        key = os.environ.get(API_KEY, "")
        if not model:
            names = await list_models(server.endpoint, api_key=key)
            if len(names) != 1:
                what = f"the endpoint serves {len(names)} models"
                raise UserError(what, where=server.endpoint, fix=f"Pass --model, one of: {', '.join(names[:20])}")
            (model,) = names
        return Endpoint(
            server.endpoint,
            model,
            timeout=server.timeout,
            max_tokens=server.max_tokens,
            system_role=server.system_role,
            api_key=key,
        )
    if not model:
        raise UserError("no model is given", fix="Pass --endpoint URL, or --model with a model folder")
    from fitnesscoach.backends.folder import Folder
    from portlab_spec.assets import resolve_model

    return Folder(
        resolve_model(model).path,
        name=model,
        runtime=server.runtime,
        format=server.format,
        timeout=server.timeout,
        max_tokens=server.max_tokens,
    )


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


@contextlib.contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
