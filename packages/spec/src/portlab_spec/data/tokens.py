"""Conversations as training rows: token ids and loss flags, checked, and never cut through an answer.

A row that is longer than `max_length` is a decision for the user, made by a policy:

`error` (default)
    The first such row stops the run and says what it needs.
`drop`
    The row is left out, and counted.
`drop_turns`
    The oldest exchanges are removed, whole: a user message with everything up to the next one, so that a result
    never loses its call. Developer messages and the last exchange stay.
`drop_tools`
    Tools that the conversation does not call are taken out of the offer, as few as will do. One tool always stays
    on offer, since an answer without a call means something only against tools that were refused.

A row that the last two cannot make fit is left out, and counted. No policy cuts a message.
"""

import hashlib
import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from pydantic import TypeAdapter

from portlab_spec.conversation import Conversation, Tool
from portlab_spec.errors import UserError
from portlab_spec.formats import Format, encode
from portlab_spec.formats.segments import Encoded, Segment, TextTokenizer

Policy = Literal["error", "drop", "drop_turns", "drop_tools"]

_WORD_MARK = "\u2581"  # ▁, by which SentencePiece vocabularies write a space
_REMEMBERED_RUNS = 16_384
_TOOLS = TypeAdapter(tuple[Tool, ...])
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Row:
    """One conversation as tokens.

    Attributes:
        id: the conversation's id.
        ids: token ids.
        loss: aligned with `ids`: is this token a training target?
        stratum: name of the first tool called in the answer, "" for none; batches are balanced over it.
        prefix_key: equal for rows with the same tools and the same developer text before the first question, see
            `portlab_spec.data.batching.group_by_prefix`.
    """

    id: str
    ids: tuple[int, ...]
    loss: tuple[bool, ...]
    stratum: str = ""
    prefix_key: str = ""

    @property
    def first_target(self) -> int:
        """Position of the first supervised token."""
        return self.loss.index(True)


@dataclass(frozen=True)
class Fit:
    """What a policy made of one conversation.

    Attributes:
        row: its tokens; None if it was dropped.
        conversation: what the row holds; the original if it was dropped.
        tokens: length of the original.
        removed_messages: how many messages were removed.
        removed_tools: names of the tools that were removed from the offer, in the order of the offer.
        reason: why it was dropped; "" if it was not.
    """

    row: Row | None
    conversation: Conversation
    tokens: int
    removed_messages: int = 0
    removed_tools: tuple[str, ...] = ()
    reason: str = ""

    @property
    def action(self) -> Literal["kept", "shortened", "dropped"]:
        """What was done, in a word."""
        if self.row is None:
            return "dropped"
        return "shortened" if self.removed_messages or self.removed_tools else "kept"


@dataclass(frozen=True)
class FittedRows:
    """The rows of a data set, and each conversation that was not taken as it stands."""

    rows: list[Row] = field(default_factory=list)
    shortened: list[Fit] = field(default_factory=list)
    dropped: list[Fit] = field(default_factory=list)

    def summary(self) -> str:
        """One line with the counts and the reasons."""
        parts = [f"{len(self.rows)} rows"]
        if self.shortened:
            messages = sum(fit.removed_messages for fit in self.shortened)
            tools = sum(len(fit.removed_tools) for fit in self.shortened)
            parts.append(f"{len(self.shortened)} of them shortened by {messages} messages and {tools} tools")
        for reason, count in Counter(fit.reason for fit in self.dropped).most_common():
            parts.append(f"{count} dropped ({reason})")
        return "; ".join(parts)


class CachedTokenizer:
    """A tokenizer that remembers the plain runs it has met.

    The declarations of a tool-call data set stand in every row, cut into runs by control tokens; only the questions
    and the arguments are new. Ids are those of the tokenizer itself.
    """

    def __init__(self, tokenizer: TextTokenizer, size: int = _REMEMBERED_RUNS) -> None:
        self._run = lru_cache(size)(lambda text: tuple(tokenizer.encode(text)))
        self.token_id: Callable[[str], int] = lru_cache(None)(tokenizer.token_id)
        self.decode: Callable[[Sequence[int]], str] = tokenizer.decode

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text."""
        return list(self._run(text))


def tokenize(
    conversations: Sequence[Conversation],
    fmt: Format,
    tokenizer: TextTokenizer,
    max_length: int,
    *,
    policy: Policy = "error",
) -> list[Row]:
    """Render and encode conversations; what `policy` changed is logged as a warning.

    Args:
        conversations: what to render, each ending with the answer to learn.
        fmt: the wire format.
        tokenizer: a tokenizer that has the control tokens of the format.
        max_length: tokens that a row may have.
        policy: what to do with longer ones, see the module's docstring.

    Raises:
        UserError: as `fit_rows`; also if no row is left.
    """
    fitted = fit_rows(conversations, fmt, tokenizer, max_length, policy)
    if not fitted.rows:
        raise UserError(
            f"no row fits max_length {max_length}: {fitted.summary()}", fix="Set max_length higher, or shorten the rows"
        )
    if fitted.shortened or fitted.dropped:
        _log.warning("max_length %d: %s", max_length, fitted.summary())
    return fitted.rows


def fit_rows(
    conversations: Sequence[Conversation],
    fmt: Format,
    tokenizer: TextTokenizer,
    max_length: int,
    policy: Policy = "error",
) -> FittedRows:
    """`fit` each conversation; the order is kept.

    Raises:
        UserError: no conversations, or as `fit`.
    """
    if not conversations:
        raise UserError("there are no conversations to train on", fix="Check the data set and its splits")
    cached = CachedTokenizer(tokenizer)
    out = FittedRows()
    for conversation in conversations:
        result = fit(conversation, fmt, cached, max_length, policy)
        if result.row is None:
            out.dropped.append(result)
            continue
        out.rows.append(result.row)
        if result.action == "shortened":
            out.shortened.append(result)
    return out


def fit(
    conversation: Conversation,
    fmt: Format,
    tokenizer: TextTokenizer,
    max_length: int,
    policy: Policy = "error",
) -> Fit:
    """A conversation as a row of at most `max_length` tokens, by a policy (see the module's docstring).

    Raises:
        UserError: the policy is `error` and the row is longer; a row without a supervised token, or with supervised
            text that the tokenizer cannot give back, whatever the policy; anything that the format refuses.
    """
    encoded = _encode(conversation, fmt, tokenizer)
    tokens = len(encoded.ids)
    if not any(encoded.loss):
        what, fix = "no token of the row is supervised", "End it with an assistant message"
        raise UserError(what, where=conversation.id, fix=fix)
    if tokens <= max_length:
        return Fit(_row(conversation, encoded), conversation, tokens)
    if policy == "error":
        raise UserError(
            f"the row needs {tokens} tokens and max_length is {max_length}: its answer would be cut off",
            where=conversation.id,
            fix=f"Set max_length to {tokens} or more, or shorten the row",
        )
    if policy == "drop":
        return Fit(None, conversation, tokens, reason="too long")
    candidates, last_resort = _SHORTER[policy]
    shorter = candidates(conversation)
    # Each candidate is shorter than the one before it: the first that fits removes the least.
    at = bisect_left(shorter, True, key=lambda c: len(_encode(c, fmt, tokenizer).ids) <= max_length)
    if at == len(shorter):
        return Fit(None, conversation, tokens, reason=f"too long even with {last_resort}")
    encoded = _encode(shorter[at], fmt, tokenizer)
    if not any(encoded.loss):
        return Fit(None, conversation, tokens, reason="too long, and only removable messages are supervised")
    kept = {tool.name for tool in shorter[at].tools}
    return Fit(
        _row(shorter[at], encoded),
        shorter[at],
        tokens,
        removed_messages=len(conversation.messages) - len(shorter[at].messages),
        removed_tools=tuple(tool.name for tool in conversation.tools if tool.name not in kept),
    )


def _without_turns(conversation: Conversation) -> list[Conversation]:
    """The conversation without its oldest exchange, its two oldest, ... down to the last."""
    messages = conversation.messages
    starts: list[int] = []  # of every exchange but the first
    before = "user"  # role of the last message that is not the developer's
    for i, message in enumerate(messages):
        if message.role == "user" and before != "user":
            starts.append(i)
        if message.role != "developer":
            before = message.role
    return [
        conversation.model_copy(
            update={"messages": (*(m for m in messages[:start] if m.role == "developer"), *messages[start:])}
        )
        for start in starts
    ]


def _without_tools(conversation: Conversation) -> list[Conversation]:
    """The conversation without one of the tools that it does not call, without two, ...

    Which goes first depends on a hash of the row's id and the tool's name. By position in the offer it would be the
    same tools in every row, and these would then be on offer only where they are the answer: a model would learn that.
    """
    called = {call.name for message in conversation.messages for call in message.tool_calls}
    called |= {message.name for message in conversation.messages if message.name}
    unused = [tool.name for tool in conversation.tools if tool.name not in called]
    unused.sort(key=lambda name: hashlib.sha256(f"{conversation.id}:{name}".encode()).digest())
    if len(unused) == len(conversation.tools):
        unused = unused[:-1]
    return [
        conversation.model_copy(update={"tools": tuple(t for t in conversation.tools if t.name not in unused[:n])})
        for n in range(1, len(unused) + 1)
    ]


# For each policy that shortens: the candidates, and what the last of them still holds.
_SHORTER: dict[str, tuple[Callable[[Conversation], list[Conversation]], str]] = {
    "drop_turns": (_without_turns, "its last exchange alone"),
    "drop_tools": (_without_tools, "the called tools alone"),
}


def _encode(conversation: Conversation, fmt: Format, tokenizer: TextTokenizer) -> Encoded:
    segments = fmt.render(conversation)
    check_reversible(segments, tokenizer, conversation.id)
    return encode(segments, tokenizer)


def check_reversible(segments: Sequence[Segment], tokenizer: TextTokenizer, where: str) -> None:
    """Refuse supervised text that comes back from the tokenizer as another text.

    The Gemma vocabulary writes a space as U+2581, so that a model trained on that character says a space instead.
    Only text that holds it is checked: for the rest, byte fallback makes Gemma's encoding exact.

    Raises:
        UserError: names the row.
    """
    for segment in segments:
        if (
            segment.loss
            and _WORD_MARK in segment.text
            and tokenizer.decode(tokenizer.encode(segment.text)) != segment.text
        ):
            raise UserError(
                f"the answer holds {_WORD_MARK!r} (U+2581), which the tokenizer turns into a space",
                where=where,
                fix="Replace it in the data, for example by an underscore or a space",
            )


def _row(conversation: Conversation, encoded: Encoded) -> Row:
    calls = conversation.messages[-1].tool_calls
    stratum = calls[0].name if calls else ""
    return Row(conversation.id, tuple(encoded.ids), tuple(encoded.loss), stratum, prefix_key(conversation))


def prefix_key(conversation: Conversation) -> str:
    """A digest of what comes before the first question: tools, in order, and the leading developer messages."""
    digest = hashlib.sha256(_TOOLS.dump_json(conversation.tools))
    for message in conversation.messages:
        if message.role != "developer":
            break
        digest.update(b"\0" + (message.content or "").encode())
    return digest.hexdigest()[:16]


def shared_prefix_length(rows: Sequence[Row]) -> int:
    """Tokens that all rows have in common at their start.

    Stops one before the first supervised token of any row, so that the token that predicts it belongs to the row
    itself.
    """
    return max(min(common_prefix([row.ids for row in rows]), min(row.first_target for row in rows) - 1), 0)


def common_prefix(sequences: Sequence[Sequence[int]]) -> int:
    """Number of ids that all sequences start with."""
    # What the first and the last in lexicographic order share, all between them share.
    ordered = [tuple(ids) for ids in sequences]
    first, last = min(ordered), max(ordered)
    return next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
