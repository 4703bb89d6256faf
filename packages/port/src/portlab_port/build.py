"""What a port is made of: answers to what a file cannot say, notes on settings, and the work in progress."""

from dataclasses import dataclass, field
from typing import Any

from portlab_port.rules import RULES, Fate
from portlab_port.settings import Computed, GpuRecipe, Setting, Unknown, shown
from portlab_spec.recipe import Recipe


@dataclass(frozen=True)
class Answers:
    """What a GPU recipe does not hold.

    Attributes:
        rows: rows of the training split; epochs become steps with it.
        examples_per_row: mean number of examples in a packed row of the GPU run.
        data: data set of the recipe: a built-in one, a file or a folder.
        format: wire format, where the model's family does not decide it.
        name: the recipe's name.
        accept: settings that may be lost though they change what is learnt.
    """

    rows: int | None = None
    examples_per_row: float | None = None
    data: str | None = None
    format: str | None = None
    name: str | None = None
    accept: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Note:
    """What became of one setting: its fate, the recipe keys with their values (if any) and the reason."""

    setting: Setting
    fate: Fate
    became: str
    why: str
    docs: str


@dataclass(frozen=True)
class Ported:
    """A ported recipe.

    Attributes:
        recipe: the recipe.
        written: dotted recipe keys that the port decided, in order; the others have a recipe's defaults.
        notes: one for each setting, in the order of the rules.
        unknown: keys that were not understood.
        sums: how numbers that no key holds were computed, a sentence each.
    """

    recipe: Recipe
    written: tuple[str, ...]
    notes: tuple[Note, ...]
    unknown: tuple[Unknown, ...]
    sums: tuple[str, ...]


@dataclass
class Build:
    """A port in progress."""

    gpu: GpuRecipe
    devices: int | None
    answers: Answers
    fields: dict[str, Any] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    sums: list[str] = field(default_factory=list)
    _noted: set[int] = field(default_factory=set)

    def find(self, name: str) -> Setting | None:
        """The setting of a name whose value is known."""
        found = self.gpu.named().get(name)
        return None if found is None or isinstance(found.value, Computed) else found

    def value(self, name: str, default: Any = None) -> Any:
        """Its value, or a default."""
        found = self.find(name)
        return default if found is None else found.value

    def left(self) -> list[Setting]:
        """Settings without a note."""
        return [setting for setting in self.gpu.settings if id(setting) not in self._noted]

    def accepts(self, setting: Setting) -> bool:
        """May this setting be lost?"""
        return bool(self.answers.accept & {setting.key, setting.name, setting.key.rpartition(".")[2]})

    def set(self, key: str, value: Any) -> str:
        """Set a recipe key; returns `key: value` for a note."""
        self.fields[key] = value
        return f"{key}: {shown(key, value)}"

    def fault(self, text: str) -> None:
        """Something that stops the port."""
        self.faults.append(text)

    def note(
        self, setting: Setting | None, *, became: str = "", fate: Fate | None = None, why: str | None = None
    ) -> None:
        """Say what became of a setting; what is left out is the rule's."""
        if setting is None or id(setting) in self._noted:
            return
        self._noted.add(id(setting))
        rule = RULES[setting.name]
        self.notes.append(Note(setting, fate or rule.fate, became, rule.why if why is None else why, rule.docs))

    def carry(self, name: str, key: str) -> None:
        """A setting that means the same: its value becomes a recipe key's."""
        setting = self.find(name)
        if setting is not None:
            self.note(setting, became=self.set(key, setting.value))

    def refuse(self, setting: Setting, why: str, accepted: str = "") -> bool:
        """Fault a value that cannot be said, unless it is accepted; returns whether it is.

        Args:
            setting: the setting.
            why: the reason.
            accepted: what is written instead if it is accepted.
        """
        if self.accepts(setting):
            self.note(setting, fate="cannot", became=accepted, why=f"{why}; accepted")
            return True
        self.note(setting, fate="cannot", why=why)
        self.fault(f"{setting.key}: {setting.text} ({setting.where}): {why}; change it, or --accept {setting.key}")
        return False
