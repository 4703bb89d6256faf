"""Text of grammars in the Lark dialect of llguidance.

Source: llguidance's `docs/syntax.md`. Rules have lower-case names, terminals upper-case ones; `<name>` is a special
token, which is a token of the model and never matches text that spells it.
"""

import json
import re
from collections.abc import Iterable

# The added tokens of Gemma's vocabulary that are text: llguidance takes every added token written in angle brackets
# for a special one, so that no regular expression matches it.
_TAGS = (
    "table", "caption", "thead", "tbody", "tfoot", "tr", "th", "td", "h1", "h2", "h3", "h4", "h5", "h6", "blockquote",
    "strong", "em", "b", "i", "u", "s", "sub", "sup", "code", "a", "html", "body", "img", "span", "bbox", "ul", "li",
    "div", "iframe", "footer",
)  # fmt: skip
MARKUP = tuple(form for tag in _TAGS for form in (f"<{tag}>", f"</{tag}>"))

_MARKUP = re.compile("(" + "|".join(MARKUP) + ")")


class Rules:
    """The rules of a grammar as they are collected; equal bodies of rules share one name."""

    def __init__(self) -> None:
        self._bodies: dict[str, str] = {}
        self._names: dict[str, str] = {}

    def add(self, hint: str, body: str) -> str:
        """Name of a rule or terminal with this body, made of the hint, whose case decides which of the two."""
        if body in self._names:
            return self._names[body]
        name = self.fresh(hint)
        self._bodies[name] = body
        self._names[body] = name
        return name

    def fresh(self, hint: str) -> str:
        """A free name, for a rule that refers to itself; give it a body with `define`."""
        stem = re.sub(r"[^A-Za-z0-9]+", "_", hint).strip("_")
        number, name = 1, stem
        while name in self._bodies:
            number += 1
            name = f"{stem}_{number}"
        self._bodies[name] = ""
        return name

    def define(self, name: str, body: str) -> None:
        """Give a body to a name from `fresh`; `name` may carry the `::_` of a parameter."""
        self._bodies[name.removesuffix("::_")] = body

    def text(self, parametric: Iterable[str] = ()) -> str:
        """The grammar, `start` first."""
        heads = set(parametric)
        lines = [f"{name}{'::_' if name in heads else ''}: {body}" for name, body in self._bodies.items()]
        return "\n".join(sorted(lines, key=lambda line: not line.startswith("start:"))) + "\n"


def literal(text: str) -> str:
    """Exactly this text, with markup as the single tokens that the tokenizer makes of it."""
    parts = [part for part in _MARKUP.split(text) if part]
    return " ".join(part if part in MARKUP else _quoted(part) for part in parts)


def _quoted(text: str) -> str:
    """A string literal: JSON's, but the dialect wants the delete character escaped as well."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def regex(pattern: str) -> str:
    """A terminal's body from a regular expression in Rust's syntax."""
    return f"/{pattern.replace('/', chr(92) + '/')}/"


def either(options: Iterable[str]) -> str:
    """Alternatives, in brackets if there are several; each once."""
    options = list(dict.fromkeys(options))
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"


def without(rules: Rules, pattern: str, refused: Iterable[str]) -> str:
    """A terminal's body: text that matches a pattern and spells none of the refused strings."""
    spelled = "|".join(re.sub(r"([|\[\](){}.*+?^$\\])", r"\\\1", token) for token in refused)
    anything = regex("(?s:.*)")
    return f"{regex(pattern)} & ~({anything} {rules.add('CONTROL', regex(spelled))} {anything})"
