"""Grammars for constrained decoding: what a model may write, given the tools on offer.

A grammar in the Lark dialect of llguidance, which vLLM's guidance backend takes too. All that it admits is read
back by the format's strict parser without an error, as calls of offered tools with valid arguments; all calls that
the format renders for valid arguments are admitted. docs/grammar.md says where either is not exact.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from portlab_spec.conversation import Tool
from portlab_spec.errors import UserError
from portlab_spec.formats.functiongemma import FunctionGemma
from portlab_spec.formats.gemma3 import Gemma3
from portlab_spec.formats.gemma4 import Gemma4
from portlab_spec.formats.grammar import output
from portlab_spec.formats.grammar.values import unenforced
from portlab_spec.formats.segments import Format
from portlab_spec.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Calls = Literal["any", "required", "one", "none"]


def lark_grammar(tools: Sequence[Tool], fmt: Format, *, calls: Calls = "any", text: bool | None = None) -> str:
    """The grammar of one output of the model, from the generation prompt to the stop token.

    Special tokens are referred to by name, so that one grammar serves every tokenizer that has them, and a
    tokenizer that lacks one is an error.

    Args:
        tools: those on offer; schemas are lowered first.
        fmt: the wire format. With Gemma 4, pass `fmt.after(prompt)` if the prompt may have opened a thought.
        calls: "any": none, one or several; "required": at least one; "one": exactly one; "none": text only.
        text: whether the model may answer in text instead of calling. By default, if `calls` is "any" or "none".
            `calls="any", text=False` is "required"; `calls="one", text=True` is at most one call.

    Raises:
        UserError: a schema that cannot be satisfied, a name that the format cannot write, two tools of one name,
            or no output would be possible.
    """
    text = calls in ("any", "none") if text is None else text
    if calls == "required" and text:
        raise ValueError('calls="required" leaves no room for text: use calls="any"')
    many = None if calls == "none" or (not tools and text) else calls != "one"
    if many is None and not text:
        raise ValueError('calls="none" leaves nothing but text')
    if many is not None and not tools:
        raise UserError("a call is required, but no tool is on offer", fix="Offer tools, or let the model answer")
    names = [tool.name for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two tools are called {name}", fix="Rename one")
    match fmt:
        case FunctionGemma():
            return output.functiongemma(tools, fmt, many, text)
        case Gemma4():
            return output.gemma4(tools, fmt, many, text)
        case Gemma3():
            return output.gemma3(tools, fmt, many, text)
    raise UserError(
        f"there is no grammar for {fmt.name}", fix="Use functiongemma, gemma3-json, gemma3-python or gemma4"
    )


def constraint_tokenizer(tokenizer: Tokenizer) -> "LLTokenizer":
    """The tokenizer as llguidance wants it. Takes about two seconds: make one and keep it.

    Raises:
        UserError: llguidance is not installed.
    """
    try:
        from llguidance import LLTokenizer
    except ImportError:
        raise UserError("constrained decoding needs llguidance", fix="Install portlab-spec[grammar]") from None
    return LLTokenizer(tokenizer.backend.to_str(), eos_token=tokenizer.token_id("<eos>"))


def compile_grammar(grammar: str, tokenizer: "Tokenizer | LLTokenizer") -> "LLMatcher":
    """A matcher at the start of an output: it gives the mask of the tokens that may come next, and takes one.

    Args:
        grammar: of `lark_grammar`.
        tokenizer: one of `constraint_tokenizer`, kept for all requests; a plain one is converted each time.

    Raises:
        UserError: llguidance is not installed, the tokenizer lacks a token, or the grammar is too large.
    """
    converted = constraint_tokenizer(tokenizer) if isinstance(tokenizer, Tokenizer) else tokenizer
    from llguidance import LLMatcher

    matcher = LLMatcher(converted, grammar, log_level=0)
    if matcher.is_error():
        what = f"the grammar does not compile ({matcher.get_error().splitlines()[0]})"
        raise UserError(what, fix="Use the tokenizer of the format's model, or offer fewer tools")
    return matcher


__all__ = ["Calls", "compile_grammar", "constraint_tokenizer", "lark_grammar", "unenforced"]
