"""Shapes of one question and its answer, without messages."""

from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict

from portlab_spec.conversation import Conversation, Message, Record, Split, Tool, ToolCall
from portlab_spec.data.fitness import DEVELOPER_PROMPT
from portlab_spec.data.importers.context import Context, RowError
from portlab_spec.data.importers.literals import read_json
from portlab_spec.data.importers.normalise import conversation


class QuestionRow(Record):
    """A question with the call that answers it; no other key is known."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    user_query: str
    function_call: ToolCall
    id: str | None = None
    split: Split = "train"
    tools: Any = None


def read_question(row: Mapping[str, Any], context: Context) -> Conversation:
    """`user_query` and `function_call` {name, arguments}; arguments are an object.

    Raises:
        RowError: no tools on offer.
        ValidationError: a key is missing, unknown or of the wrong type.
    """
    question = QuestionRow.model_validate(row)
    split = question.split if "split" in row else context.split
    return Conversation(
        id=context.id_of(row),
        split=split,
        source=context.source,
        tools=_offered(context, context.tools_of(row)),
        messages=(
            Message(role="developer", content=DEVELOPER_PROMPT),
            Message(role="user", content=question.user_query),
            Message(role="assistant", tool_calls=(question.function_call,)),
        ),
    )


def read_simple_tool_calling(row: Mapping[str, Any], context: Context) -> Conversation:
    """`user_content`, `tool_name` and `tool_arguments` (JSON text); the tools are the shared ones."""
    call = {"name": _text(row, "tool_name"), "arguments": row.get("tool_arguments")}
    tools = _offered(context, context.tools_of(row))
    used = ("user_content", "tool_name", "tool_arguments", "tools")
    return conversation(row, _asked(_text(row, "user_content"), [call]), context, tools=tools, used=used)


def read_xlam(row: Mapping[str, Any], context: Context) -> Conversation:
    """xLAM function calling: `query`, `answers` and `tools`, the latter two as JSON text or as lists."""
    answers = row.get("answers")
    if isinstance(answers, str):
        try:
            answers = read_json(answers)
        except ValueError as error:
            raise RowError(f"answers is not JSON ({error})") from None
    if not isinstance(answers, list):
        raise RowError("answers is not a list")
    if not answers:
        raise RowError("answers is empty: there is nothing to learn", "Remove the row")
    tools = _offered(context, context.tools_of(row))
    messages = _asked(_text(row, "query"), answers)
    return conversation(row, messages, context, tools=tools, used=("query", "answers", "tools"))


def read_dolly(row: Mapping[str, Any], context: Context) -> Conversation:
    """Dolly: `instruction`, `context` if there is any, `response`; `category` goes to `meta`."""
    question = _text(row, "instruction")
    if row.get("context"):
        question = f"{question}\n\nContext: {_text(row, 'context')}"
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": _text(row, "response")}]
    return conversation(row, messages, context, tools=(), used=("instruction", "context", "response"))


def _asked(question: str, calls: list[Any]) -> list[dict[str, Any]]:
    return [
        {"role": "developer", "content": DEVELOPER_PROMPT},
        {"role": "user", "content": question},
        {"role": "assistant", "tool_calls": calls},
    ]


def _offered(context: Context, tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    if not tools:
        raise RowError(
            "the row offers no tools", "Add the key `tools` to the row, or a file tools.json beside the data set"
        )
    return tools


def _text(row: Mapping[str, Any], key: str) -> str:
    value = row.get(key)
    if value is None:
        raise RowError(f"missing key {key}", "Add it")
    if not isinstance(value, str):
        raise RowError(f"{key} is not text")
    return value
