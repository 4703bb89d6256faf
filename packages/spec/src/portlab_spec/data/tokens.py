"""Conversations as training rows: token ids and loss flags, checked."""

from collections.abc import Sequence
from dataclasses import dataclass

from portlab_spec.conversation import Conversation
from portlab_spec.errors import UserError
from portlab_spec.formats import Format, encode
from portlab_spec.formats.segments import TextTokenizer


@dataclass(frozen=True)
class Row:
    """One conversation as tokens.

    Attributes:
        id: the conversation's id.
        ids: token ids.
        loss: aligned with `ids`: is this token a training target?
        stratum: name of the first tool called in the answer, "" for none; batches are balanced over it.
    """

    id: str
    ids: tuple[int, ...]
    loss: tuple[bool, ...]
    stratum: str = ""

    @property
    def first_target(self) -> int:
        """Position of the first supervised token."""
        return self.loss.index(True)


def tokenize(
    conversations: Sequence[Conversation], fmt: Format, tokenizer: TextTokenizer, max_length: int
) -> list[Row]:
    """Render and encode conversations.

    Raises:
        UserError: no conversations; a row longer than `max_length`, whose answer would be cut off; a row without
            a supervised token.
    """
    if not conversations:
        raise UserError("there are no conversations to train on", fix="Check the data set and its splits")
    rows = []
    for conversation in conversations:
        encoded = encode(fmt.render(conversation), tokenizer)
        if len(encoded.ids) > max_length:
            raise UserError(
                f"the row needs {len(encoded.ids)} tokens and max_length is {max_length}: its answer would be cut off",
                where=conversation.id,
                fix=f"Set max_length to {len(encoded.ids)} or more, or shorten the row",
            )
        if not any(encoded.loss):
            raise UserError(
                "no token of the row is supervised",
                where=conversation.id,
                fix="End it with an assistant message",
            )
        calls = conversation.messages[-1].tool_calls
        stratum = calls[0].name if calls else ""
        rows.append(Row(conversation.id, tuple(encoded.ids), tuple(encoded.loss), stratum))
    return rows


def shared_prefix_length(rows: Sequence[Row]) -> int:
    """Tokens that all rows have in common at their start.

    Stops one before the first supervised token of any row, so that the token that predicts it belongs to the row
    itself.
    """
    return max(min(common_prefix([row.ids for row in rows]), min(row.first_target for row in rows) - 1), 0)


def common_prefix(sequences: Sequence[Sequence[int]]) -> int:
    """Number of ids that all sequences start with."""
    first, length = sequences[0], len(sequences[0])
    for ids in sequences[1:]:
        length = next(
            (i for i, (a, b) in enumerate(zip(first[:length], ids, strict=False)) if a != b), min(length, len(ids))
        )
    return length
