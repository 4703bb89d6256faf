"""The records every other part speaks: tools, messages, conversations.

They are independent of any wire format: arguments are objects, not JSON text; roles are `developer`, `user`,
`assistant`, `tool` whatever a template calls them.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

Role = Literal["developer", "user", "assistant", "tool"]
Split = Literal["train", "validation", "test"]


class Record(BaseModel):
    """Base of the records: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Tool(Record):
    """A function that the model may call.

    `parameters` is a JSON Schema of type object in lower-case JSON Schema terms.
    """

    name: str = Field(pattern=r"^[a-zA-Z_][a-zA-Z0-9_.-]*$")
    description: str = Field(min_length=1)
    parameters: dict[str, JsonValue] = {"type": "object", "properties": {}}

    def to_openai(self) -> dict[str, Any]:
        """The tool as an OpenAI function object."""
        return {"type": "function", "function": self.model_dump()}


class ToolCall(Record):
    """One call: a tool's name and its arguments as an object."""

    name: str
    arguments: dict[str, JsonValue] = Field(default_factory=dict)


class Message(Record):
    """One turn.

    An assistant message holds text or calls, never both, and may hold the `reasoning` before them. A tool message
    names its tool and holds the result, as text in `content` or as an object in `response`; results stand in the
    order of the calls that they answer. `supervised` is false for an assistant message that is context only.
    """

    role: Role
    content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None
    response: dict[str, JsonValue] | None = None
    reasoning: str | None = None
    supervised: bool = True

    @model_validator(mode="after")
    def _check(self) -> "Message":
        if self.role != "assistant":
            for field in ("tool_calls", "reasoning"):
                if getattr(self, field):
                    raise ValueError(f"a {self.role} message cannot hold {field}")
            if not self.supervised:
                raise ValueError(f"a {self.role} message is never supervised: leave `supervised` out")
        if self.tool_calls and self.content:
            # The Gemma templates move such text behind the results of the calls: refuse instead of guessing.
            raise ValueError("an assistant message holds content or tool_calls, not both: split it in two")
        if self.role == "tool":
            if not self.name:
                raise ValueError("a tool message needs the name of its tool")
            if (self.content is None) == (self.response is None):
                raise ValueError("a tool message needs content or response, not both")
        elif self.response is not None:
            raise ValueError(f"a {self.role} message cannot hold response")
        elif not self.tool_calls and self.content is None:
            raise ValueError(f"a {self.role} message needs content")
        return self


class Conversation(Record):
    """Messages plus the tools on offer: one row of a data set.

    `meta` holds what a source knows beyond that, for example the accepted alternatives of an evaluation set; no
    renderer or trainer reads it.
    """

    id: str
    tools: tuple[Tool, ...] = ()
    messages: tuple[Message, ...] = Field(min_length=1)
    split: Split = "train"
    source: str = ""
    meta: dict[str, JsonValue] = Field(default_factory=dict)

    @property
    def prompt(self) -> "Conversation":
        """The conversation up to the last assistant message, which a model is to produce."""
        if self.messages[-1].role != "assistant":
            return self
        return self.model_copy(update={"messages": self.messages[:-1]})

    @property
    def target(self) -> Message:
        """The last assistant message, the answer to learn."""
        if self.messages[-1].role != "assistant":
            raise ValueError(f"conversation {self.id} does not end with an assistant message")
        return self.messages[-1]
