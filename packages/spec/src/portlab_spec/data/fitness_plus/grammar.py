"""Phrasings with blanks, filled at a moment and said in somebody's style.

A phrasing is a text with `{slots}`. Three in ten of each list are held out: they occur in the test split only. A
phrasing without slots has one wording only, so that it belongs to one split as a whole.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from importlib import resources
from random import Random
from typing import Any

import yaml
from pydantic import JsonValue

from portlab_spec.conversation import Split
from portlab_spec.data.fitness_plus import dates, slots
from portlab_spec.data.fitness_plus.slots import Filling, fillings

SPLITS: tuple[Split, ...] = ("test", "validation", "train")

_SLOT = re.compile(r"\{(\w+)\}")
_DIGIT = re.compile(r"\d")
_END = (".", "?", "!")
_NAMES = frozenset((*dates.MONTHS, *dates.WEEKDAYS, *slots.NAMES, *slots.PLACES))


@dataclass(frozen=True)
class Phrasing:
    """One way to say something.

    Attributes:
        id: list and number, as in `get_steps/3`.
        text: with `{slots}`.
        arguments: those that the words fix without a slot.
        splits: where it may be used.
        held_out: is it kept out of training, to test how the model copes with new wordings?
    """

    id: str
    text: str
    arguments: Mapping[str, JsonValue]
    splits: tuple[Split, ...]
    held_out: bool

    @property
    def slots(self) -> list[str]:
        """Names of the slots, in the order of the text."""
        return _SLOT.findall(self.text)


@dataclass(frozen=True)
class Said:
    """A filled phrasing.

    Attributes:
        text: as it stands in the conversation.
        sentences: what is asked, without style and slips of the finger; no two splits share one.
        arguments: what it means.
        phrasings: ids of the phrasings it was made of.
    """

    text: str
    sentences: tuple[str, ...]
    arguments: Mapping[str, JsonValue]
    phrasings: tuple[str, ...]


@cache
def dialogue() -> dict[str, Any]:
    """The contents of `dialogue.yaml`."""
    return _read("dialogue.yaml")


@cache
def phrasings() -> dict[str, tuple[Phrasing, ...]]:
    """All lists of phrasings by name: those of each tool, and those of `dialogue.yaml` that users say."""
    lists = dict(_read("phrasings.yaml"))
    talk = dialogue()
    lists |= {f"follow_up.{slot}": texts for slot, texts in talk["follow_ups"].items()}
    for tool, parts in talk["clarifications"].items():
        lists |= {f"ask.{tool}": parts["asks"], f"reply.{tool}": parts["replies"]}
    lists |= {f"same_tool.{tool}": parts["texts"] for tool, parts in talk["same_tool"].items()}
    lists |= {name: talk[name] for name in ("joiners", "joiners_of_three", "outside")}
    return {name: tuple(_phrasings(name, texts)) for name, texts in lists.items()}


def _read(name: str) -> dict[str, Any]:
    text = resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
    return dict(yaml.safe_load(text))


def _phrasings(name: str, items: list[str | dict[str, Any]]) -> Iterable[Phrasing]:
    entries: list[dict[str, Any]] = [item if isinstance(item, dict) else {"text": item} for item in items]
    ranked = sorted(range(len(entries)), key=lambda i: hashlib.sha256(entries[i]["text"].encode()).digest())
    held_out = set(ranked[: round(0.3 * len(entries))])
    # Of the wordings that never vary, one in four validates and the others train.
    rigid = [i for i in ranked if i not in held_out and "{" not in entries[i]["text"]]
    for i, entry in enumerate(entries):
        splits = SPLITS
        if i in held_out:
            splits = ("test",)
        elif i in rigid:
            splits = ("validation",) if rigid.index(i) % 4 == 0 else ("train",)
        yield Phrasing(f"{name}/{i}", entry["text"], entry.get("args", {}), splits, i in held_out)


def pick(name: str, split: Split, held_out: bool, rng: Random) -> Phrasing:
    """A phrasing of a list that this split may use, held out if asked for.

    Falls back to the other kind where the list has none, as where every wording is rigid.
    """
    usable = [phrasing for phrasing in phrasings()[name] if split in phrasing.splits]
    return rng.choice([p for p in usable if p.held_out == held_out] or usable)


def say(phrasing: Phrasing, now: datetime, rng: Random) -> Said:
    """The phrasing with its slots filled; now and then with a typing error in its own words, never in a value."""
    return fill(phrasing, {slot: choose(slot, now, rng) for slot in phrasing.slots}, rng)


def choose(slot: str, now: datetime, rng: Random) -> Filling:
    """A filling of the slot; every other time one in words, if it has any, because there are more dates than
    expressions such as `last Tuesday`."""
    options = fillings(slot, now)
    if rng.random() < 0.5:
        options = [filling for filling in options if not _DIGIT.search(filling.text)] or options
    return rng.choice(options)


def fill(phrasing: Phrasing, chosen: Mapping[str, Filling], rng: Random) -> Said:
    """The phrasing with these fillings."""
    texts = {slot: filling.text for slot, filling in chosen.items()}
    arguments = dict(phrasing.arguments)
    for filling in chosen.values():
        arguments |= dict(filling.arguments)
    template = _typo(phrasing.text, rng) if rng.random() < 0.08 else phrasing.text
    return Said(template.format(**texts), (phrasing.text.format(**texts),), arguments, (phrasing.id,))


def join(joiner: Phrasing, clauses: list[Said]) -> Said:
    """Several sentences in one message."""
    blanks: dict[str, str] = {}
    for word, said in zip(("one", "two", "three"), clauses, strict=False):
        opens = joiner.text.startswith(f"{{{word}}}")
        blanks[word] = _start(_closed(said.text), low=not opens)
        blanks[word.capitalize()] = _start(_closed(said.text), low=False)
    sentences = tuple(sentence for said in clauses for sentence in said.sentences)
    names = tuple(name for said in clauses for name in said.phrasings)
    return Said(joiner.text.format(**blanks), sentences, {}, (joiner.id, *names))


def styled(said: Said, rng: Random, *, first: bool = True) -> Said:
    """As somebody would type it: mostly plain, at times in lower case, or with a greeting or thanks."""
    talk, text, style = dialogue(), said.text, rng.random()
    if style < 0.18:
        text = _start(text, low=True)
        text = text[:-1] if text.endswith(_END) else text
    elif style < 0.32 and first:
        text = rng.choice(talk["openings"]) + _start(text, low=True)
    elif style < 0.42:
        text = _closed(text) + rng.choice(talk["closings"])
    return replace(said, text=text)


def _closed(text: str) -> str:
    return text if text.endswith(_END) else text + "."


def _start(text: str, *, low: bool) -> str:
    """The text with its first letter in lower case, or in upper case; names and `I` stay as they are."""
    word = re.match(r"[\w']*", text)[0]  # type: ignore[index]  # an empty match is a match
    if low:
        keeps = word in ("I", "PB", "BP", "HIIT") or word.startswith("I'") or word in _NAMES
        return text if keeps else text[:1].lower() + text[1:]
    return text[:1].upper() + text[1:]


def _typo(template: str, rng: Random) -> str:
    """Two neighbouring letters swapped, or one left out, in a word of five letters or more outside the slots."""
    words = list(re.finditer(r"(?<![\w{'])[a-z]{5,}(?![\w}'])", template))
    if not words:
        return template
    word = rng.choice(words)
    at = word.start() + rng.randrange(1, len(word[0]) - 2)
    if rng.random() < 0.5:
        return template[:at] + template[at + 1 :]
    return template[:at] + template[at + 1] + template[at] + template[at + 2 :]
