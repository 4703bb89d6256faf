"""Keys and values of a dialect -> neutral settings: converted, merged, completed with the dialect's defaults."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from portlab_port.dialects.table import Dialect, Key, Said
from portlab_port.rules import RULES, Kind
from portlab_port.settings import Computed, GpuRecipe, Setting, Style, Unknown, shown
from portlab_spec.errors import UserError

# One that is written keeps the defaults of the others out.
_WARM_UP = {"warmup_steps", "warmup_ratio"}
_BITS = {"load_in_4bit", "load_in_8bit", "load_in_16bit"}
# May stand in a file several times, with several values.
_SEVERAL = ("dataset_split", "dataset_config", "dataset_dir", "eval_dataset")
_TRUE = ("true", "yes", "on", "1", "auto", "full")
_FALSE = ("false", "no", "off", "0", "none", "null")


@dataclass(frozen=True)
class Entry:
    """A key as it stands in a file, with its meaning there (None if the dialect does not know it)."""

    key: str
    value: Any
    where: str
    meaning: Key | None


def gather(style: Style, source: str, entries: Iterable[Entry]) -> GpuRecipe:
    """Neutral settings of a file's entries.

    Nulls say nothing, but for a length, which they take the limit from. Where two keys have one meaning they must
    agree; settings that change nothing are all kept, for the report.

    Raises:
        UserError: a value of the wrong type, or two keys that contradict each other.
    """
    settings: list[Setting] = []
    unknown: list[Unknown] = []
    for entry in entries:
        if entry.meaning is None:
            unknown.append(Unknown(entry.key, entry.value, entry.where))
            continue
        said = _converted(entry, entry.meaning)
        if said is not None:
            settings.append(said)
    return GpuRecipe(style, source, tuple(_merged(settings)), tuple(unknown))


def with_defaults(gpu: GpuRecipe, dialect: Dialect) -> GpuRecipe:
    """The recipe with what its dialect takes where it says nothing."""
    named = gpu.named()
    lora = named.get("use_lora")
    trains_lora = lora.value if lora else bool(dialect.defaults.get("use_lora"))
    wanted = [(name, value, dialect.defaults_of) for name, value in dialect.defaults.items()]
    if trains_lora:
        wanted += [(name, value, dialect.lora_defaults_of) for name, value in dialect.lora_defaults.items()]
    taken = set(named)
    if taken & _WARM_UP:
        taken |= _WARM_UP
    if "max_steps" in named and (isinstance(named["max_steps"].value, Computed) or named["max_steps"].value > 0):
        taken.add("num_train_epochs")  # never read: max_steps overrides it
    if any(named[name].value for name in _BITS & set(named)) or not trains_lora:
        taken |= _BITS
    rank = named["r"].value if "r" in named else dialect.lora_defaults.get("r")
    defaults = []
    for name, value, of in wanted:
        if name not in taken:
            given = value(rank) if callable(value) else value
            defaults.append(Setting(name, given, name, of, default_of=of))
    return GpuRecipe(gpu.style, gpu.source, (*gpu.settings, *defaults), gpu.unknown)


def complete(
    style: Style,
    source: str,
    entries: Iterable[Entry],
    dialect: Dialect,
    keys: Mapping[str, Key],
    by_hand: Mapping[str, Any],
) -> GpuRecipe:
    """A whole recipe: settings of a file, those given by hand in place of them, and the dialect's defaults.

    Args:
        style: the recipe's style.
        source: its name, for messages.
        entries: what the file says.
        dialect: whose defaults the rest has.
        keys: names that values by hand may have, beside those of the rules.
        by_hand: name -> value.

    Raises:
        UserError: a value of the wrong type, a contradiction, a name by hand that nothing has.
    """
    given: list[Entry] = []
    for key, value in by_hand.items():
        meaning = keys.get(key) or (Key(key) if key in RULES else None)
        if meaning is None:
            raise UserError(f"{key} is no setting that is known", where="--set", fix="Give the key as the file has it")
        given.append(Entry(key, value, "--set", meaning))
    replaced = {entry.meaning.name for entry in given if entry.meaning}
    kept = [e for e in entries if e.key not in by_hand and (e.meaning is None or e.meaning.name not in replaced)]
    return with_defaults(gather(style, source, (*kept, *given)), dialect)


def _converted(entry: Entry, meaning: Key) -> Setting | None:
    value = entry.value
    name = meaning.name
    if value is not None and not isinstance(value, Computed) and meaning.convert:
        value = meaning.convert(value)
        if isinstance(value, Said):
            name, value = value.name, value.value
    if value is None:
        if name != "max_length":
            return None
    elif not isinstance(value, Computed):
        value = _typed(value, RULES[name].kind, entry)
    return Setting(name, value, entry.key, entry.where, raw=entry.value)


def _merged(settings: list[Setting]) -> list[Setting]:
    first: dict[str, Setting] = {}
    kept = []
    for setting in settings:
        other = first.setdefault(setting.name, setting)
        rule = RULES[setting.name]
        if other is not setting and rule.fate in ("carries", "changes") and rule.to and rule.name not in _SEVERAL:
            if other.value == setting.value:
                continue
            raise UserError(
                f"{other.key} {other.text} and {setting.key} {setting.text} contradict each other",
                where=setting.where if other.where == setting.where else f"{other.where}, {setting.where}",
                fix="Keep one of them",
            )
        kept.append(setting)
    return kept


def _typed(value: Any, kind: Kind, entry: Entry) -> Any:
    try:
        return _cast(value, kind)
    except (ValueError, TypeError, OverflowError):
        names = {
            "float": "a number",
            "int": "a whole number",
            "bool": "true or false",
            "names": "a name or a list of names",
        }
        what = f"{entry.key} must be {names.get(kind, kind)}, not {shown(entry.key, value)!r}"
        raise UserError(what, where=entry.where, fix="Mend the value") from None


def _cast(value: Any, kind: Kind) -> Any:
    match kind:
        case "bool":
            if isinstance(value, bool):
                return value
            text = str(value).lower()
            if text in _TRUE or text in _FALSE:
                return text in _TRUE
            raise ValueError(value)
        case "int" | "float":
            if isinstance(value, bool) or not isinstance(value, int | float | str):
                raise TypeError(value)
            # YAML 1.1 reads 2e-4, without a point, as text.
            number = float(value)
            if number != number or number in (float("inf"), float("-inf")):
                raise ValueError(value)
            if kind == "float":
                return number
            if number != int(number):
                raise ValueError(value)
            return int(number)
        case "text":
            if isinstance(value, dict | list | tuple):
                raise TypeError(value)
            return str(value)
        case "names":
            if isinstance(value, str):
                return value
            if not isinstance(value, list | tuple):
                raise TypeError(value)
            return tuple(_scalar(part) for part in value if part is not None)
        case "list":
            if isinstance(value, str):
                return tuple(part.strip() for part in value.split(",") if part.strip())
            return tuple(_scalar(part) for part in value)
        case _:
            return tuple(value) if isinstance(value, list) else value


def _scalar(value: Any) -> str:
    if isinstance(value, dict | list | tuple):
        raise TypeError(value)
    return str(value)
