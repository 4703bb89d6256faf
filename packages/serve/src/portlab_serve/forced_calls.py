"""What a request that must call a tool may be answered with: `tool_choice` `required`, or a tool by name.

A grammar in the model's own format for vLLM's structured outputs, which hand it to llguidance: xgrammar refuses its
control tokens, and vLLM then falls back by itself. docs/grammar.md says what it guarantees.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from portlab_spec.errors import UserError
from portlab_spec.formats import Format, find_format
from portlab_spec.formats.gemma4 import Gemma4
from portlab_spec.formats.grammar import lark_grammar
from portlab_spec.tools import read_tools


def forced_grammar(
    fmt: Format, tools: Sequence[Mapping[str, Any]], *, name: str | None, parallel: bool, thinking: bool = False
) -> str:
    """The grammar of an answer that calls.

    Args:
        fmt: what the model writes.
        tools: those of the request, as OpenAI's API has them; a description is not needed.
        name: the one tool that must be called, once; None leaves the choice to the model.
        parallel: whether it may be several calls.
        thinking: whether a Gemma 4 may think first.

    Raises:
        UserError: there is no grammar for the format, or a tool has a schema that cannot be read or satisfied.
    """
    if isinstance(fmt, Gemma4) and thinking:
        fmt = find_format("gemma4-thinking")
    offered = read_tools([_described(tool) for tool in tools], "request")
    if name is not None:
        offered = tuple(tool for tool in offered if tool.name == name)
        if not offered:
            raise UserError(f"tool_choice names {name}, which is not among the tools", where="request", fix="Offer it")
    return lark_grammar(offered, fmt, calls="required" if parallel and name is None else "one")


def _described(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tool with its name for a description, if it has none: the grammar does not hold any."""
    function = tool.get("function", tool)
    if function.get("description"):
        return tool
    return {"type": "function", "function": {**function, "description": function.get("name")}}
