"""What is scored and what comes out, one example at a time."""

from dataclasses import dataclass

from portlab_spec.conversation import Conversation, Record, ToolCall
from portlab_spec.errors import UserError
from portlab_spec.formats.segments import Parsed

EXAMPLE_METRICS = (
    "call_exact",
    "name_accuracy",
    "parse_rate",
    "hallucinated_tool_rate",
    "stopped_rate",
    "schema_valid_rate",
    "call_exact_unordered",
    "args_exact",
    "args_ast",
    "over_call",
    "under_call",
    "irrelevance_accuracy",
    "relevance_accuracy",
    "format_leak_rate",
)
CALL_METRICS = ("hallucinated_call_rate", "unknown_arg_rate", "missing_required_rate")
LENIENT = "_lenient"  # behind the name of a metric: of the lenient parse


@dataclass(frozen=True)
class Prediction:
    """What a model answered to one conversation.

    Attributes:
        example_id: id of the conversation.
        calls: the parsed calls, in order; empty if the output is malformed or plain text.
        error: why the strict parser refused the output; None if it is well formed.
        stopped: generation ended with a stop token.
        names: every tool name seen in the output, in malformed calls too.
        text: what the model said outside calls.
        lenient: the lenient parse of the same output; with it the `..._lenient` metrics are computed.
    """

    example_id: str
    calls: tuple[ToolCall, ...]
    error: str | None
    stopped: bool
    names: tuple[str, ...]
    text: str = ""
    lenient: Parsed | None = None

    @classmethod
    def from_parsed(cls, example_id: str, strict: Parsed, lenient: Parsed | None = None) -> "Prediction":
        """The prediction that the strict and, if given, the lenient parse of one output make."""
        return cls(example_id, strict.calls, strict.error, strict.stopped, strict.names, strict.text, lenient)


class ExampleScore(Record):
    """Every judgement of one example.

    Attributes:
        id: of the conversation.
        category: `meta["category"]` of the conversation, empty if it has none.
        flags: whether each metric over examples counts this one; a metric that leaves it out is absent.
        calls: (hits, count) of each metric over calls.
        reason: why the answer is not exactly right, on one line; empty if it is.
    """

    id: str
    category: str = ""
    flags: dict[str, bool]
    calls: dict[str, tuple[int, int]]
    reason: str = ""


def expected_calls(conversation: Conversation) -> tuple[ToolCall, ...] | None:
    """The calls that the last message holds; None where any call will do (`meta["expects"]` is "call").

    Raises:
        UserError: the conversation says neither.
    """
    if conversation.messages[-1].role == "assistant":
        return conversation.target.tool_calls
    if conversation.meta.get("expects") == "call":
        return None
    raise UserError(
        "the conversation does not end with the expected answer",
        where=conversation.id,
        fix='Add it as an assistant message, or set meta.expects to "call" where any call is right',
    )


def call_names(calls: tuple[ToolCall, ...]) -> tuple[str, ...]:
    """Names of the tools, in order."""
    return tuple(call.name for call in calls)
