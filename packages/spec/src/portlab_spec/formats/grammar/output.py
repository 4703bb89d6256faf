"""What a whole output may be in each family of formats: calls or text, and the token that ends it."""

import re
from collections.abc import Sequence

from portlab_spec.conversation import Tool
from portlab_spec.errors import UserError
from portlab_spec.formats import gemma3_python as python
from portlab_spec.formats.call_body import LENIENT_KEY
from portlab_spec.formats.functiongemma import FunctionGemma
from portlab_spec.formats.gemma3 import CONTROL_TOKENS, END_TURN, Gemma3
from portlab_spec.formats.gemma4 import REVISIONS, Gemma4
from portlab_spec.formats.grammar import spelling
from portlab_spec.formats.grammar.lark import Rules, either, literal, regex, without
from portlab_spec.formats.grammar.values import ValueRules
from portlab_spec.formats.markers import FUNCTIONGEMMA, GEMMA4, Markers
from portlab_spec.formats.output import THOUGHT
from portlab_spec.formats.values import NAME

_VISIBLE = r"[^\s\x1c-\x1f]"  # what neither Rust nor Python takes for whitespace


def functiongemma(tools: Sequence[Tool], fmt: FunctionGemma, many: bool | None, text: bool) -> str:
    """The grammar of FunctionGemma's output; see `native`."""
    values = ValueRules(Rules(), spelling.native(FUNCTIONGEMMA, re.compile(NAME), "null", fixed=True))
    return native(tools, FUNCTIONGEMMA, values, FUNCTIONGEMMA.response, many, text)


def gemma4(tools: Sequence[Tool], fmt: Gemma4, many: bool | None, text: bool) -> str:
    """The grammar of Gemma 4's output: a thought before anything else if the model is asked to think."""
    revision = REVISIONS[fmt.revision]
    values = ValueRules(Rules(), spelling.native(GEMMA4, LENIENT_KEY, revision.null, fixed=False))
    stop = GEMMA4.response if revision.open_turn else GEMMA4.end_turn
    thought = ""
    if fmt.in_thought:  # the prompt has opened it
        thought = f"{values.plain_text()} {GEMMA4.end_channel}"
    elif fmt.thinking:
        opened = literal(f"{THOUGHT}\n")
        thought = f"({GEMMA4.channel} {opened} {values.plain_text()} {GEMMA4.end_channel})?"
    return native(tools, GEMMA4, values, stop, many, text, thought)


def native(
    tools: Sequence[Tool],
    markers: Markers,
    values: ValueRules,
    stop: str,
    many: bool | None,
    text: bool,
    thought: str = "",
) -> str:
    """The grammar of a native dialect.

    Args:
        tools: those on offer.
        markers: the dialect's tokens.
        values: rules of arguments, and the grammar that is being written.
        stop: the token after the last call.
        many: several calls, one, or none at all (None).
        text: an answer in text instead of calls.
        thought: what may come first.
    """
    rules, options = values.rules, []
    if many is not None:
        bodies = []
        for tool in tools:
            fields = values.arguments(tool)
            body = f'{literal(f"{tool.name}{{")} {fields} "}}"' if fields else literal(f"{tool.name}{{}}")
            bodies.append(rules.add(f"call_{tool.name.lower()}", body))
        call = rules.add("call", f'{markers.call} "call:" {either(bodies)} {markers.end_call}')
        options.append(f"{call}{'+' if many else ''} {stop}")
    if text:
        options.append(f"{_answer(values, f'(?s:.*){_VISIBLE}(?s:.*)', markers.refused)} {markers.end_turn}")
    rules.add("start", f"{thought} {either(options)}".strip())
    return rules.text(values.parametric)


def gemma3(tools: Sequence[Tool], fmt: Gemma3, many: bool | None, text: bool) -> str:
    """The grammar of Gemma 3's output in either style."""
    make = spelling.json_calls if fmt.style == "json" else spelling.python_calls
    values = ValueRules(Rules(), make(CONTROL_TOKENS))
    rules, options = values.rules, []
    if many is not None:
        bodies = [rules.add(f"call_{tool.name.lower()}", _gemma3_call(tool, fmt, values)) for tool in tools]
        call = rules.add("call", either(bodies))
        single = call if fmt.style == "json" else f'"[" {call} "]"'
        least = "+" if fmt.style == "json" else "*"  # in JSON a single call is no list
        several = f'"[" {call} (", " {call}){least} "]"'
        if not many:
            options.append(single)
        elif fmt.style == "json":
            options += [single, several]
        else:
            options.append(several)
    if text:
        options.append(_gemma3_answer(values))
    rules.add("start", f"{either(options)} {END_TURN}")
    return rules.text(values.parametric)


def _gemma3_call(tool: Tool, fmt: Gemma3, values: ValueRules) -> str:
    if fmt.style == "json":
        before, after = f'{{"name": "{tool.name}", "parameters": {{', "}}"
    else:
        if not all(map(python.is_identifier, tool.name.split("."))):
            what = f"the tool name {tool.name!r} cannot be written as a Python call"
            raise UserError(what, fix="Rename the tool, or use the format gemma3-json")
        before, after = f"{tool.name}(", ")"
    fields = values.arguments(tool)
    return f"{literal(before)} {fields} {literal(after)}" if fields else literal(before + after)


def _answer(values: ValueRules, spoken: str, refused: Sequence[str]) -> str:
    """Text with something visible in it: plain from the start, or whitespace up to markup."""
    rules, more = values.rules, f"({values.markup()} {values.plain_text()})*"
    said = rules.add("SAID", without(rules, spoken, refused))
    blank = rules.add("BLANK", regex(r"\s+"))
    return rules.add("answer", f"{said} {more} | {blank}? {values.markup()} {values.plain_text()} {more}")


def _gemma3_answer(values: ValueRules) -> str:
    """Text that cannot be read as calls: no line of it starts with a bracket or a code fence."""
    line = r"[ \t]*[^\s\x1c-\x1f\[{`][^\n]*"
    rules, markup = values.rules, values.markup()
    said = rules.add("SAID", without(rules, rf"([ \t]*\n)*{line}(\n[ \t]*|\n{line})*", CONTROL_TOKENS))
    tail = rules.add("TAIL", without(rules, rf"[^\n]+(\n[ \t]*|\n{line})*|(\n[ \t]*|\n{line})+", CONTROL_TOKENS))
    blank = rules.add("BLANK", regex(r"[ \t\n]+"))
    return rules.add("answer", f"({said} | {blank}? {markup} {tail}?) ({markup} {tail}?)*")
