"""What is started: checks of model and adapters, and the options and variables that follow from them.

An option or a variable that the user gave is never changed.
"""

import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portlab_serve.adapter_checks import (
    Adapter,
    check_adapter,
    check_rank,
    check_target_modules,
    read_adapter,
    requested_adapters,
)
from portlab_serve.chat_template import Choice, choose, difference
from portlab_serve.command_line import ServerArgs
from portlab_serve.findings import Finding, error, note, of_error, warning
from portlab_serve.model_checks import check_model
from portlab_serve.model_folder import ModelFolder, read_model
from portlab_serve.parser_names import PARSER_NAMES, PLUGIN, REASONING_PARSER
from portlab_serve.targets import IMPL_VARIABLE, Implementation, Target, implementation
from portlab_spec.errors import UserError
from portlab_spec.formats import find_format
from portlab_spec.serving import DEFAULT_MAX_RANK, max_rank_for

SERVER = "vllm.entrypoints.openai.api_server"


@dataclass(frozen=True)
class Launch:
    """A server, ready to be started.

    Attributes:
        target: where it runs.
        implementation: whose code runs the model.
        tool_format: that its parser and template are of.
        command: the words to run.
        environment: variables to add.
        findings: of all checks.
    """

    target: Target
    implementation: Implementation
    tool_format: str | None
    command: tuple[str, ...]
    environment: Mapping[str, str]
    findings: tuple[Finding, ...]

    @property
    def shell_line(self) -> str:
        """The command and its variables as a shell takes them."""
        variables = [f"{key}={shlex.quote(value)}" for key, value in self.environment.items()]
        return " ".join([*variables, shlex.join(self.command)])

    def to_json(self) -> dict[str, Any]:
        """As an object for a machine."""
        return {
            "target": self.target,
            "implementation": self.implementation,
            "tool_format": self.tool_format,
            "command": list(self.command),
            "environment": dict(self.environment),
            "findings": [finding.to_json() for finding in self.findings],
        }


def prepare(
    args: ServerArgs,
    target: Target,
    environ: Mapping[str, str],
    tool_format: str = "auto",
    cache: Path | None = None,
) -> Launch:
    """Check what is to be served, and work out how.

    Args:
        args: the user's own.
        target: where the server runs.
        environ: the environment it will inherit.
        tool_format: of tool calls; "auto" reads it off the tokenizer, "none" sets no parser and no template.
        cache: folder for downloads and compiled programs.

    Raises:
        UserError: an unknown tool format, or --lora-modules or MODEL_IMPL_TYPE cannot be meant so.
    """
    requests = requested_adapters(args.values("--lora-modules"))
    model, findings = _read(args.model)
    findings = [*_argument_findings(args, bool(requests)), *findings]
    lora = bool(requests) or args.is_on("--enable-lora")
    code = implementation(target, model.architecture if model else "", lora=lora, environ=environ)
    chosen = _tool_format(tool_format, model)
    adapters: list[Adapter] = []
    for request in requests:
        adapter, found = read_adapter(request)
        findings += found
        adapters += [adapter] if adapter else []
    if model:
        findings += check_model(model, code, chosen)
        findings += (finding for adapter in adapters for finding in check_adapter(adapter, model, target))
    if adapters and target == "cpu":
        what = "requests to the base get the last adapter's answers whenever they share a batch with an adapter's"
        fix = "Ask one at a time, or serve the base on its own; vLLM 0.32's kernels for a CPU read -1 as the last slot"
        findings.append(note("adapter", what, "--lora-modules", fix))
    findings += check_target_modules(adapters, args.values("--lora-target-modules"))
    findings += check_rank(adapters, args.value("--max-lora-rank"))
    template = _template(args, model, chosen)
    findings += _template_findings(args, model, chosen, template)
    findings += _parser_findings(args, chosen)
    words = [*_lora_words(args, bool(requests), adapters), *_tool_words(args, chosen)]
    if template and template.path:
        words += ["--chat-template", str(template.path)]
    environment = dict(_environment(target, environ, lora=lora, cache=cache))
    command = (sys.executable, "-m", SERVER, *args.words, *words)
    return Launch(target, code, chosen, command, environment, tuple(findings))


def _argument_findings(args: ServerArgs, adapters: bool) -> Iterator[Finding]:
    yield from (note("arguments", line) for line in args.notes)
    if "--config" in args:
        what = "its options are not seen by these checks"
        yield warning("arguments", what, "--config", "Give them on the command line")
    if args.value("--generation-config") == "vllm":
        what = "generation_config.json is not read, and the stop tokens it lists are lost"
        yield warning("stops", what, "--generation-config vllm", "Leave it out, or send stop_token_ids")
    if "--override-generation-config" in args:
        what = "has lost the stop tokens of generation_config.json (vllm#45591)"
        yield warning("stops", what, "--override-generation-config", "Edit generation_config.json instead")
    if adapters and "--enable-lora" in args and not args.is_on("--enable-lora"):
        yield error("arguments", "is given beside --lora-modules", "--no-enable-lora", "Drop one of the two")


def _read(name: str) -> tuple[ModelFolder | None, list[Finding]]:
    folder = Path(name)
    if folder.is_dir():
        return read_model(folder)
    if folder.is_absolute() or name.startswith((".", "~")):
        return None, [of_error("config", UserError("no such folder", where=name, fix="Check the path, or mount it"))]
    return None, [note("config", "is no local folder: vLLM downloads it, nothing is checked", name)]


def _tool_format(asked: str, model: ModelFolder | None) -> str | None:
    if asked == "none":
        return None
    if asked != "auto":
        return find_format(asked).name
    return model.tool_format if model else None


def _family(tool_format: str) -> str:
    """The format whose parser reads a variant of it: `gemma4-31b-thinking` is read as `gemma4`."""
    return "gemma4" if tool_format.startswith("gemma4") else tool_format


# ------------------------------------------------------------------------------------------------ options


def _lora_words(args: ServerArgs, named: bool, adapters: list[Adapter]) -> Iterator[str]:
    if named and "--enable-lora" not in args:
        yield "--enable-lora"
    rank = max((adapter.rank for adapter in adapters), default=0)
    if rank > DEFAULT_MAX_RANK and "--max-lora-rank" not in args and max_rank_for(rank):
        yield from ("--max-lora-rank", str(max_rank_for(rank)))


def _tool_words(args: ServerArgs, tool_format: str | None) -> Iterator[str]:
    """The parser, unless the user chose one or wants none."""
    parser = args.value("--tool-call-parser")
    if parser is None and "--enable-auto-tool-choice" in args and not args.is_on("--enable-auto-tool-choice"):
        return
    if parser is None and tool_format:
        parser = PARSER_NAMES[_family(tool_format)]
        yield from ("--tool-call-parser", parser)
    if parser is None:
        return
    if "--enable-auto-tool-choice" not in args:
        yield "--enable-auto-tool-choice"
    if parser in PARSER_NAMES.values() and "--tool-parser-plugin" not in args:
        yield from ("--tool-parser-plugin", PLUGIN)
    if parser == PARSER_NAMES["gemma4"] and "--reasoning-parser" not in args:
        yield from ("--reasoning-parser", REASONING_PARSER, "--reasoning-parser-plugin", PLUGIN)


def _parser_findings(args: ServerArgs, tool_format: str | None) -> Iterator[Finding]:
    parser = args.value("--tool-call-parser")
    if parser == "functiongemma":
        yield warning(
            "parser",
            "vLLM's parser of that name drops numbers, booleans, lists and objects from the arguments of calls",
            "--tool-call-parser functiongemma",
            f"Leave it out, or pass {PARSER_NAMES['functiongemma']}",
        )
    elif parser and tool_format and parser not in (PARSER_NAMES[_family(tool_format)], _family(tool_format)):
        yield note("parser", f"the model's tokens are those of {tool_format}", f"--tool-call-parser {parser}")


def _template(args: ServerArgs, model: ModelFolder | None, tool_format: str | None) -> Choice | None:
    """The template to set; None if the user gave one or no format is known."""
    if tool_format is None or "--chat-template" in args:
        return None
    return choose(_shipped_name(tool_format), model.template[0] if model and model.template else None)


def _shipped_name(tool_format: str) -> str:
    """`gemma4-thinking` has the template of `gemma4`: a variable turns thinking on."""
    return tool_format.partition("@")[0].replace("-thinking", "")


def _template_findings(
    args: ServerArgs, model: ModelFolder | None, tool_format: str | None, choice: Choice | None
) -> Iterator[Finding]:
    given = args.value("--chat-template")
    if given and tool_format and Path(given).is_file():
        text = Path(given).read_text(encoding="utf-8")
        if fault := difference(text, _shipped_name(tool_format)):
            yield warning("template", fault, f"--chat-template {given}", "Leave it out: the right one is then chosen")
    elif given is None and tool_format is None and model and model.template is None:
        yield warning(
            "template",
            "the model has no chat template: chat requests will fail",
            str(model.path),
            "Pass --chat-template",
        )
    elif choice and choice.path:
        yield note("template", f"{choice.reason}: {choice.path.name} is used")
    elif choice and model and model.template is None:
        yield error("template", choice.reason, str(model.path), "Pass --chat-template")
    elif choice:
        yield note("template", choice.reason)


# -------------------------------------------------------------------------------------------- environment


def _environment(
    target: Target, environ: Mapping[str, str], *, lora: bool, cache: Path | None
) -> Iterator[tuple[str, str]]:
    wanted: dict[str, str] = {}
    if target == "vllm-tpu" and lora:
        # By default Gemma 4 runs as a JAX model, which ignores adapters.
        wanted[IMPL_VARIABLE] = "vllm"
    if cache:
        wanted |= {"HF_HOME": str(cache / "huggingface"), "VLLM_CACHE_ROOT": str(cache / "vllm")}
        if target == "vllm-tpu":
            wanted["VLLM_XLA_CACHE_PATH"] = str(cache / "xla")
    yield from ((key, value) for key, value in wanted.items() if environ.get(key, "auto") == "auto")
