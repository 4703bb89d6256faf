"""Splits that do not move: by hash of the row's id, and checked for leakage."""

import hashlib
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from portlab_spec.conversation import Conversation, Split
from portlab_spec.errors import UserError


def stratified_split(
    keys: Sequence[str], strata: Sequence[str], sizes: Mapping[Split, int], seed: int = 0
) -> dict[str, Split]:
    """Assign each key to a split; every stratum gives each split the same number of rows.

    The keys of a stratum are ranked by sha256 of `"{seed}:{key}"`; the first `sizes` go to the named
    splits, in the order of `sizes`, and the rest to `train`. So the order of the rows does not matter, and
    a change in one stratum leaves the others alone.

    Args:
        keys: unique ids of the rows.
        strata: the stratum of each row, for example its tool; as long as `keys`.
        sizes: rows per stratum for each split other than `train`.
        seed: another seed, another split.

    Raises:
        UserError: a key occurs twice, or a stratum has fewer rows than `sizes` asks for.
    """
    members: dict[str, list[str]] = defaultdict(list)
    seen: set[str] = set()
    for key, stratum in zip(keys, strata, strict=True):
        if key in seen:
            raise UserError(f"two rows have the id {key}", fix="Give every row its own id")
        seen.add(key)
        members[stratum].append(key)

    assigned: dict[str, Split] = {}
    for stratum, rows in members.items():
        if len(rows) < sum(sizes.values()):
            raise UserError(
                f"stratum {stratum} has {len(rows)} rows, and {sum(sizes.values())} are to be held out",
                fix="Hold out fewer rows, or add some",
            )
        ranked = iter(sorted(rows, key=lambda row: hashlib.sha256(f"{seed}:{row}".encode()).digest()))
        for split, size in sizes.items():
            assigned |= {next(ranked): split for _ in range(size)}
        assigned |= dict.fromkeys(ranked, "train")
    return {key: assigned[key] for key in keys}


def check_leakage(conversations: Iterable[Conversation], *, where: str = "") -> None:
    """Refuse a data set that asks the same thing in two splits.

    Two conversations ask the same if their user turns agree after `normalise`.

    Args:
        conversations: all rows of the data set.
        where: file or data set, for the message.

    Raises:
        UserError: names both ids and both splits.
    """
    first: dict[str, Conversation] = {}
    for conversation in conversations:
        asked = "\n".join(normalise(m.content or "") for m in conversation.messages if m.role == "user")
        other = first.setdefault(asked, conversation)
        if other.split != conversation.split:
            raise UserError(
                f"{other.id} in {other.split} and {conversation.id} in {conversation.split} ask the same",
                where=where,
                fix="Put both in one split, or remove one",
            )


def normalise(text: str) -> str:
    """Text without case, whitespace and punctuation (Unicode categories Z, C and P), after NFKC.

    Text that consists of nothing else is left as it is, so that `?` and `!` stay different.
    """
    folded = unicodedata.normalize("NFKC", text).casefold()
    return "".join(c for c in folded if unicodedata.category(c)[0] not in "ZCP") or text
