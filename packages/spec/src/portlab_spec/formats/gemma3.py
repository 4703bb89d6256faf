"""The Gemma 3 wire formats: tool calls by agreement in the prompt, in JSON or in Python.

Gemma 3 has no tokens for tools, and no developer turn. A conversation is

    <bos><start_of_turn>user\\n DEVELOPER TEXT \\n\\n INSTRUCTION AND FUNCTIONS \\n\\n USER TEXT <end_of_turn>\\n
    <start_of_turn>model\\n CALLS <end_of_turn>\\n
    <start_of_turn>user\\n RESULTS <end_of_turn>\\n
    <start_of_turn>model\\n TEXT <end_of_turn>\\n

Without tools this is, byte for byte, what the chat template of google/gemma-3-*-it renders. The instruction follows
ai.google.dev/gemma/docs/capabilities/function-calling; results are JSON lines in a `tool_output` fence, after
ai.google.dev/gemma/docs/meme-generator. How calls look: `gemma3_calls`; how they are told from text: `gemma3_scan`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from portlab_spec.conversation import Conversation, Message, Tool, ToolCall
from portlab_spec.errors import UserError
from portlab_spec.formats.call_json import write_json
from portlab_spec.formats.call_values import CallSyntaxError, faults
from portlab_spec.formats.gemma3_calls import Style, names_in, read_calls, write_calls
from portlab_spec.formats.gemma3_scan import Scanner
from portlab_spec.formats.markers import FUNCTIONGEMMA as MARKERS
from portlab_spec.formats.output import Splitter, pieces_of_ids
from portlab_spec.formats.segments import Delta, Event, Parsed, Segment, Stream, TextTokenizer, plain

# Gemma 3's turns are FunctionGemma's; it has no markers for tools.
BOS, TURN, END_TURN = MARKERS.bos, MARKERS.turn, MARKERS.end_turn
CONTROL_TOKENS = (BOS, MARKERS.eos, MARKERS.pad, TURN, END_TURN)
STOP_TOKENS = (MARKERS.eos, END_TURN)
# Text may not forge the place of an image either.
REFUSED_TOKENS = (*CONTROL_TOKENS, *MARKERS.reserved)

# Where a model that writes calls would write them: `_parse` takes text for an answer only elsewhere.
_CALL_POSITION = re.compile(
    r"\s*(?:```(?:json|python|tool_code|tool_calls?|)[ \t]*\r?\n\s*)?(?=[\[{])|\s*```tool_code\b"
)

_FORM: dict[Style, str] = {
    "json": '{"name": function name, "parameters": dictionary of argument name and its value}'
    ", or a JSON list of these for several calls",
    "python": "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]",
}


@dataclass(frozen=True)
class Gemma3:
    """One of the two formats as an object, see `portlab_spec.formats.Format`.

    Strictly, the model's turn is either calls in the given style and nothing else, or text, and ends with a stop
    token. A turn that starts with `[` or `{`, or with a code fence around one, is calls or an error, and so is a
    turn with a block of calls anywhere else: text that holds one cannot be told from a call in the wrong place.
    """

    style: Style
    control_tokens: tuple[str, ...] = CONTROL_TOKENS
    stop_tokens: tuple[str, ...] = STOP_TOKENS
    added_tokens: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """`gemma3-json` or `gemma3-python`."""
        return f"gemma3-{self.style}"

    def render(self, conversation: Conversation, *, generation_prompt: bool = False) -> list[Segment]:
        """Segments of a conversation.

        Raises:
            UserError: text holds a control token, a value cannot be written, turns are out of order, or an answer
                in text would read as a call.
        """
        turns = _turns(conversation)
        out = [_control(BOS)]
        for n, messages in enumerate(turns):
            model = messages[0][1].role == "assistant"
            loss = model and messages[0][1].supervised
            out += [_control(TURN), Segment("model\n" if model else "user\n")]
            if n == 0:
                out += _preamble(conversation, self.style)
            out.append(self._model_turn(conversation, *messages[0]) if model else _user_turn(messages, conversation))
            out += [_control(END_TURN, loss=loss), Segment("\n")]
        if generation_prompt:
            out += [_control(TURN), Segment("model\n")]
        return out

    def _model_turn(self, conversation: Conversation, i: int, message: Message) -> Segment:
        where = f"{conversation.id}: messages[{i}]"
        if message.reasoning:
            raise UserError("Gemma 3 has no place for reasoning", where=where, fix="Remove it from the data")
        if message.tool_calls:
            text = write_calls(message.tool_calls, self.style, REFUSED_TOKENS, f"{where}.tool_calls")
            return Segment(text, loss=message.supervised)
        text = (message.content or "").strip()
        if not text:
            raise UserError("an assistant message is empty", where=where, fix="Give it text or a call")
        answer = _text(text, f"{where}.content", loss=message.supervised)
        if conversation.tools:
            parsed = self.parse_text(text + END_TURN)
            if parsed.calls or parsed.error:
                what = f"this text would be read as a call ({parsed.error or parsed.calls[0].name})"
                raise UserError(what, where=f"{where}.content", fix="Make it a call, or begin with other words")
        return answer

    def parse(self, ids: Sequence[int], tokenizer: TextTokenizer, *, lenient: bool = False) -> Parsed:
        """Calls and text in ids: only a control token's id ends the turn, never its spelling."""
        return _parse(list(pieces_of_ids(ids, CONTROL_TOKENS, tokenizer)), self.style, lenient)

    def parse_text(self, text: str, *, lenient: bool = False) -> Parsed:
        """As `parse`, from text in which control tokens are written out.

        The beginning of a control token at the end of cut-off text is not text.
        """
        splitter = Splitter(CONTROL_TOKENS)
        pieces = list(splitter.feed(text))
        if any(control for _, control in pieces):
            pieces += splitter.close()
        return _parse(pieces, self.style, lenient)

    def stream(self, *, lenient: bool = False) -> Stream:
        """A parser for output that arrives in pieces."""
        return _Stream(self, lenient)


JSON = Gemma3("json")
PYTHON = Gemma3("python")


# ---------------------------------------------------------------------------------------------- rendering


def _control(token: str, *, loss: bool = False) -> Segment:
    return Segment(token, loss=loss, control=True)


def _text(text: str, where: str, *, loss: bool = False) -> Segment:
    for _, what in faults(text):
        raise UserError(what, where=where, fix="Mend the text")
    return plain(text, where, REFUSED_TOKENS, loss=loss)


_PLACE = {"user": "a user message", "assistant": "an answer", "tool": "tool results"}
_NEXT = {
    "the start": ("user",),
    "a user message": ("assistant",),
    "an answer": ("user",),
    "tool calls": ("tool",),
    "tool results": ("tool", "assistant"),
}


def _turns(conversation: Conversation) -> list[list[tuple[int, Message]]]:
    """Numbered messages by turn, without the developer's: results of one round of calls share a turn.

    Raises:
        UserError: the turns do not alternate, or results do not follow calls.
    """
    turns: list[list[tuple[int, Message]]] = []
    place = "the start"
    for i, message in enumerate(conversation.messages):
        if message.role == "developer" and i == 0:
            continue
        if message.role not in _NEXT[place]:
            what = f"a message of role {message.role} follows {place}"
            fix = f"Gemma 3's turns alternate: one of role {' or '.join(_NEXT[place])} comes here"
            raise UserError(what, where=f"{conversation.id}: messages[{i}]", fix=fix)
        if place == "tool results" and message.role == "tool":
            turns[-1].append((i, message))
        else:
            turns.append([(i, message)])
        place = "tool calls" if message.tool_calls else _PLACE[message.role]
    if not turns:
        raise UserError("there is no user message", where=conversation.id, fix="Add one")
    return turns


def _preamble(conversation: Conversation, style: Style) -> list[Segment]:
    """What the first user turn begins with. The template trims every text but the developer's."""
    out = []
    first = conversation.messages[0]
    if first.role == "developer":
        out.append(_text(f"{first.content}\n\n", f"{conversation.id}: messages[0].content"))
    if conversation.tools:
        functions = ", ".join(_function(tool, f"{conversation.id}: tool {tool.name}") for tool in conversation.tools)
        out.append(Segment(_instruction(style) + f"[{functions}]\n\n"))
    return out


def _instruction(style: Style) -> str:
    return (
        "You have access to functions. If you decide to invoke any of the function(s), you MUST put it in the format of"
        f"\n{_FORM[style]}\n\nYou SHOULD NOT include any other text in the response if you call a function\n"
    )


def _function(tool: Tool, where: str) -> str:
    return _json_line({"name": tool.name, "description": tool.description, "parameters": tool.parameters}, where)


def _user_turn(messages: Sequence[tuple[int, Message]], conversation: Conversation) -> Segment:
    where = f"{conversation.id}: messages"
    i, message = messages[0]
    if message.role == "user":
        return _text((message.content or "").strip(), f"{where}[{i}].content")
    results = []
    for i, result in messages:
        response = result.content if result.response is None else result.response
        results.append(_json_line({"name": result.name, "response": response}, f"{where}[{i}]"))
    return Segment("```tool_output\n" + "\n".join(results) + "\n```")


def _json_line(value: Any, where: str) -> str:
    return write_json(value, where, REFUSED_TOKENS)


# ------------------------------------------------------------------------------------------------ parsing


def _parse(pieces: Sequence[tuple[str, bool]], style: Style, lenient: bool) -> Parsed:
    """What a turn says.

    Args:
        pieces: runs of text and control tokens, which are marked; the first token ends the turn.
        style: of the strict grammar.
        lenient: whether calls that it refuses are read all the same.
    """
    end = next((i for i, (_, control) in enumerate(pieces) if control), len(pieces))
    body = "".join(text for text, _ in pieces[:end])
    token = pieces[end][0] if end < len(pieces) else ""
    scanner = Scanner()
    scanner.feed(body)
    scanner.finish(ended=bool(token))
    stopped = token in STOP_TOKENS
    calls, error = _strict_calls(body.strip(), scanner, style)
    if token and not stopped:
        error = f"{token} in the model's turn"
    elif len(pieces) > end + 1:
        error = "output goes on after a stop token"
    elif not stopped:
        error = "cut off before a stop token"
    if error is None and calls:
        return Parsed(calls, stopped=True, names=tuple(call.name for call in calls))
    names = scanner.names
    position = None if scanner.calls else _CALL_POSITION.match(body)
    if error and position:
        names = list(names_in(body[position.end() :]))
    if lenient and (stopped or not token) and len(pieces) <= end + 1:
        # What was read beyond doubt is no fault; what stayed open, or looks like a call and is none, is.
        error = "cut off inside a call" if scanner.open_text else error if position else None
    return Parsed(tuple(scanner.calls) if lenient else (), "".join(scanner.text), error, stopped, tuple(names))


def _strict_calls(body: str, scanner: Scanner, style: Style) -> tuple[tuple[ToolCall, ...], str | None]:
    """The calls of a whole turn, none if it is text, or why it is neither."""
    if not body:
        return (), "the answer is empty"
    if body[0] in "[{":
        try:
            return read_calls(body, style), None
        except CallSyntaxError as error:
            return (), str(error)
    if scanner.calls:
        return (), "calls stand beside text or in a code fence"
    if _CALL_POSITION.match(body):
        return (), "the code fence holds no calls"
    return (), None


class _Stream:
    """See `portlab_spec.formats.segments.Stream`."""

    def __init__(self, form: Gemma3, lenient: bool) -> None:
        self._form, self._lenient = form, lenient
        self._splitter = Splitter(CONTROL_TOKENS)
        self._scanner = Scanner()
        self._all: list[str] = []
        self._ended = False

    def feed(self, text: str) -> list[Event]:
        self._all.append(text)
        events: list[Event] = []
        for piece, control in self._splitter.feed(text):
            if not self._ended:
                events += self._scanner.finish(ended=True) if control else self._scanner.feed(piece)
                self._ended = control
        # What follows may void a call that is strictly read.
        return [event for event in events if self._lenient or isinstance(event, Delta)]

    def close(self) -> Parsed:
        return self._form.parse_text("".join(self._all), lenient=self._lenient)
