"""`portlab-serve [vllm serve] MODEL [vLLM's options]`: check, complete, print and run one server."""

import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

import tyro

from portlab_serve import health
from portlab_serve.command_line import ServerArgs, resolve
from portlab_serve.findings import errors_of
from portlab_serve.launch import Launch, prepare
from portlab_serve.process import ServerProcess, run
from portlab_serve.targets import Target, installed_target
from portlab_spec import cli
from portlab_spec.errors import CheckFailed, UserError

_DESCRIPTION = """Checks a model folder and its adapters, chooses template and tool parser, and runs vLLM's server.

  portlab-serve MODEL [options of `vllm serve`]
  portlab-serve vllm serve MODEL [options of `vllm serve`]
  portlab-serve --model MODEL [options of `vllm serve`]

The variable VLLM_ARGS may hold any of these too; an option on the command line replaces it there. Options that are not
listed here go to vLLM as they are. Exit code: 1 a check failed, 2 the command line is refused, else the server's."""
# With these, the server does not answer on a port over HTTP.
_NOT_HTTP = ("--uds", "--ssl-keyfile")


@dataclass(frozen=True, kw_only=True)
class Options:
    """This program's own options."""

    target: Target | None = None
    """Where the server runs; left out, that of the vLLM distribution that is installed."""
    tool_format: Annotated[str, tyro.conf.arg(metavar="auto|none|FORMAT")] = "auto"
    """Format of tool calls; auto reads it off the tokenizer's control tokens."""
    cache: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder for downloads and compiled programs; left out, PORTLAB_SERVE_CACHE or each library's own."""
    print_command: bool = False
    """Print what would run, checks included, and stop."""
    preflight_only: bool = False
    """Check and stop."""
    ignore_preflight: bool = False
    """Start in spite of failed checks."""
    check_adapter: bool = False
    """Once the server is healthy, stop it if an adapter changes nothing."""
    json: bool = False
    """With --print-command or --preflight-only: print JSON for a machine."""


def entry() -> NoReturn:
    """Console script `portlab-serve`."""
    # Process 1 of a container ignores what it has no handler for, and checks may take their time.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    cli.run("portlab-serve", main)


def main(argv: list[str]) -> int:
    """Run; returns the exit code."""
    options, rest = tyro.cli(
        Options,
        prog="portlab-serve",
        description=_DESCRIPTION,
        args=argv,
        return_unknown_args=True,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    args = resolve(rest, os.environ.get("VLLM_ARGS", ""))
    target = options.target or installed_target()
    dry = options.print_command or options.preflight_only
    if target is None and not dry:
        raise UserError("vLLM is not installed", fix="Install vllm-tpu or vllm, or pass --print-command")
    cache = options.cache or (Path(os.environ["PORTLAB_SERVE_CACHE"]) if os.getenv("PORTLAB_SERVE_CACHE") else None)
    launch = prepare(args, target or "vllm", os.environ, options.tool_format, cache)
    if options.json and dry:
        print(json.dumps({"ok": not errors_of(launch.findings), **launch.to_json()}, indent=2))
    else:
        _report(launch, command=not options.preflight_only, to_stdout=dry)
    if not options.ignore_preflight:
        _require(launch)
    if dry:
        return 0
    client_settings = _client_settings(args) if options.check_adapter else None
    if _is_plain_http(args):
        health.record(_address(args))
    return run(
        launch.command,
        {**os.environ, **launch.environment},
        lambda server: _check_adapters(server, args, client_settings) if client_settings else None,
    )


def _report(launch: Launch, *, command: bool, to_stdout: bool) -> None:
    """Findings and command: on stdout if they are all that is asked for, else beside the server's log."""
    stream = sys.stdout if to_stdout else sys.stderr
    for finding in launch.findings:
        print(finding, file=stream)
    errors = len(errors_of(launch.findings))
    verdict = f"{errors} error{'s' if errors > 1 else ''}" if errors else "ok"
    print(f"preflight: {verdict} ({launch.target}, {launch.implementation})", file=stream)
    if command:
        print(launch.shell_line, file=stream, flush=True)


def _require(launch: Launch) -> None:
    errors = len(errors_of(launch.findings))
    if errors:
        what = f"the preflight found {errors} error{'s' if errors > 1 else ''}, listed above"
        raise CheckFailed(what, fix="Mend the model folder or the options, or pass --ignore-preflight")


def _client_settings(args: ServerArgs) -> dict[str, str]:
    """Where the server will answer.

    Raises:
        UserError: there are no adapters, or it will not answer over plain HTTP.
    """
    if "--lora-modules" not in args:
        raise UserError("there is no adapter to check", where="--check-adapter", fix="Name them with --lora-modules")
    if not _is_plain_http(args):
        what = f"cannot be used with {' or '.join(_NOT_HTTP)}"
        raise UserError(what, where="--check-adapter", fix="Drop one of the two")
    key = args.value("--api-key") or os.environ.get("VLLM_API_KEY", "")
    return {"base_url": _address(args), "api_key": key}


def _is_plain_http(args: ServerArgs) -> bool:
    return not any(name in args for name in _NOT_HTTP)


def _address(args: ServerArgs) -> str:
    """The server's address, from this machine."""
    host = args.value("--host") or "127.0.0.1"
    host = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    return f"http://{f'[{host}]' if ':' in host else host}:{args.value('--port') or 8000}"


def _check_adapters(server: ServerProcess, args: ServerArgs, settings: dict[str, str]) -> None:
    import httpx

    from portlab_serve.adapter_checks import requested_adapters
    from portlab_serve.adapter_effect import measure, require_effect, wait_until_healthy

    headers = {"Authorization": f"Bearer {settings['api_key']}"} if settings["api_key"] else {}
    with httpx.Client(base_url=settings["base_url"], headers=headers, timeout=600) as client:
        if not wait_until_healthy(client, lambda: server.runs):
            return
        base = args.value("--served-model-name") or args.model
        effects = measure(client, base, [r.name for r in requested_adapters(args.values("--lora-modules"))])
    for effect in effects:
        print(f"adapter {effect.adapter}: log probabilities move by up to {effect.difference:.3g}", file=sys.stderr)
    require_effect(effects)
