"""One command line out of the ways to ask for a server: `vllm serve MODEL`, `--model X`, and VLLM_ARGS.

Options keep their spelling and their order; only the model is taken out, to be written the same way always. What wins:
the command line over VLLM_ARGS, option by option, and both over what this program would choose.
"""

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from portlab_spec.errors import UserError

# vLLM's short forms of options that are looked at here (vllm/engine/arg_utils.py).
_SHORT = {"-tp": "--tensor-parallel-size", "-dp": "--data-parallel-size", "-pp": "--pipeline-parallel-size"}
# Options that vLLM adds up when they stand twice; of any other it takes the last alone.
_REPEATABLE = {"--middleware"}
_NEGATIVE = re.compile(r"-[\d.]")


@dataclass(frozen=True)
class Option:
    """One option as it was written.

    Attributes:
        name: long form with dashes, without a leading `no-`.
        words: option and values as given.
        values: the values.
        negated: it was written `--no-...`.
    """

    name: str
    words: tuple[str, ...]
    values: tuple[str, ...]
    negated: bool = False


@dataclass(frozen=True)
class ServerArgs:
    """What vLLM's server is to be started with.

    Attributes:
        model: Hugging Face id or folder.
        options: all others, in order.
        notes: what was decided between two sources.
    """

    model: str
    options: tuple[Option, ...] = ()
    notes: tuple[str, ...] = ()

    def __contains__(self, name: str) -> bool:
        return any(option.name == name for option in self.options)

    def values(self, name: str) -> tuple[str, ...]:
        """Values of an option, none if it is absent."""
        return next((option.values for option in self.options if option.name == name), ())

    def value(self, name: str) -> str | None:
        """The one value of an option."""
        return next(iter(self.values(name)), None)

    def is_on(self, name: str) -> bool:
        """Is a switch on?"""
        found = next((option for option in self.options if option.name == name), None)
        return found is not None and not found.negated and found.values[:1] not in (("false",), ("False",))

    @property
    def words(self) -> list[str]:
        """The words of the command line."""
        return ["--model", self.model, *(word for option in self.options for word in option.words)]


def resolve(argv: Sequence[str], vllm_args: str = "") -> ServerArgs:
    """The one command line that is meant.

    Args:
        argv: words after the program's name, without its own options.
        vllm_args: content of VLLM_ARGS, in a shell's syntax.

    Raises:
        UserError: no model, two models, an option twice or on and off in one source, or another command than `serve`.
    """
    try:
        inherited = shlex.split(vllm_args)
    except ValueError as error:
        raise UserError(str(error), where="VLLM_ARGS", fix="Close the quote") from None
    models: dict[str, str] = {}
    options: dict[str, Option] = {}
    notes = []
    for source, words in (("VLLM_ARGS", inherited), ("the command line", argv)):
        model, given = _read(words, source)
        models |= dict.fromkeys(model, source)
        for name, option in given.items():
            if name in options and options[name] != option:
                notes.append(f"{shlex.join(option.words)} replaces {shlex.join(options[name].words)} of VLLM_ARGS")
            options[name] = option
    if len(models) > 1:
        named = " and ".join(f"{model} ({source})" for model, source in models.items())
        raise UserError(f"two models are named: {named}", fix="Name one")
    if not models:
        raise UserError("no model is named", fix="portlab-serve MODEL, with the model before all options, or --model")
    return ServerArgs(next(iter(models)), tuple(options.values()), tuple(notes))


def _read(words: Sequence[str], source: str) -> tuple[list[str], dict[str, Option]]:
    """The models that a source names, and its options by name."""
    rest = list(words)
    if rest[:1] == ["vllm"]:
        if rest[1:2] != ["serve"]:
            raise UserError(
                f"vllm {' '.join(rest[1:2])} is not served here".replace("  ", " "),
                where=source,
                fix="Only `vllm serve` is; run another command with `docker run --entrypoint vllm`",
            )
        rest = rest[2:]
    start = next((i for i, word in enumerate(rest) if _is_option(word)), len(rest))
    models, given = rest[:start], list(_options(rest[start:]))
    by_name: dict[str, Option] = {}
    for option in given:
        if option.name == "--model":
            models += option.values or [""]
            continue
        name = f"{option.name} {option.values}" if option.name in _REPEATABLE else option.name
        if by_name.setdefault(name, option) != option:
            raise UserError(
                f"{shlex.join(by_name[name].words)} and {shlex.join(option.words)} contradict each other",
                where=source,
                fix=f"vLLM would take the last alone: give {option.name} once, with all its values",
            )
    if "" in models:
        raise UserError("--model has no value", where=source, fix="Name the model's folder or Hugging Face id")
    return models, by_name


def _options(words: Iterable[str]) -> Iterable[Option]:
    group: list[str] = []
    for word in words:
        if _is_option(word) and group:
            yield _option(group)
            group = []
        group.append(word)
    if group:
        yield _option(group)


def _option(words: Sequence[str]) -> Option:
    head, equals, value = words[0].partition("=")
    name = _SHORT.get(head, head)
    if name.startswith("--"):
        # vLLM takes underscores for dashes; what follows a dot is a key inside a JSON value.
        top, dot, key = name.partition(".")
        name = top.replace("_", "-") + dot + key
    negated = name.startswith("--no-")
    values = ((value,) if equals else ()) + tuple(words[1:])
    return Option(f"--{name.removeprefix('--no-')}" if negated else name, tuple(words), values, negated)


def _is_option(word: str) -> bool:
    return len(word) > 1 and word.startswith("-") and not _NEGATIVE.match(word)
