"""Command lines: `accelerate launch sft.py --learning_rate 2e-4 ...`, alone or in a shell script."""

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from portlab_port.collect import Entry, complete
from portlab_port.dialects import DIALECTS
from portlab_port.dialects.calls import LAUNCHERS
from portlab_port.dialects.table import Dialect, Key
from portlab_port.settings import GpuRecipe
from portlab_spec.errors import UserError

_PROGRAMS = (
    "accelerate",
    "torchrun",
    "deepspeed",
    "python",
    "python3",
    "trl",
    "llamafactory-cli",
    "axolotl",
    "uv",
    "srun",
)
_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))")
# Launcher options that take no value.
_SWITCHES = ("standalone", "multi_gpu", "use_deepspeed", "use_fsdp", "same_network", "debug", "module")
_NEGATIVE = re.compile(r"-\d")


def read_command(text: str, source: str, by_hand: Mapping[str, Any] | None = None) -> GpuRecipe:
    """Settings of the one training command in a shell script, with the defaults of the trainer's dialect.

    Variables are replaced where the script sets them to a literal; nothing is run.

    Raises:
        UserError: no training command or several, a variable that is set nowhere, words that no option takes.
    """
    variables, commands = _lines(text, source)
    training = [words for words in commands if _is_training(words)]
    if len(training) != 1:
        what = "holds no training command" if not training else f"holds {len(training)} training commands"
        fix = "Give a file with one command, such as accelerate launch sft.py --learning_rate 2e-4"
        raise UserError(what, where=source, fix=fix)
    words = training[0]
    dialect = DIALECTS["llama-factory" if "llamafactory-cli" in words[:3] else "trl"]
    if words[0] in ("trl", "axolotl", "llamafactory-cli") or "llamafactory-cli" in words:
        file = next((word for word in words[1:] if word.endswith((".yaml", ".yml"))), None)
        if file is not None:
            raise UserError(f"its settings are in {PurePath(file).name}", where=source, fix=f"Port {file}")
    entries = [*_environment(words, variables, source), *_entries(words, dialect, source)]
    return complete("command", source, entries, dialect, dialect.keys, by_hand or {})


def _lines(text: str, source: str) -> tuple[dict[str, str], list[list[str]]]:
    variables: dict[str, str] = {}
    commands = []
    for line in re.sub(r"\\\r?\n", " ", text).splitlines():
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = _ASSIGNMENT.fullmatch(line)
        if match and not re.search(r"\s-{1,2}\w", match[2]) and "$(" not in match[2]:
            value = _words(match[2], source)
            variables[match[1]] = _filled(value[0], variables, source, strict=False) if value else ""
        else:
            if any(re.search(rf"(^|[\s/]){re.escape(program)}\s", f"{line} ") for program in _PROGRAMS):
                words = [_filled(word, variables, source) for word in _words(line, source)]
                commands.append([word for word in words if word])
    return variables, commands


def _words(line: str, source: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError as error:
        raise UserError(f"is no shell command ({error}): {line[:60]}", where=source, fix="Mend the quotes") from None


def _filled(word: str, variables: dict[str, str], source: str, strict: bool = True) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        if name in variables:
            return variables[name]
        if match[2] is not None:
            return match[2]
        if strict and word.startswith("$") and name.isupper() is False and name.isdigit():
            return ""  # "$@", "$1": more arguments, of which nothing is known
        if strict:
            raise UserError(f"the variable ${name} is set nowhere", where=source, fix=f"Write its value: {name}=...")
        return match[0]

    return _VARIABLE.sub(value, "" if word in ("$@", "$*") else word)


def _is_training(words: list[str]) -> bool:
    return any(word.startswith("--") for word in words) or any(word.endswith((".yaml", ".yml")) for word in words)


def _environment(words: list[str], variables: dict[str, str], source: str) -> Iterator[Entry]:
    named = dict(variables)
    for word in words:
        match = _ASSIGNMENT.fullmatch(word)
        if match is None:
            break
        named[match[1]] = match[2]
    for name, value in named.items():
        if name.startswith(("NCCL_", "CUDA_", "TORCH_", "PYTORCH_", "TOKENIZERS_", "OMP_", "ACCELERATE_")):
            yield Entry(name, value, source, Key("cuda_env"))
        elif name.startswith(("WANDB_", "HF_", "MLFLOW_")):
            yield Entry(name, value, source, Key("tracker_project"))


def _entries(words: list[str], dialect: Dialect, source: str) -> Iterator[Entry]:
    while words and _ASSIGNMENT.fullmatch(words[0]):
        words = words[1:]
    split = _script_at(words)
    nodes, per_node = 1, None
    for key, value in _options(words[:split], source, _SWITCHES):
        if key in ("nnodes", "num_nodes"):
            nodes = int(str(value)) if str(value).isdigit() else 1
            yield Entry(key, value, source, Key("launcher"))
        elif key in ("nproc_per_node", "num_gpus"):
            per_node = (key, value)
        elif key == "mixed_precision":
            if value in ("bf16", "fp16"):
                yield Entry(key, value, source, Key(str(value), lambda _: True))
        else:
            starts = key.startswith(("fsdp_", "deepspeed_", "zero", "offload_"))
            yield Entry(key, value, source, LAUNCHERS.get(key) or (Key("fsdp") if starts else None))
    if per_node is not None:
        key, value = per_node
        known = isinstance(value, str) and value.isdigit()
        yield Entry(key, int(str(value)) * nodes if known else value, source, Key("devices" if known else "launcher"))
    for key, value in _options(words[split:], source, ()):
        meaning = dialect.find(key)
        yield Entry(key, value, source, meaning)


def _script_at(words: list[str]) -> int:
    """Where the trainer's own options begin."""
    for index, word in enumerate(words):
        if word.endswith(".py") and not (index and _takes_value(words[index - 1])):
            return index + 1
        if word in ("-m", "--module") and index + 1 < len(words) and words[0] not in ("accelerate",):
            return index + 2
    if words and PurePath(words[0]).name in ("trl", "llamafactory-cli"):
        return 2
    return len(words)


def _takes_value(word: str) -> bool:
    return word.startswith("--") and "=" not in word and word[2:].replace("-", "_") not in _SWITCHES


def _options(words: list[str], source: str, switches: tuple[str, ...]) -> Iterator[tuple[str, object]]:
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if word in ("&&", "||", ";", "|", ">", "2>&1", "&"):
            return
        if not word.startswith("--") or len(word) == 2:
            continue
        key, equals, value = word[2:].partition("=")
        key = key.replace("-", "_")
        if equals:
            yield key, value
            continue
        values: list[str] = []
        while (
            key not in switches
            and index < len(words)
            and (not words[index].startswith("-") or _NEGATIVE.match(words[index]))
        ):
            if words[index] in ("&&", "||", ";", "|", ">", "2>&1", "&", "2>", ">>"):
                break
            if PurePath(words[index]).suffix == ".py" and values:
                break
            values.append(words[index])
            index += 1
        yield key, True if not values else values[0] if len(values) == 1 else values
