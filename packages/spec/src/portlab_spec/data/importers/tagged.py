"""Shapes that write calls into the text of the turns: Hermes and ShareGPT, Glaive, ToolACE.

Their system turns describe the tools and the wire format of another model. Both are taken out: tools become records,
which each format declares in its own way, and such a system turn becomes the developer prompt that Gemma knows.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from portlab_spec.conversation import Conversation, Tool
from portlab_spec.data.fitness import DEVELOPER_PROMPT
from portlab_spec.data.importers.context import Context, RowError
from portlab_spec.data.importers.literals import read_call_list, read_json_objects, read_literal
from portlab_spec.data.importers.normalise import ROLES, conversation

_TOOLS = re.compile(r"<tools>(.*?)</tools>", re.DOTALL)
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_RESPONSE = re.compile(r"<tool_response>(.*?)</tool_response>", re.DOTALL)
_THINK = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)
_GLAIVE_TURN = re.compile(r"(?:\A\s*|\n\s*\n\s*)(USER|ASSISTANT|FUNCTION RESPONSE):[ \t]*")
_GLAIVE_CALL = re.compile(
    r"""\{\s*"name"\s*:\s*"(?P<name>[^"]+)"\s*,\s*"arguments"\s*:\s*'(?P<arguments>.*)'\s*\}""", re.DOTALL
)
_TOOLACE_CALL = re.compile(r"\[\s*[A-Za-z_][^()\[\]{},='\"]*\(")


def is_conversations(row: Mapping[str, Any]) -> bool:
    """ShareGPT turns, with the tools in a column or in the system turn?"""
    return "conversations" in row and not is_toolace(row)


def is_toolace(row: Mapping[str, Any]) -> bool:
    """ShareGPT turns with a `system` column that describes the tools?"""
    return row.keys() >= {"conversations", "system"} and "tools" not in row


def read_hermes(row: Mapping[str, Any], context: Context) -> Conversation:
    """ShareGPT `conversations` of {from, value}: calls tagged `<tool_call>`, results tagged `<tool_response>`.

    Tagged texts are JSON or Python literals. Turns from `function_call` and `observation` are read too.
    """
    turns = list(_turns(row))
    if row.get("system"):
        turns.insert(0, ("developer", _text(row["system"])))
    described = next((m for role, text in turns if role == "developer" for m in _TOOLS.finditer(text)), None)
    if row.get("tools") not in (None, "", []):
        tools = context.read_tools(row["tools"])
    elif described and described[1].strip():
        tools = context.read_tools(_objects(described[1], "<tools>"))
    else:
        tools = context.shared_tools()
    messages = [message for turn in turns for message in _hermes_messages(*turn, context)]
    used = ("conversations", "tools", "system")
    return conversation(row, messages, context, tools=tools, used=used)


def read_toolace(row: Mapping[str, Any], context: Context) -> Conversation:
    """ToolACE: tools as JSON in the `system` column, calls as `[name(argument=value)]`, results as JSON lists.

    Names that no tool can have (`Market Trends API`) get underscores, in the declaration and in the calls.
    """
    system = _text(row.get("system") or "")
    start = system.find("[{")
    tools: tuple[Tool, ...] = ()
    if start >= 0:
        declared = _objects(system[start:], "the list of tools in system")
        tools = context.read_tools([tool | {"name": _identifier(tool.get("name"), context)} for tool in declared])
    messages: list[dict[str, Any]] = []
    if system:
        messages.append(_developer(system, context, wired=bool(tools)))
    expected = 0
    for role, text in _turns(row):
        if role == "assistant" and _TOOLACE_CALL.match(text.lstrip()):
            calls = [call | {"name": _identifier(call["name"], context)} for call in _calls(text)]
            messages.append({"role": role, "tool_calls": calls})
            expected = len(calls)
        elif role == "tool":
            messages += _toolace_results(text, expected)
        else:
            messages.append({"role": role, "content": text})
    return conversation(row, messages, context, tools=tools, used=("conversations", "system"))


def read_glaive(row: Mapping[str, Any], context: Context) -> Conversation:
    """Glaive v2: tools as JSON in `system`; `chat` with `USER:`, `ASSISTANT:` and `FUNCTION RESPONSE:`."""
    system = _text(row.get("system") or "").removeprefix("SYSTEM:").strip()
    start = system.find("{")
    tools = context.read_tools(_objects(system[start:], "the functions in system")) if start >= 0 else ()
    messages = [_developer(system, context, wired=bool(tools))] if system else []
    parts = _GLAIVE_TURN.split(_text(row.get("chat") or ""))
    if parts[0].strip() or len(parts) == 1:
        raise RowError("chat does not start with USER: or ASSISTANT:")
    for speaker, text in zip(parts[1::2], parts[2::2], strict=True):
        text = text.replace("<|endoftext|>", "").strip()
        if speaker == "USER":
            messages.append({"role": "user", "content": text})
        elif speaker == "FUNCTION RESPONSE":
            messages.append({"role": "tool", "content": _object_or_text(text)})
        else:
            before, *calls = text.split("<functioncall>")
            message: dict[str, Any] = {"role": "assistant", "content": before.strip()}
            if calls:
                message["tool_calls"] = [_glaive_call(call) for call in calls]
            messages.append(message)
    return conversation(row, messages, context, tools=tools, used=("system", "chat"))


def _turns(row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    turns = row.get("conversations")
    if not isinstance(turns, list):
        raise RowError("conversations is not a list")
    for number, turn in enumerate(turns):
        where = f"conversations.{number}"
        if not isinstance(turn, Mapping):
            raise RowError(f"{where}: not an object")
        role = turn.get("role") if turn.get("from") is None else turn["from"]
        text = turn.get("content") if turn.get("value") is None else turn["value"]
        if not isinstance(role, str) or not (role in ROLES or role == "function_call"):
            raise RowError(f"{where}: unknown speaker {role!r}")
        if not isinstance(text, str):
            raise RowError(f"{where}: value is not text")
        yield (role if role == "function_call" else ROLES[role]), text


def _hermes_messages(role: str, text: str, context: Context) -> Iterator[dict[str, Any]]:
    if role == "developer":
        yield _developer(text, context, wired="<tools>" in text)
    elif role == "function_call":
        value = _literal(text, "the call")
        yield {"role": "assistant", "tool_calls": value if isinstance(value, list) else [value]}
    elif role == "tool":
        found = [_literal(body, "<tool_response>") for body in _tagged(_RESPONSE, text, "tool_response")]
        yield from map(_hermes_result, found or [_object_or_text(text)])
    elif role == "assistant":
        message: dict[str, Any] = {"role": role}
        if think := _THINK.match(text):
            message["reasoning"], text = think[1].strip(), text[think.end() :].lstrip()
        if bodies := _tagged(_CALL, text, "tool_call"):
            message["tool_calls"] = [_literal(body, "<tool_call>") for body in bodies]
            text = _CALL.sub("", text).strip()
        yield message | {"content": text}
    else:
        yield {"role": role, "content": text}


def _hermes_result(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping) and value.keys() == {"name", "content"}:
        content = value["content"]
        content = _object_or_text(content) if isinstance(content, str) else content
        return {"role": "tool", "name": value["name"], "content": content}
    return {"role": "tool", "content": value}


def _tagged(pattern: re.Pattern[str], text: str, tag: str) -> list[str]:
    bodies = pattern.findall(text)
    if not len(bodies) == text.count(f"<{tag}>") == text.count(f"</{tag}>"):
        raise RowError(f"<{tag}> is opened or closed without its other half", "Mend the text")
    return bodies


def _toolace_results(text: str, calls: int) -> Iterator[dict[str, Any]]:
    """One message per result, if the text is a list of as many results as there are calls."""
    value = _object_or_text(text, also=list)
    results = value if isinstance(value, list) and len(value) == calls else [value]
    for result in results:
        if isinstance(result, Mapping) and isinstance(result.get("results"), Mapping) and "name" in result:
            result = result["results"]  # the name repeats that of the call
        yield {"role": "tool", "content": result}


def _developer(text: str, context: Context, *, wired: bool) -> dict[str, Any]:
    """The developer turn: the text itself, unless it teaches another model's format."""
    if not wired:
        return {"role": "developer", "content": text}
    context.mended("system prompt of another format replaced")
    return {"role": "developer", "content": DEVELOPER_PROMPT}


def _identifier(name: Any, context: Context) -> str:
    if not isinstance(name, str):
        raise RowError("a tool has no name", "Add it")
    mended = re.sub(r"[^a-zA-Z0-9_.-]", "_", name.strip())
    if mended != name:
        context.mended("name with characters that no tool name has")
    return mended


def _calls(text: str) -> list[dict[str, Any]]:
    try:
        return read_call_list(text)
    except ValueError as error:
        raise RowError(f"a list of calls cannot be read ({error})") from None


def _glaive_call(text: str) -> dict[str, Any]:
    """`{"name": ..., "arguments": '{...}'}`: JSON, but for the quotes around the arguments."""
    if quoted := _GLAIVE_CALL.fullmatch(text.strip()):
        return {"name": quoted["name"], "arguments": quoted["arguments"].replace("\\'", "'")}
    value = _literal(text.strip(), "<functioncall>")
    return value if isinstance(value, dict) else {}


def _object_or_text(text: str, also: type = dict) -> Any:
    """A result that is a JSON or Python object, else the text itself."""
    try:
        value = read_literal(text)
    except ValueError:
        return text
    return value if isinstance(value, dict | also) else text


def _objects(text: str, what: str) -> list[dict[str, Any]]:
    try:
        return read_json_objects(text)
    except ValueError as error:
        raise RowError(f"{what} is not JSON ({error})") from None


def _literal(text: str, what: str) -> Any:
    try:
        return read_literal(text)
    except ValueError as error:
        raise RowError(f"{what}: {error}") from None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise RowError("system or chat is not text")
    return value
