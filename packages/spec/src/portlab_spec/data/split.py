"""Splits that do not move, and the search for questions that stand in two of them.

`split_by_hash` and `assign_splits` take fractions, `stratified_split` takes rows per stratum. All three depend on a
seed and on the rows, never on their order.
"""

import hashlib
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from portlab_spec.conversation import Conversation, Split
from portlab_spec.errors import UserError

# ----------------------------------------------------------------------------------------------- splitting


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
        ranked = iter(sorted(rows, key=lambda row: _digest(row, seed)))
        for split, size in sizes.items():
            assigned |= {next(ranked): split for _ in range(size)}
        assigned |= dict.fromkeys(ranked, "train")
    return {key: assigned[key] for key in keys}


def split_by_hash(keys: Sequence[str], fractions: Mapping[Split, float], seed: int = 0) -> dict[str, Split]:
    """Assign each key to a split by its own hash: adding or removing rows moves no other row.

    The price is that the shares hold on average only: of n rows a fraction f gets f n, give or take
    sqrt(f (1 - f) n).

    Args:
        keys: unique ids of the rows.
        fractions: share of each split other than `train`, which gets the rest.
        seed: another seed, another split.

    Raises:
        UserError: a key occurs twice, or the fractions are not shares.
    """
    bounds = _bounds(fractions)
    if len(set(keys)) < len(keys):
        raise UserError(f"two rows have the id {Counter(keys).most_common(1)[0][0]}", fix="Give every row its own id")
    return {key: _split_at(_uniform(key, seed), bounds) for key in keys}


def first_tool(conversation: Conversation) -> str:
    """Name of the first tool that a conversation calls; "" if it calls none."""
    return next((call.name for message in conversation.messages for call in message.tool_calls), "")


def assign_splits(
    conversations: Sequence[Conversation],
    fractions: Mapping[Split, float],
    *,
    seed: int = 0,
    stratify: Callable[[Conversation], str] | None = first_tool,
    similarity: float | None = None,
) -> list[Conversation]:
    """The conversations with a split each; rows that ask the same go to the same split.

    Args:
        conversations: all rows; the split that they have is ignored.
        fractions: share of each split other than `train`, which gets the rest.
        seed: another seed, another split.
        stratify: every value of it is split by the fractions, to less than one row if no two rows ask the same;
            adding rows may then move a few others of the same value. None splits by hash alone: nothing moves, shares
            hold on average.
        similarity: rows whose questions are at least this alike, see `find_leakage`, also stay together, and those
            alike to these. None: only equal questions do.

    Raises:
        UserError: the fractions are not shares, or `similarity` is no similarity.
    """
    bounds = _bounds(fractions)
    questions = [asked(conversation) for conversation in conversations]
    leader = _leaders(sorted(set(questions)), similarity)
    groups: dict[str, list[int]] = defaultdict(list)
    for i, question in enumerate(questions):
        groups[leader[question]].append(i)

    if stratify is None:
        place = {key: _uniform(key, seed) for key in groups}
    else:
        strata: dict[str, list[str]] = defaultdict(list)
        for key, members in groups.items():
            strata[min(stratify(conversations[i]) for i in members)].append(key)
        place = {}
        for stratum, keys in strata.items():
            place |= _places(stratum, {key: len(groups[key]) for key in keys}, seed)
    return [
        conversation.model_copy(update={"split": _split_at(place[leader[question]], bounds)})
        for conversation, question in zip(conversations, questions, strict=True)
    ]


def _places(stratum: str, sizes: Mapping[str, int], seed: int) -> dict[str, float]:
    """The groups of a stratum, given with their rows, in a line from 0 to 1 that a split's share is cut off from.

    A boundary may fall inside a row; the phase says to which side that row goes. It differs from stratum to stratum:
    of many that are too small for a held-out row each, some give one, and the shares of the whole come out right.
    """
    total, phase = sum(sizes.values()), _uniform(stratum, seed)
    at = 0
    places = {}
    for key in sorted(sizes, key=lambda key: _digest(key, seed)):
        places[key] = (at + sizes[key] * phase) / total
        at += sizes[key]
    return places


def _leaders(questions: Sequence[str], similarity: float | None) -> dict[str, str]:
    """For each question the one that stands for its group."""
    if similarity is None:
        return {question: question for question in questions}
    from portlab_spec.data.similarity import check_threshold, similar_groups  # numpy: not for every reader of rows

    check_threshold(similarity)
    return {
        question: questions[i] for question, i in zip(questions, similar_groups(questions, similarity), strict=True)
    }


def _bounds(fractions: Mapping[Split, float]) -> list[tuple[float, Split]]:
    """Where each split ends on the way from 0 to 1."""
    bounds: list[tuple[float, Split]] = []
    total = 0.0
    for split, fraction in fractions.items():
        total += fraction
        if split == "train" or not 0 <= fraction <= 1 or total > 1 + 1e-9:
            shares = ", ".join(f"{name} {share:g}" for name, share in fractions.items())
            fix = "Give validation and test a share from 0 to 1 each, together at most 1; train gets the rest"
            raise UserError(f"no split has the fractions {shares}", fix=fix)
        bounds.append((total, split))
    return bounds


def _split_at(place: float, bounds: Sequence[tuple[float, Split]]) -> Split:
    return next((split for bound, split in bounds if place < bound), "train")


def _digest(key: str, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}:{key}".encode()).digest()


def _uniform(key: str, seed: int) -> float:
    """A number from 0 to 1 (exclusive), fixed by key and seed."""
    return (int.from_bytes(_digest(key, seed)[:8]) >> 11) / 2**53


# ------------------------------------------------------------------------------------------------- leakage


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
        other = first.setdefault(asked(conversation), conversation)
        if other.split != conversation.split:
            raise UserError(
                f"{other.id} in {other.split} and {conversation.id} in {conversation.split} ask the same",
                where=where,
                fix="Put both in one split, or remove one",
            )


def asked(conversation: Conversation) -> str:
    """What a conversation asks: its user turns, normalised; without any, its developer's."""
    for role in ("user", "developer"):
        if turns := [normalise(m.content or "") for m in conversation.messages if m.role == role]:
            return "\n".join(turns)
    return ""


def normalise(text: str) -> str:
    """Text without case, whitespace and punctuation (Unicode categories Z, C and P), after NFKC.

    Text that consists of nothing else is left as it is, so that `?` and `!` stay different.
    """
    folded = unicodedata.normalize("NFKC", text).casefold()
    return "".join(c for c in folded if unicodedata.category(c)[0] not in "ZCP") or text
