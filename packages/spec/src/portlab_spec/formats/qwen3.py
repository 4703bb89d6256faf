"""The Qwen3 wire format: ChatML turns, tools as JSON in the system turn, calls as JSON between two tokens.

    <|im_start|>system\\n TEXT \\n\\n INSTRUCTION AND TOOLS <|im_end|>\\n
    <|im_start|>user\\n TEXT <|im_end|>\\n
    <|im_start|>assistant\\n <tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call> <|im_end|>\\n
    <|im_start|>user\\n <tool_response>\\n TEXT \\n</tool_response> <|im_end|>\\n
    <|im_start|>assistant\\n <think>\\n\\n</think>\\n\\n TEXT <|im_end|>\\n

Source: the chat template of Qwen/Qwen3-*, which a test renders beside ours, with `enable_thinking=False`. No text is
trimmed, save that the last answer loses the line ends at its start.

Thinking is off by an empty thought, and the template writes it in two places: at the end of a generation prompt, and
in an assistant turn that ends the conversation. So do we, and the thought is context, never learnt. The prompt of the
last answer is therefore a prefix of the whole, token for token: what is trained is what inference renders with
`enable_thinking=False`. An earlier answer stands in the history as every later prompt shows it, without the thought; to
learn each answer exactly under its own prompt, give each a row that ends with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from portlab_spec.conversation import Conversation, Message, ToolCall
from portlab_spec.errors import UserError
from portlab_spec.formats.call_json import check_call, write_json
from portlab_spec.formats.output import PieceStream, parse_pieces, pieces_of_ids, pieces_of_text
from portlab_spec.formats.qwen3_output import (
    CALL,
    END_CALL,
    END_OF_TEXT,
    END_RESPONSE,
    END_THINK,
    IM_END,
    IM_START,
    IS_NAME,
    RESPONSE,
    STOPS,
    THINK,
    OutputParser,
)
from portlab_spec.formats.segments import Parsed, Segment, TextTokenizer, plain

CONTROL_TOKENS = (IM_START, IM_END, END_OF_TEXT, CALL, END_CALL, RESPONSE, END_RESPONSE, THINK, END_THINK)
# Further tokens of the vocabulary, for images and code completion, which text would turn into as well.
_RESERVED = (
    *(f"<|{what}_{side}|>" for what in ("object_ref", "box", "quad", "vision") for side in ("start", "end")),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
    *("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
)
REFUSED_TOKENS = (*CONTROL_TOKENS, *_RESERVED)


@dataclass(frozen=True)
class Qwen3:
    """The format as an object, see `portlab_spec.formats.Format`."""

    name: str = "qwen3"
    control_tokens: tuple[str, ...] = CONTROL_TOKENS
    stop_tokens: tuple[str, ...] = STOPS
    added_tokens: tuple[str, ...] = ()  # Qwen3 knows them all

    def render(self, conversation: Conversation, *, generation_prompt: bool = False) -> list[Segment]:
        """See `Format.render`."""
        _check_turns(conversation)
        messages, first = conversation.messages, int(conversation.messages[0].role == "developer")
        out = _system(conversation)
        for i, message in enumerate(messages[first:], start=first):
            where = f"{conversation.id}: messages[{i}]"
            last = i == len(messages) - 1
            if message.role == "assistant":
                out += _assistant(message, where, last=last)
            elif message.role == "tool":
                out += _open("user", newline=False) if messages[i - 1].role != "tool" else []
                out += _result(message, where)
                out += _CLOSE if last or messages[i + 1].role != "tool" else []
            else:
                role = "system" if message.role == "developer" else message.role
                out += [*_open(role), _text(message.content or "", f"{where}.content"), *_CLOSE]
        return [*out, *_open("assistant"), *_NO_THOUGHT] if generation_prompt else out

    def parse(self, ids: Sequence[int], tokenizer: TextTokenizer, *, lenient: bool = False) -> Parsed:
        """See `Format.parse`."""
        return parse_pieces(pieces_of_ids(ids, self.control_tokens, tokenizer), OutputParser(lenient=lenient))

    def parse_text(self, text: str, *, lenient: bool = False) -> Parsed:
        """See `Format.parse_text`."""
        return parse_pieces(pieces_of_text(text, self.control_tokens), OutputParser(lenient=lenient))

    def stream(self, *, lenient: bool = False, tokenizer: TextTokenizer | None = None) -> PieceStream:
        """See `Format.stream`."""
        return PieceStream(OutputParser(lenient=lenient), self.control_tokens, tokenizer)


FORMAT = Qwen3()


def _control(token: str, *, loss: bool = False) -> Segment:
    return Segment(token, loss=loss, control=True)


_CLOSE = [_control(IM_END), Segment("\n")]
_NO_THOUGHT = [_control(THINK), Segment("\n\n"), _control(END_THINK), Segment("\n\n")]
# The template's words, around the tools.
_BEFORE_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_AFTER_TOOLS = [
    Segment("\n</tools>\n\nFor each function call, return a json object with function name and arguments within "),
    *(_control(CALL), _control(END_CALL), Segment(" XML tags:\n")),
    *(_control(CALL), Segment('\n{"name": <function-name>, "arguments": <args-json-object>}\n'), _control(END_CALL)),
]


def _open(role: str, *, newline: bool = True) -> list[Segment]:
    return [_control(IM_START), Segment(role + "\n" if newline else role)]


def _text(text: str, where: str, *, loss: bool = False) -> Segment:
    return plain(text, where, REFUSED_TOKENS, loss=loss)


def _system(conversation: Conversation) -> list[Segment]:
    """The first turn: the developer's text and the tools, nothing without either."""
    first, tools = conversation.messages[0], conversation.tools
    text = []
    if first.role == "developer":
        text.append(_text(first.content or "", f"{conversation.id}: messages[0].content"))
    if not tools:
        return [*_open("system"), *text, *_CLOSE] if text else []
    declared = [
        Segment("\n" + write_json(tool.to_openai(), f"{conversation.id}: tool {tool.name}", REFUSED_TOKENS))
        for tool in tools
    ]
    separator = [Segment("\n\n")] if text else []
    return [*_open("system"), *text, *separator, Segment(_BEFORE_TOOLS), *declared, *_AFTER_TOOLS, *_CLOSE]


def _assistant(message: Message, where: str, *, last: bool) -> list[Segment]:
    loss = message.supervised
    out = _open("assistant")
    text = message.content or ""
    if last:
        out += _NO_THOUGHT
        text = text.lstrip("\n")
    if message.tool_calls:
        for j, call in enumerate(message.tool_calls):
            out += [Segment("\n", loss=loss)] if j else []
            out += [
                _control(CALL, loss=loss),
                _call(call, f"{where}.tool_calls[{j}]", loss),
                _control(END_CALL, loss=loss),
            ]
    else:
        out.append(_text(text, f"{where}.content", loss=loss))
    return [*out, _control(IM_END, loss=loss), Segment("\n")]  # the model is never asked for the newline


def _call(call: ToolCall, where: str, loss: bool) -> Segment:
    check_call(call, where, REFUSED_TOKENS)
    if not IS_NAME.fullmatch(call.name):  # the template writes it between quotes as it is
        raise UserError(f"{call.name!r} is not a tool name", where=where, fix="Use letters, digits, _ . -")
    arguments = write_json(call.arguments, f"{where}.arguments", REFUSED_TOKENS)
    return Segment(f'\n{{"name": "{call.name}", "arguments": {arguments}}}\n', loss=loss)


def _result(message: Message, where: str) -> list[Segment]:
    if message.response is None:
        text = _text(message.content or "", f"{where}.content").text
    else:
        text = write_json(message.response, f"{where}.response", REFUSED_TOKENS)
    return [Segment("\n"), _control(RESPONSE), Segment(f"\n{text}\n"), _control(END_RESPONSE)]


def _check_turns(conversation: Conversation) -> None:
    """Turns that the template would render, but no prompt can lead to, or that say nothing."""
    previous, asked = "", False
    for i, message in enumerate(conversation.messages):
        role, where = message.role, f"{conversation.id}: messages[{i}]"
        asked = asked or role == "user"
        if role == "tool" and previous not in ("tool_calls", "tool"):
            raise UserError("a tool result without a call before it", where=where, fix="Add the call")
        if previous == "tool_calls" and role != "tool":
            raise UserError(
                f"a message of role {role} follows tool calls", where=where, fix="Put the results in between"
            )
        if role == "assistant":
            _check_answer(message, previous, asked, where)
        previous = "tool_calls" if message.tool_calls else role


def _check_answer(message: Message, previous: str, asked: bool, where: str) -> None:
    if not asked:
        raise UserError("an assistant message before any of the user", where=where, fix="Begin with the user's")
    if previous == "assistant":
        raise UserError("two assistant messages in a row", where=where, fix="Join them, or remove one")
    if message.reasoning:
        raise UserError(
            "qwen3 is trained with thinking off, and its prompt closes the thought",
            where=where,
            fix="Remove the reasoning",
        )
    if not message.tool_calls and not (message.content or "").strip():
        raise UserError("an assistant message is empty", where=where, fix="Give it text or a call")
