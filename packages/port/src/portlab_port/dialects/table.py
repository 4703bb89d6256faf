"""What a table of a dialect is made of."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from portlab_port.settings import Style


@dataclass(frozen=True)
class Said:
    """What a conversion gives where the value decides which setting it is."""

    name: str
    value: Any


@dataclass(frozen=True)
class Key:
    """Where a key goes: a neutral name, and a conversion of its value if the dialect has another meaning."""

    name: str
    convert: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Dialect:
    """A dialect.

    Attributes:
        style: its name on the command line.
        keys: key -> neutral name.
        prefixes: start of a key -> neutral name, for families of keys that are all treated alike.
        defaults: neutral name -> value, where a file says nothing; a function is given the rank.
        defaults_of: whose defaults they are, for the report.
        lora_defaults: the same for adapters, where the recipe trains them.
        marks: keys that this dialect has and others have not.
    """

    style: Style
    keys: Mapping[str, Key]
    prefixes: Mapping[str, str]
    defaults: Mapping[str, Any]
    defaults_of: str
    lora_defaults: Mapping[str, Any] = field(default_factory=dict)
    lora_defaults_of: str = ""
    marks: frozenset[str] = frozenset()

    def find(self, key: str) -> Key | None:
        """The entry of a key, None if the dialect has no such key."""
        if key in self.keys:
            return self.keys[key]
        return next((Key(name) for prefix, name in self.prefixes.items() if key.startswith(prefix)), None)


def same(names: str) -> dict[str, Key]:
    """Keys that have the neutral name themselves."""
    return {name: Key(name) for name in names.split()}


def all_to(name: str, keys: str) -> dict[str, Key]:
    """Keys that all have one neutral name."""
    return {key: Key(name) for key in keys.split()}


def negated(value: Any) -> Any:
    """A switch that says the opposite."""
    return not value if isinstance(value, bool) else value


def peft_method(value: Any) -> Any:
    """`lora` or `qlora`, `full`, or a method that is none of ours."""
    if value in ("lora", "qlora"):
        return True
    return False if value == "full" else Said("other_peft", value)


def all_linear(value: Any) -> Any:
    """A switch for all linear layers."""
    return "all-linear" if value is True else None


def tensorboard(value: Any) -> Any:
    """A switch for TensorBoard."""
    return "tensorboard" if value is True else None
