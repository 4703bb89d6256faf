"""The FunctionGemma wire format (Gemma 3 270M with named control tokens at ids 46-52).

Layout of a conversation, `·` marking places without any separator:

    <bos><start_of_turn>developer\\n TEXT · DECLARATIONS <end_of_turn>\\n
    <start_of_turn>user\\n TEXT <end_of_turn>\\n
    <start_of_turn>model\\n CALL · CALL <start_function_response>

`<start_function_response>` after the last call is the model's own stop token, so it carries loss; the results
that follow it do not. Source of the format: the FunctionGemma formatting guide at
ai.google.dev/gemma/docs/functiongemma and the grammar of LiteRT-LM's function-call parser.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from portlab_spec.conversation import Conversation, Message, Tool, ToolCall
from portlab_spec.errors import UserError
from portlab_spec.formats.segments import Parsed, Segment, TextTokenizer, plain

BOS, EOS, PAD = "<bos>", "<eos>", "<pad>"
TURN, END_TURN = "<start_of_turn>", "<end_of_turn>"
DECLARE, END_DECLARE = "<start_function_declaration>", "<end_function_declaration>"
CALL, END_CALL = "<start_function_call>", "<end_function_call>"
RESPONSE, END_RESPONSE = "<start_function_response>", "<end_function_response>"
ESCAPE = "<escape>"

CONTROL_TOKENS = (
    BOS, EOS, PAD, TURN, END_TURN, DECLARE, END_DECLARE, CALL, END_CALL, RESPONSE, END_RESPONSE, ESCAPE,
)  # fmt: skip
STOP_TOKENS = (EOS, END_TURN, RESPONSE)
# What FunctionGemma adds to Gemma 3: stock checkpoints hold an unused, untrained embedding row for each.
ADDED_TOKENS = (DECLARE, END_DECLARE, CALL, END_CALL, RESPONSE, END_RESPONSE, ESCAPE)

_ROLE = {"developer": "developer", "user": "user", "assistant": "model"}
_CONTROL_RE = re.compile("|".join(map(re.escape, CONTROL_TOKENS)))
_IDENTIFIER = r"[a-zA-Z_][a-zA-Z0-9_.-]*"


@dataclass(frozen=True)
class FunctionGemma:
    """The format as an object, see `portlab_spec.formats.Format`."""

    name: str = "functiongemma"
    control_tokens: tuple[str, ...] = CONTROL_TOKENS
    stop_tokens: tuple[str, ...] = STOP_TOKENS
    added_tokens: tuple[str, ...] = ADDED_TOKENS

    def render(self, conversation: Conversation, *, generation_prompt: bool = False) -> list[Segment]:
        """Segments of a conversation.

        Raises:
            UserError: text holds a control token, an argument cannot be written, or turns are out of order.
        """
        return _render(conversation, generation_prompt)

    def parse(self, ids: Sequence[int], tokenizer: TextTokenizer) -> Parsed:
        """Parse model output from token ids: a marker is a token, never a run of characters."""
        by_id = {tokenizer.token_id(t): t for t in CONTROL_TOKENS}
        pieces: list[Segment] = []
        run: list[int] = []
        for token in ids:
            if token in by_id:
                if run:
                    pieces.append(Segment(tokenizer.decode(run)))
                    run = []
                pieces.append(Segment(by_id[token], control=True))
            else:
                run.append(token)
        if run:
            pieces.append(Segment(tokenizer.decode(run)))
        return _parse(pieces)

    def parse_text(self, text: str) -> Parsed:
        """Parse model output from text with its control tokens written out."""
        pieces: list[Segment] = []
        at = 0
        for match in _CONTROL_RE.finditer(text):
            if match.start() > at:
                pieces.append(Segment(text[at : match.start()]))
            pieces.append(Segment(match.group(), control=True))
            at = match.end()
        if at < len(text):
            pieces.append(Segment(text[at:]))
        return _parse(pieces)


FORMAT = FunctionGemma()


# ---------------------------------------------------------------------------------------------- rendering


def _control(token: str, *, loss: bool = False) -> Segment:
    return Segment(token, loss=loss, control=True)


def _render(conversation: Conversation, generation_prompt: bool) -> list[Segment]:
    out = [_control(BOS)]
    messages = list(conversation.messages)
    if conversation.tools and messages[0].role != "developer":
        messages.insert(0, Message(role="developer", content=""))
    in_model_turn = False  # after calls the model's turn stays open for results and the answer
    for i, message in enumerate(messages):
        where = f"{conversation.id}: messages[{i}]"
        if in_model_turn and message.role not in ("tool", "assistant"):
            raise UserError(
                f"a {message.role} message follows tool calls",
                where=where,
                fix="Put the tool results in between",
            )
        if message.role == "tool":
            if not in_model_turn:
                raise UserError("a tool result without a call before it", where=where, fix="Add the call")
            out += _response(message, where, opened=messages[i - 1].role == "assistant")
            continue
        if not in_model_turn:
            out += [_control(TURN), Segment(_ROLE[message.role] + "\n")]
        loss = message.role == "assistant"
        if message.tool_calls:
            for j, call in enumerate(message.tool_calls):
                out += _call(call, f"{where}.tool_calls[{j}]")
            out.append(_control(RESPONSE, loss=True))
            in_model_turn = True
            continue
        text = (message.content or "").strip()
        if loss and not text:
            raise UserError("an assistant message is empty", where=where, fix="Give it text or a call")
        if text:
            out.append(plain(text, f"{where}.content", CONTROL_TOKENS, loss=loss))
        if message.role == "developer" and i == 0:
            for tool in conversation.tools:
                out += _declaration(tool, f"{conversation.id}: tool {tool.name}")
        out += [_control(END_TURN, loss=loss), Segment("\n")]
        in_model_turn = False
    if generation_prompt and not in_model_turn:
        out += [_control(TURN), Segment("model\n")]
    return out


def _string(text: str, where: str, *, loss: bool = False) -> list[Segment]:
    escape = _control(ESCAPE, loss=loss)
    body = plain(text, where, CONTROL_TOKENS, loss=loss)
    return [escape, body, escape] if text else [escape, escape]


def _declaration(tool: Tool, where: str) -> list[Segment]:
    return [
        _control(DECLARE),
        Segment(f"declaration:{tool.name}{{description:"),
        *_string(tool.description, f"{where}.description"),
        Segment(",parameters:{"),
        *_object_schema(tool.parameters, f"{where}.parameters"),
        Segment("}}"),
        _control(END_DECLARE),
    ]


def _object_schema(schema: dict[str, Any], where: str) -> list[Segment]:
    """Body of an OBJECT: properties sorted by name, `required` in input order, both left out when empty."""
    out: list[Segment] = []
    properties: dict[str, Any] = schema.get("properties") or {}
    if properties:
        out.append(Segment("properties:{"))
        for n, name in enumerate(sorted(properties, key=str.lower)):
            out += [Segment("," if n else ""), plain(name, where, CONTROL_TOKENS), Segment(":{")]
            out += [*_property(properties[name], f"{where}.{name}"), Segment("}")]
        out.append(Segment("},"))
    if required := schema.get("required"):
        out += [Segment("required:["), *_strings(required, f"{where}.required"), Segment("],")]
    return [*out, Segment("type:"), *_string("OBJECT", where)]


def _property(schema: dict[str, Any], where: str) -> list[Segment]:
    kind = schema.get("type")
    if not isinstance(kind, str):
        raise UserError(f"the schema has no single type ({kind!r})", where=where, fix="Give it one JSON Schema type")
    out = [Segment("description:"), *_string(str(schema.get("description", "")), where), Segment(",")]
    kind = kind.lower()
    if enum := schema.get("enum"):
        if kind != "string":
            raise UserError(f"an enum of type {kind} is not rendered", where=where, fix="Use strings")
        out += [Segment("enum:["), *_strings(enum, f"{where}.enum"), Segment("],")]
    if kind == "object":
        return [*out, *_object_schema(schema, where)]
    if kind == "array":
        items = schema.get("items")
        if not isinstance(items, dict):
            raise UserError("an array needs `items`", where=where, fix="Say what the array holds")
        out += [Segment("items:{"), *_property(items, f"{where}.items"), Segment("},")]
    return [*out, Segment("type:"), *_string(kind.upper(), where)]


def _strings(values: Sequence[str], where: str) -> list[Segment]:
    out: list[Segment] = []
    for n, value in enumerate(values):
        out += [Segment(","), *_string(value, where)] if n else _string(value, where)
    return out


def _call(call: ToolCall, where: str) -> list[Segment]:
    if not re.fullmatch(_IDENTIFIER, call.name):
        raise UserError(f"{call.name!r} is not a tool name", where=where, fix="Use letters, digits, _ . -")
    return [
        _control(CALL, loss=True),
        Segment(f"call:{call.name}", loss=True),
        *_value(call.arguments, f"{where}.arguments", loss=True),
        _control(END_CALL, loss=True),
    ]


def _response(message: Message, where: str, *, opened: bool) -> list[Segment]:
    # The opening marker of the first result is the stop token of the call before it: already there.
    return [
        *([] if opened else [_control(RESPONSE)]),
        plain(f"response:{message.name}{{value:", where, CONTROL_TOKENS),
        *_string(message.content or "", f"{where}.content"),
        Segment("}"),
        _control(END_RESPONSE),
    ]


def _value(value: Any, where: str, *, loss: bool) -> list[Segment]:
    """An argument value: strings between escapes, numbers and literals bare, keys sorted at every level."""
    if isinstance(value, str):
        return _string(value, where, loss=loss)
    if isinstance(value, dict):
        out = [Segment("{", loss=loss)]
        for n, key in enumerate(sorted(value, key=str.lower)):
            if not re.fullmatch(_IDENTIFIER, key):
                raise UserError(f"the key {key!r} cannot be written", where=where, fix="Use letters, digits, _ . -")
            out += [Segment(f"{',' if n else ''}{key}:", loss=loss)]
            out += _value(value[key], f"{where}.{key}", loss=loss)
        return [*out, Segment("}", loss=loss)]
    if isinstance(value, list | tuple):
        out = [Segment("[", loss=loss)]
        for n, item in enumerate(value):
            out += [Segment("," if n else "", loss=loss), *_value(item, f"{where}[{n}]", loss=loss)]
        return [*out, Segment("]", loss=loss)]
    return [Segment(_scalar(value, where), loss=loss)]


def _scalar(value: Any, where: str) -> str:
    if value is None or isinstance(value, bool | int):
        return json.dumps(value)
    if isinstance(value, float) and math.isfinite(value):
        # No exponent: LiteRT's lexer takes a fraction or an exponent, not both.
        text = format(Decimal(repr(value)), "f")
        return text if "." in text else text + ".0"
    raise UserError(f"{value!r} cannot be written as an argument", where=where, fix="Use finite JSON values")


# ------------------------------------------------------------------------------------------------ parsing


class _SyntaxError(Exception):
    """Malformed output, with the reason."""


def _parse(pieces: list[Segment]) -> Parsed:
    names = _names("".join(p.text for p in pieces))
    calls: list[ToolCall] = []
    text: list[str] = []
    stopped = False
    i = 0
    try:
        while i < len(pieces):
            piece = pieces[i]
            i += 1
            if stopped:
                raise _SyntaxError("output goes on after a stop token")
            if not piece.control:
                text.append(piece.text)
            elif piece.text in STOP_TOKENS:
                stopped = True
            elif piece.text == CALL:
                end = i
                while end < len(pieces) and not (pieces[end].control and pieces[end].text == END_CALL):
                    end += 1
                if end == len(pieces):
                    raise _SyntaxError("a call is not closed")
                calls.append(_Body(pieces[i:end]).call())
                i = end + 1
            else:
                raise _SyntaxError(f"{piece.text} outside a call")
        joined = "".join(text).strip()
        if calls and joined:
            raise _SyntaxError("text beside calls")
        if calls and not (pieces[-1].control and pieces[-1].text == RESPONSE):
            raise _SyntaxError(f"calls do not end with {RESPONSE}")
        if not calls and not stopped:
            raise _SyntaxError("cut off before a stop token")
    except _SyntaxError as error:
        return Parsed(text="".join(text).strip(), error=str(error), stopped=stopped, names=names)
    return Parsed(tuple(calls), joined, None, stopped, names)


def _names(text: str) -> tuple[str, ...]:
    """Names in call position, however malformed the rest is."""
    pattern = rf"(?:{re.escape(CALL)}\s*(?:call\s*:?\s*)?|\bcall:\s*)({_IDENTIFIER})"
    return tuple(m for m in re.findall(pattern, text) if m != "call")


_LEXEME = re.compile(
    rf"""\s*(?:(?P<number>-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?)(?![\w.-])|(?P<id>{_IDENTIFIER})|(?P<mark>[{{}}\[\]:,]))\s*"""
)


class _Body:
    """Recursive descent over the lexemes between the call markers; strings are atoms."""

    def __init__(self, pieces: Sequence[Segment]) -> None:
        self._lexemes = list(_lex(pieces))
        self._at = 0

    def call(self) -> ToolCall:
        self._expect("id", "call")
        self._expect("mark", ":")
        name = self._take("id")
        arguments = self._object() if self._peek() == ("mark", "{") else {}
        if self._peek() is not None:
            raise _SyntaxError("more text after the call")
        return ToolCall(name=name, arguments=arguments)

    def _object(self) -> dict[str, Any]:
        self._expect("mark", "{")
        out: dict[str, Any] = {}
        while self._peek() != ("mark", "}"):
            if out:
                self._expect("mark", ",")
            key = self._take("id")
            if key in out:
                raise _SyntaxError(f"the key {key} stands twice")
            self._expect("mark", ":")
            out[key] = self._value()
        self._at += 1
        return out

    def _value(self) -> Any:
        match self._peek():
            case ("mark", "{"):
                return self._object()
            case ("mark", "["):
                return self._array()
            case ("string", text):
                self._at += 1
                return text
            case ("number", text):
                self._at += 1
                return json.loads(text)
            case ("id", "true" | "false" | "null" as word):
                self._at += 1
                return json.loads(word)
            case other:
                raise _SyntaxError(f"a value was expected, not {other and other[1]!r}")

    def _array(self) -> list[Any]:
        self._expect("mark", "[")
        out: list[Any] = []
        while self._peek() != ("mark", "]"):
            if out:
                self._expect("mark", ",")
            out.append(self._value())
        self._at += 1
        return out

    def _peek(self) -> tuple[str, str] | None:
        return self._lexemes[self._at] if self._at < len(self._lexemes) else None

    def _take(self, kind: str) -> str:
        lexeme = self._peek()
        if lexeme is None or lexeme[0] != kind:
            raise _SyntaxError(f"a {kind} was expected, not {lexeme and lexeme[1]!r}")
        self._at += 1
        return lexeme[1]

    def _expect(self, kind: str, text: str) -> None:
        if self._peek() != (kind, text):
            lexeme = self._peek()
            raise _SyntaxError(f"{text!r} was expected, not {lexeme and lexeme[1]!r}")
        self._at += 1


def _lex(pieces: Sequence[Segment]) -> list[tuple[str, str]]:
    out: list[tuple[str, str]] = []
    i = 0
    while i < len(pieces):
        piece = pieces[i]
        i += 1
        if not piece.control:
            out += _lex_text(piece.text)
        elif piece.text == ESCAPE:
            body = ""
            while i < len(pieces) and not (pieces[i].control and pieces[i].text == ESCAPE):
                if pieces[i].control:
                    raise _SyntaxError(f"{pieces[i].text} inside a string")
                body += pieces[i].text
                i += 1
            if i == len(pieces):
                raise _SyntaxError("a string is not closed")
            out.append(("string", body))
            i += 1
        else:
            raise _SyntaxError(f"{piece.text} inside a call")
    return out


def _lex_text(text: str) -> list[tuple[str, str]]:
    out: list[tuple[str, str]] = []
    at = 0
    while at < len(text):
        match = _LEXEME.match(text, at)
        if match is None:
            if text[at:].isspace():
                break
            raise _SyntaxError(f"unexpected {text[at : at + 12]!r}")
        kind = match.lastgroup or ""
        out.append((kind, match.group(kind)))
        at = match.end()
    return out
