"""`toolspec lint` and `toolspec grammar`."""

from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.text import Text

from portlab_spec.formats import find_format
from portlab_spec.tools import describe_constraints, lint_tools, to_openai
from portlab_spec.toolspec.inputs import raw_tools_of, tokenizer_of, tools_of
from portlab_spec.toolspec.output import note, print_json, show
from portlab_spec.toolspec.view import findings_view

if TYPE_CHECKING:
    from portlab_spec.toolspec.cli import GrammarCommand, LintCommand


def lint(command: "LintCommand") -> int:
    """Findings, or the mended tools; 1 if there is an error (or, when strict, a warning)."""
    if command.fix:
        print_json(to_openai(describe_constraints(tool) for tool in tools_of(command.tools)))
        return 0
    tools = raw_tools_of(command.tools)
    findings = lint_tools(tools, command.format)
    errors = sum(finding.severity == "error" for finding in findings)
    if command.json:
        print_json({"tools": len(tools), "errors": errors, "findings": [asdict(finding) for finding in findings]})
    else:
        if findings:
            show(findings_view(findings))
        show(Text(f"{len(tools)} tools, {errors} errors, {len(findings) - errors} warnings"))
    return int(errors > 0 or (command.strict and bool(findings)))


def grammar(command: "GrammarCommand") -> int:
    """The grammar's text; with --check, compiled."""
    from portlab_spec.formats.grammar import compile_grammar, lark_grammar

    fmt = find_format(command.format)
    text = lark_grammar(tools_of(command.tools), fmt, calls=command.calls)
    if command.check:
        compile_grammar(text, tokenizer_of(command.model, fmt))
        note(f"toolspec: llguidance accepts the grammar ({len(text)} characters)")
    if command.json:
        print_json({"format": fmt.name, "calls": command.calls, "grammar": text})
    else:
        print(text)
    return 0
