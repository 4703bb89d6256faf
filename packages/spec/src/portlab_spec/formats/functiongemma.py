"""The FunctionGemma wire format (Gemma 3 270M with named control tokens at ids 46-52).

Layout of a conversation, `·` marking places without any separator:

    <bos><start_of_turn>developer\\n TEXT · DECLARATIONS <end_of_turn>\\n
    <start_of_turn>user\\n TEXT <end_of_turn>\\n
    <start_of_turn>model\\n CALL · CALL <start_function_response>

`<start_function_response>` after the last call is the model's own stop token, so it carries loss; the results
that follow it do not. Source of the format: the FunctionGemma formatting guide at
ai.google.dev/gemma/docs/functiongemma, outputs of the official template in Google's notebooks, and the grammar of
LiteRT-LM's function-call parser.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from portlab_spec.conversation import Conversation, Message
from portlab_spec.errors import UserError
from portlab_spec.formats.declarations import DeclarationWriter
from portlab_spec.formats.markers import FUNCTIONGEMMA as MARKERS
from portlab_spec.formats.output import (
    OutputGrammar,
    OutputParser,
    PieceStream,
    parse_pieces,
    pieces_of_ids,
    pieces_of_text,
)
from portlab_spec.formats.segments import Parsed, Segment, TextTokenizer
from portlab_spec.formats.turns import TurnWriter
from portlab_spec.formats.values import NAME, ValueWriter, fixed_point

_KEY = re.compile(NAME)
_VALUES = ValueWriter(MARKERS, key=_KEY, number=fixed_point)
_TURNS = TurnWriter(
    _VALUES, DeclarationWriter(_VALUES, empty_descriptions=True, nullable="never", drops_standard_names=True)
)
_WORDS = {"tool_calls": "tool calls", "tool": "tool results"}
_GRAMMAR = OutputGrammar(MARKERS, key=_KEY, call_stop=MARKERS.response)


@dataclass(frozen=True)
class FunctionGemma:
    """The format as an object, see `portlab_spec.formats.Format`."""

    name: str = "functiongemma"
    control_tokens: tuple[str, ...] = MARKERS.structure
    stop_tokens: tuple[str, ...] = MARKERS.stops
    # What FunctionGemma adds to Gemma 3: stock checkpoints hold an unused, untrained embedding row for each.
    added_tokens: tuple[str, ...] = MARKERS.function

    def render(self, conversation: Conversation, *, generation_prompt: bool = False) -> list[Segment]:
        """See `Format.render`."""
        return _render(conversation, generation_prompt)

    def parse(self, ids: Sequence[int], tokenizer: TextTokenizer, *, lenient: bool = False) -> Parsed:
        """See `Format.parse`."""
        return parse_pieces(pieces_of_ids(ids, self.control_tokens, tokenizer), OutputParser(_GRAMMAR, lenient=lenient))

    def parse_text(self, text: str, *, lenient: bool = False) -> Parsed:
        """See `Format.parse_text`."""
        return parse_pieces(pieces_of_text(text, self.control_tokens), OutputParser(_GRAMMAR, lenient=lenient))

    def stream(self, *, lenient: bool = False, tokenizer: TextTokenizer | None = None) -> PieceStream:
        """See `Format.stream`."""
        return PieceStream(OutputParser(_GRAMMAR, lenient=lenient), self.control_tokens, tokenizer)


FORMAT = FunctionGemma()


def _render(conversation: Conversation, generation_prompt: bool) -> list[Segment]:
    turns = _TURNS
    out = [turns.control(MARKERS.bos)]
    messages, first = conversation.messages, 0
    if messages[0].role == "developer" or conversation.tools:
        text = messages[0].content if messages[0].role == "developer" else ""
        first = int(messages[0].role == "developer")
        out += turns.open("developer")
        out += turns.text((text or "").strip(), f"{conversation.id}: messages[0].content")
        out += turns.declarations(conversation)
        out += turns.close()
    previous = ""
    for i, message in enumerate(messages[first:], start=first):
        where = f"{conversation.id}: messages[{i}]"
        _check(message, previous, where)
        if previous not in ("tool_calls", "tool"):  # otherwise the model's turn is still open
            out += turns.open("model" if message.role == "assistant" else message.role)
        if message.role == "tool":
            out += turns.result(message, where, opened=previous == "tool_calls")
        elif message.tool_calls:
            out += turns.calls(message, where)
            out.append(turns.control(MARKERS.response, loss=message.supervised))
        else:
            loss = message.role == "assistant" and message.supervised
            out += turns.text((message.content or "").strip(), f"{where}.content", loss=loss)
            out += turns.close(loss=loss)
        previous = "tool_calls" if message.tool_calls else message.role
    if generation_prompt and previous not in ("tool_calls", "tool"):
        out += turns.open("model")
    return out


def _check(message: Message, previous: str, where: str) -> None:
    """Turns that the format has no place for."""
    role = message.role
    if role == "developer":
        raise UserError("a developer message is not the first", where=where, fix="Put it first, or make it a user's")
    if role == "tool" and previous not in ("tool_calls", "tool"):
        raise UserError("a tool result without a call before it", where=where, fix="Add the call")
    if role == "user" and previous in ("tool_calls", "tool"):
        raise UserError(
            f"a user message follows {_WORDS[previous]}", where=where, fix="Put results and the answer in between"
        )
    if role != "assistant":
        return
    if previous == "tool_calls":
        raise UserError("an assistant message follows tool calls", where=where, fix="Put the tool results in between")
    if previous == "assistant":
        raise UserError("two assistant messages in a row", where=where, fix="Join them, or remove one")
    if message.reasoning:
        raise UserError("the format has no thinking channel", where=where, fix="Remove the reasoning, or use gemma4")
    if not message.tool_calls and not (message.content or "").strip():
        raise UserError("an assistant message is empty", where=where, fix="Give it text or a call")
