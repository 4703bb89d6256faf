"""Segments: the one representation behind text, token ids and loss mask."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal, Protocol

from portlab_spec.conversation import Conversation, ToolCall
from portlab_spec.errors import UserError

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class TextTokenizer(Protocol):
    """What a format needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, without special tokens."""

    def token_id(self, token: str) -> int:
        """Id of a control token."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, control tokens included."""


@dataclass(frozen=True)
class Segment:
    """A piece of a rendered conversation.

    `control` segments are exactly one control token; others are plain text that can never encode to one.
    `loss` is true where the model itself would produce the piece.
    """

    text: str
    loss: bool = False
    control: bool = False


@dataclass(frozen=True)
class Encoded:
    """Token ids of a conversation and, aligned with them, whether each token is a training target.

    `loss[i]` says that token i is to be predicted (from tokens before i): aligned with the target token, not
    with the position that predicts it.
    """

    ids: list[int]
    loss: list[bool]


@dataclass(frozen=True)
class Parsed:
    """What a model's output says.

    Attributes:
        calls: the calls, complete ones only: output that was cut off never yields a partial call.
        text: what the model said outside calls and thinking, verbatim; empty if it is only whitespace.
        reasoning: what it thought.
        error: why the grammar, strict or lenient as asked, refuses a part of the output; None if it accepts all of
            it. A strict parse with an error has no calls. A lenient parse keeps those that can be read beyond doubt,
            so that an error and calls may stand together.
        stopped: the output ended with a stop token.
        names: every tool name in call position, also those of malformed calls, so that an invented tool cannot
            hide behind a syntax error.
    """

    calls: tuple[ToolCall, ...] = ()
    text: str = ""
    error: str | None = None
    stopped: bool = False
    names: tuple[str, ...] = field(default=())
    reasoning: str = ""


@dataclass(frozen=True)
class Delta:
    """A piece of text or reasoning from a stream."""

    kind: Literal["text", "reasoning"]
    text: str


Event = Delta | ToolCall


class Stream(Protocol):
    """A parser fed with pieces of output as they arrive, cut anywhere."""

    def feed(self, text: str) -> list[Event]:
        """What this piece makes certain: text and reasoning as it grows, calls when they are complete.

        The pieces joined are the text and reasoning that `close` returns, save that output which ends with the start
        of a control token lacks it: only `close` can tell that it is text. A strict stream reports calls only there,
        because what follows may void them; a lenient stream reports each call once, when it is complete.
        """

    def close(self) -> Parsed:
        """The parse of all that was fed: equal to `parse_text` of it in one piece."""


class Format(Protocol):
    """A wire format.

    Attributes:
        control_tokens: the tokens that structure a conversation, text may not hold them.
        stop_tokens: those that end a turn of the model.
        added_tokens: those that the stock base model never saw.
    """

    @property
    def name(self) -> str: ...
    @property
    def control_tokens(self) -> tuple[str, ...]: ...
    @property
    def stop_tokens(self) -> tuple[str, ...]: ...
    @property
    def added_tokens(self) -> tuple[str, ...]: ...

    def render(self, conversation: Conversation, *, generation_prompt: bool = False) -> list[Segment]:
        """Segments of a conversation; with `generation_prompt`, ends where the model is to go on.

        Raises:
            UserError: text holds a control token, a value cannot be written, or turns are out of order.
        """

    def parse(self, ids: Sequence[int], tokenizer: TextTokenizer, *, lenient: bool = False) -> Parsed:
        """Calls and text in the ids that a model produced after a generation prompt.

        Strict is the format's own grammar, whole output, stop token included. Lenient also reads what models
        are known to write instead, wherever only one reading is possible. Never raises.
        """

    def parse_text(self, text: str, *, lenient: bool = False) -> Parsed:
        """As `parse`, from text in which control tokens are written out."""

    def stream(self, *, lenient: bool = False) -> Stream:
        """A parser for output that arrives in pieces."""


def encode(segments: Iterable[Segment], tokenizer: TextTokenizer) -> Encoded:
    """Token ids and loss flags of segments.

    Neighbouring plain segments with the same loss flag are encoded as one string, so that the ids equal those
    of the whole text; a change of the flag is a token boundary by construction.
    """
    ids: list[int] = []
    loss: list[bool] = []
    run: list[str] = []  # plain text, all with the flag `learnt`
    learnt = False

    def end_run() -> None:
        piece = tokenizer.encode("".join(run))
        ids.extend(piece)
        loss.extend([learnt] * len(piece))
        run.clear()

    for segment in segments:
        if run and (segment.control or segment.loss is not learnt):
            end_run()
        if segment.control:
            ids.append(tokenizer.token_id(segment.text))
            loss.append(segment.loss)
        else:
            run.append(segment.text)
            learnt = segment.loss
    if run:
        end_run()
    return Encoded(ids, loss)


def joined(segments: Iterable[Segment]) -> list[Segment]:
    """The same text, flags and tokens in as few segments as possible."""
    out: list[Segment] = []
    for (control, loss), group in groupby(segments, key=lambda s: (s.control, s.loss)):
        if control:
            out += group
        elif text := "".join(segment.text for segment in group):
            out.append(Segment(text, loss=loss))
    return out


def plain(text: str, where: str, control_tokens: Iterable[str], *, loss: bool = False) -> Segment:
    """A plain segment, refused if it holds the text of a control token.

    The formats have no escape for their own markers: such text would forge a turn or end a string early.

    Raises:
        UserError: a control token stands in `text`, or half a surrogate pair, which is no text; names the field.
    """
    if not text.isascii() and _LONE_SURROGATE.search(text):
        raise UserError("the text holds half a surrogate pair", where=where, fix="Mend the file's encoding")
    for token in control_tokens:
        if token in text:
            raise UserError(
                f"the text holds the control token {token!r}, which the format cannot escape",
                where=where,
                fix="Remove or rewrite it in the data",
            )
    return Segment(text, loss=loss)
