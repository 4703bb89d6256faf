"""The Gemma 4 wire format, in its five published template revisions and two sizes of generation prompt.

Layout of a conversation, `·` marking places without any separator:

    <bos><|turn>system\\n [<|think|>\\n] TEXT · DECLARATIONS <turn|>\\n
    <|turn>user\\n TEXT <turn|>\\n
    <|turn>model\\n [<|channel>thought\\n TEXT \\n<channel|>] CALL · CALL <|tool_response>
    response:NAME{value:...} <tool_response|> TEXT <turn|>\\n

The model's turn stays open from its calls to its answer; `<|tool_response>` after the last call is its stop token.
Source: the chat templates of google/gemma-4-E2B-it, named here by the commits that published them. The larger models
(12B, 26B-A4B, 31B) differ in one place: with thinking off, their generation prompt ends in an empty thought, which
the history does not hold; there a prompt is not a prefix of the full text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from portlab_spec.conversation import Conversation, Message
from portlab_spec.errors import UserError
from portlab_spec.formats.call_body import LENIENT_KEY
from portlab_spec.formats.declarations import DeclarationWriter
from portlab_spec.formats.markers import GEMMA4 as MARKERS
from portlab_spec.formats.output import (
    THOUGHT,
    OutputGrammar,
    OutputParser,
    PieceStream,
    parse_pieces,
    pieces_of_ids,
    pieces_of_text,
)
from portlab_spec.formats.segments import Parsed, Segment, TextTokenizer
from portlab_spec.formats.turns import TurnWriter
from portlab_spec.formats.values import ValueWriter


@dataclass(frozen=True)
class Revision:
    """What distinguishes the published templates.

    Attributes:
        commit: of google/gemma-4-E2B-it.
        open_turn: a model's turn goes on over calls, results and the answer, and a call is followed by
            `<|tool_response>`; before, each assistant message was a turn of its own.
        thinks: messages whose reasoning is rendered: "none", "calls" (those with calls) or "all".
        one_turn: neighbouring assistant messages share a turn, and results may stand last before a user's turn.
        null: text of a null; "" where the template writes Python's `None`, which no parser reads back.
        drops_standard_names: parameters called like a schema key vanish from declarations.
        early: nullable comes before enum, items and properties.
    """

    commit: str
    open_turn: bool = True
    thinks: str = "calls"
    one_turn: bool = False
    null: str = ""
    drops_standard_names: bool = False
    early: bool = False


REVISIONS = {
    r.commit: r
    for r in (
        Revision("4742fe8", open_turn=False, thinks="none", drops_standard_names=True, early=True),
        Revision("b446025", drops_standard_names=True),
        Revision("6b7e72c"),
        Revision("905e84b"),
        Revision("8995379", thinks="all", one_turn=True, null="null"),
    )
}
LATEST = "8995379"


@dataclass(frozen=True)
class Gemma4:
    """The format as an object, see `portlab_spec.formats.Format`.

    Attributes:
        revision: commit of the template.
        large: the generation prompt of 12B, 26B-A4B and 31B.
        thinking: ask the model to think (`<|think|>` in the system turn).
        keep_thinking: reasoning of earlier turns stays if it led to calls (only the latest revision can).
        learn_thinking: reasoning carries loss.
        in_thought: the prompt has opened the thinking channel, as the latest revision does after a result when
            thinking is on; see `after`.
    """

    revision: str = LATEST
    large: bool = False
    thinking: bool = False
    keep_thinking: bool = False
    learn_thinking: bool = True
    in_thought: bool = False
    control_tokens: tuple[str, ...] = MARKERS.structure
    stop_tokens: tuple[str, ...] = MARKERS.stops
    added_tokens: tuple[str, ...] = ()  # Gemma 4 knows them all

    @property
    def name(self) -> str:
        """As `portlab_spec.formats.find_format` reads it, for example `gemma4-31b-thinking@905e84b`."""
        suffix = ("-31b" if self.large else "") + ("-thinking" if self.thinking else "")
        return f"gemma4{suffix}" + ("" if self.revision == LATEST else f"@{self.revision}")

    def render(self, conversation: Conversation, *, generation_prompt: bool = False) -> list[Segment]:
        """See `Format.render`."""
        return _Renderer(self).render(conversation, generation_prompt)

    def after(self, prompt: Sequence[Segment]) -> "Gemma4":
        """The format for parsing what follows a prompt, which may have opened the thinking channel."""
        channel = [s.text for s in prompt if s.control and s.text in (MARKERS.channel, MARKERS.end_channel)]
        return replace(self, in_thought=channel[-1:] == [MARKERS.channel])

    def parse(self, ids: Sequence[int], tokenizer: TextTokenizer, *, lenient: bool = False) -> Parsed:
        """See `Format.parse`."""
        return parse_pieces(pieces_of_ids(ids, self.control_tokens, tokenizer), self._parser(lenient))

    def parse_text(self, text: str, *, lenient: bool = False) -> Parsed:
        """See `Format.parse_text`."""
        return parse_pieces(pieces_of_text(text, self.control_tokens), self._parser(lenient))

    def stream(self, *, lenient: bool = False, tokenizer: TextTokenizer | None = None) -> PieceStream:
        """See `Format.stream`."""
        return PieceStream(self._parser(lenient), self.control_tokens, tokenizer)

    def _parser(self, lenient: bool) -> OutputParser:
        stop = MARKERS.response if REVISIONS[self.revision].open_turn else MARKERS.end_turn
        grammar = OutputGrammar(MARKERS, LENIENT_KEY, stop, text_before_calls=True, in_thought=self.in_thought)
        return OutputParser(grammar, lenient=lenient)


class _Renderer:
    """One rendering; keeps what the next turn depends on."""

    def __init__(self, fmt: Gemma4) -> None:
        self._format, self._revision, self._turns = fmt, REVISIONS[fmt.revision], _turn_writer(fmt.revision)

    def render(self, conversation: Conversation, generation_prompt: bool) -> list[Segment]:
        turns, messages = self._turns, conversation.messages
        out = [turns.control(MARKERS.bos), *self._system(conversation)]
        start = int(messages[0].role == "developer")
        last_user = max((i for i, m in enumerate(messages) if m.role == "user"), default=-1)
        previous = ""
        for i, message in enumerate(messages[start:], start=start):
            where = f"{conversation.id}: messages[{i}]"
            after = messages[i + 1].role if i + 1 < len(messages) else ""
            self._check(message, previous, where)
            if message.role == "tool":
                out += turns.result(message, where, opened=previous == "tool_calls")
                if after == "user":
                    out += turns.close()
            elif message.role == "user":
                out += [*turns.open("user"), *turns.text((message.content or "").strip(), f"{where}.content")]
                out += turns.close()
            else:
                out += self._assistant(message, where, previous, after, current=i > last_user)
            previous = "tool_calls" if message.tool_calls else message.role
        return out + self._prompt(previous) if generation_prompt else out

    def _system(self, conversation: Conversation) -> list[Segment]:
        first, thinking = conversation.messages[0], self._format.thinking
        if first.role != "developer" and not conversation.tools and not thinking:
            return []
        out = self._turns.open("system")
        if thinking:
            out.append(self._turns.control(MARKERS.think))
            if self._revision.open_turn:
                out.append(Segment("\n"))
        if first.role == "developer":
            out += self._turns.text((first.content or "").strip(), f"{conversation.id}: messages[0].content")
        return [*out, *self._turns.declarations(conversation), *self._turns.close()]

    def _assistant(self, message: Message, where: str, previous: str, after: str, *, current: bool) -> list[Segment]:
        turns, loss = self._turns, message.supervised
        # Before turns stayed open, only the answer to results went on in the turn of its calls.
        goes_on = previous in ("tool", "assistant")
        if not self._revision.open_turn:
            goes_on = previous == "tool" and not message.tool_calls
        out = [] if goes_on else turns.open("model")
        out += self._reasoning(message, where, current=current)
        if message.tool_calls:
            out += turns.calls(message, where)
            if self._revision.open_turn or after == "tool":  # the opening of the result stops the model
                return [*out, turns.control(MARKERS.response, loss=loss)]
            return out + turns.close(loss=loss)
        out += turns.text((message.content or "").strip(), f"{where}.content", loss=loss)
        return out if after == "assistant" else out + turns.close(loss=loss)

    def _reasoning(self, message: Message, where: str, *, current: bool) -> list[Segment]:
        if not message.reasoning:
            return []
        kept = self._format.keep_thinking and bool(message.tool_calls) and self._revision.one_turn
        if not current and not kept:
            return []  # every revision forgets the thinking of earlier turns
        if self._revision.thinks == "none" or (self._revision.thinks == "calls" and not message.tool_calls):
            raise UserError(
                f"the template of {self._revision.commit} drops this message's reasoning",
                where=where,
                fix=f"Use revision {LATEST}, or remove the reasoning",
            )
        loss = message.supervised and self._format.learn_thinking
        return [
            self._turns.control(MARKERS.channel, loss=loss),
            Segment(f"{THOUGHT}\n", loss=loss),
            *self._turns.text(message.reasoning, f"{where}.reasoning", loss=loss),
            Segment("\n", loss=loss),
            self._turns.control(MARKERS.end_channel, loss=loss),
        ]

    def _prompt(self, previous: str) -> list[Segment]:
        """What the template adds where the model is to go on."""
        turns, thinking = self._turns, self._format.thinking
        thought = [turns.control(MARKERS.channel), Segment(f"{THOUGHT}\n")]
        if previous == "tool":
            return thought if thinking and self._revision.one_turn else []
        if previous == "tool_calls" and self._revision.open_turn:
            return []
        empty = [*thought, turns.control(MARKERS.end_channel)] if self._format.large and not thinking else []
        return [*turns.open("model"), *empty]

    def _check(self, message: Message, previous: str, where: str) -> None:
        """Turns that the template has no place for, or renders broken."""
        role, latest = message.role, self._revision.one_turn
        if role == "developer":
            raise UserError("a developer message is not the first", where=where, fix="Put it first")
        if role == "tool" and previous not in ("tool_calls", "tool"):
            raise UserError("a tool result without a call before it", where=where, fix="Add the call")
        if previous == "tool_calls" and role != "tool":
            raise UserError(
                f"a message of role {role} follows tool calls", where=where, fix="Put the results in between"
            )
        if role == "user" and previous == "tool" and not latest:
            raise UserError("a user message follows tool results", where=where, fix="Put the answer in between")
        if role != "assistant":
            return
        if previous == "assistant" and not (latest and message.tool_calls):
            raise UserError("two assistant messages in a row", where=where, fix="Join them, or remove one")
        if not message.tool_calls and not (message.content or "").strip():
            raise UserError("an assistant message is empty", where=where, fix="Give it text or a call")


@cache
def _turn_writer(commit: str) -> TurnWriter:
    """One for each revision: it remembers the declarations that it wrote."""
    revision = REVISIONS[commit]
    # Bare keys as the template writes them; anything that would end or split the key is refused.
    values = ValueWriter(MARKERS, key=LENIENT_KEY, null=revision.null)
    nullable = "early" if revision.early else "late"
    return TurnWriter(
        values, DeclarationWriter(values, nullable=nullable, drops_standard_names=revision.drops_standard_names)
    )


FORMAT = Gemma4()
