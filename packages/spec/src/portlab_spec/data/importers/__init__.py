"""One importer per published shape of a data set, and the choice between them.

A row is read by exactly one importer: each knows its shape by marks that the others do not have.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from portlab_spec.conversation import Conversation
from portlab_spec.data.importers import chats, questions, tagged
from portlab_spec.data.importers.context import Context, RowError
from portlab_spec.errors import UserError

type Row = Mapping[str, Any]


@dataclass(frozen=True)
class Importer:
    """How rows of one shape are known and read.

    Attributes:
        name: as given to `--shape`.
        matches: has the row the marks of this shape?
        read: the row as a record; raises RowError or pydantic's ValidationError.
    """

    name: str
    matches: Callable[[Row], bool]
    read: Callable[[Row, Context], Conversation]


def _is_question(row: Row) -> bool:
    return "messages" not in row and ("user_query" in row or "function_call" in row)


def _is_fitness(row: Row) -> bool:
    return chats.is_fitness_columns(row) or chats.is_chat("fitness-coach")(row)


def _has(*keys: str) -> Callable[[Row], bool]:
    wanted = set(keys)
    return lambda row: row.keys() >= wanted


IMPORTERS: dict[str, Importer] = {
    importer.name: importer
    for importer in (
        Importer("record", chats.is_chat("record"), chats.read_record),
        Importer("seed", _is_question, questions.read_question),
        Importer("fitness-coach", _is_fitness, chats.read_fitness_coach),
        Importer("mobile-actions", chats.is_chat("mobile-actions"), chats.read_mobile_actions),
        Importer("simple-tool-calling", _has("user_content", "tool_name"), questions.read_simple_tool_calling),
        Importer("openai", chats.is_chat("openai"), chats.read_messages),
        Importer("openai-functions", chats.is_chat("openai-functions"), chats.read_openai_functions),
        Importer("trl", chats.is_chat("trl"), chats.read_messages),
        Importer("trl-prompt-completion", chats.is_prompt_completion, chats.read_prompt_completion),
        Importer("xlam", _has("query", "answers"), questions.read_xlam),
        Importer("hermes", tagged.is_conversations, tagged.read_hermes),
        Importer("glaive", _has("system", "chat"), tagged.read_glaive),
        Importer("toolace", tagged.is_toolace, tagged.read_toolace),
        Importer("dolly", _has("instruction", "response"), questions.read_dolly),
        Importer("messages", chats.is_chat("messages"), chats.read_messages),
    )
}


def importer_named(shape: str) -> Importer:
    """The importer of that name.

    Raises:
        UserError: there is none; lists the names.
    """
    if shape not in IMPORTERS:
        raise UserError(f"unknown shape {shape!r}", where="--shape", fix=f"Use one of: {', '.join(IMPORTERS)}")
    return IMPORTERS[shape]


def detect(row: Row) -> Importer:
    """The importer whose marks the row has.

    Raises:
        RowError: none, or several; names them.
    """
    found = [importer for importer in IMPORTERS.values() if importer.matches(row)]
    if not found:
        raise RowError(
            f"unknown kind of row, with the keys {', '.join(row) or '(none)'}",
            "Give `messages`, or `user_query` and `function_call`, or name the shape",
        )
    if len(found) > 1:
        names = " or ".join(importer.name for importer in found)
        raise RowError(f"the row may be {names}", "Name the shape (--shape)")
    return found[0]
