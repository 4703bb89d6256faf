"""What chat templates do to a tool: drop, mangle, or render it so that no parser reads the calls back.

An *error* is what the templates render wrongly, or what a format of `portlab_spec.formats` refuses for that reason;
a *warning* is what the model is not told, or not told well. The claims about Gemma 4 are those of its five published
templates (commits of google/gemma-4-E2B-it), and a test renders each of them. FunctionGemma's template is not
published outside its gated repository; it is the direct ancestor of Gemma 4's first (same macros), and is held to
that one's rules. Gemma 3 has no tool template, and Qwen3's writes tools as JSON: both show the model the schema itself.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from portlab_spec.conversation import Tool
from portlab_spec.formats import find_format
from portlab_spec.formats.gemma4 import Gemma4
from portlab_spec.tools.lint_rules import (
    ALL,
    Code,
    Draft,
    Place,
    Severity,
    check_schema,
    check_texts,
    check_tool,
)


@dataclass(frozen=True)
class Finding:
    """One fault of a tool.

    Attributes:
        code: the construct, for example `enum-not-string`; docs/tools.md explains each.
        severity: "error" if the tool should not be used as it is.
        where: the tool and the path of the parameter: `book.nights`, `book.guests[].age`.
        what: what happens to it, as a sentence without a full stop.
        fix: what to do.
        formats: the formats that it concerns.
    """

    code: Code
    severity: Severity
    where: str
    what: str
    fix: str
    formats: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.where}: {self.severity} {self.code}: {self.what}. {self.fix} [{', '.join(self.formats)}]"


def lint(tool: Tool, format: str | None = None) -> list[Finding]:
    """The faults of a tool, from the outside in.

    Args:
        tool: lowered or not; what lowering would mend is reported.
        format: name as in `portlab_spec.formats`: `functiongemma`, `gemma3-json`, `gemma3-python`, `gemma4` and its
            variants (the latest template revision), `gemma4@COMMIT` (that revision), `qwen3`. None: all of them.

    Raises:
        UserError: no such format or revision.
    """
    targets = formats_of(format)
    drafts = [(tool.name, draft) for draft in check_tool(tool)]
    drafts += [(f"{tool.name}{path}", draft) for path, draft in check_texts(tool)]
    for path, schema, place in _schemas(tool.parameters, "", "parameters"):
        drafts += [(f"{tool.name}{path}{suffix}", draft) for suffix, draft in check_schema(schema, place)]
    return [finding for where, draft in drafts for finding in _finding(where, draft, targets)]


def lint_tools(tools: Iterable[Tool], format: str | None = None) -> list[Finding]:
    """The faults of tools that are offered together: those of each, and names that occur twice."""
    tools = tuple(tools)
    findings = [finding for tool in tools for finding in lint(tool, format)]
    for name, count in Counter(tool.name for tool in tools).items():
        if count > 1:
            what, fix = (
                f"{count} tools have this name: a call cannot say which it means",
                "Rename or remove all but one",
            )
            findings.append(Finding("duplicate-tool", "error", name, what, fix, formats_of(format)))
    return findings


def formats_of(format: str | None) -> tuple[str, ...]:
    """What a format's name stands for among the formats that findings name.

    Raises:
        UserError: no such format or revision.
    """
    if format is None:
        return ALL
    found = find_format(format)
    return (f"gemma4@{found.revision}" if isinstance(found, Gemma4) else found.name,)


def _finding(where: str, draft: Draft, targets: tuple[str, ...]) -> Iterator[Finding]:
    concerned = tuple(name for name in targets if name in draft.formats)
    if concerned:
        yield Finding(draft.code, draft.severity, where, draft.what, draft.fix, concerned)


def _schemas(schema: Any, path: str, place: Place) -> Iterator[tuple[str, dict[str, Any], Place]]:
    """Every schema with its path and the place that decides how a template writes it.

    What lies below a list of lists, or in alternatives, is not visited: the finding about those says it all.
    """
    if not isinstance(schema, dict):
        return
    yield path, schema, place
    properties, items = schema.get("properties"), schema.get("items")
    if isinstance(properties, dict):
        for name, inner in properties.items():
            yield from _schemas(inner, f"{path}.{name}", "property")
    if isinstance(items, dict) and place != "items":
        yield from _schemas(items, f"{path}[]", "items")


__all__ = ["Code", "Finding", "Severity", "formats_of", "lint", "lint_tools"]
