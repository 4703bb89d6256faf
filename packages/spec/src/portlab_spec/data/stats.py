"""What a data set holds, and what it costs in each wire format."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

import numpy as np
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from portlab_spec.conversation import Conversation, Record
from portlab_spec.data.batching import group_by_prefix, share_saved
from portlab_spec.data.tokens import CachedTokenizer, Row, check_reversible, prefix_key
from portlab_spec.errors import UserError
from portlab_spec.formats import Format, encode
from portlab_spec.formats.segments import TextTokenizer
from portlab_spec.tools import json_type

LONGEST = 5


class Distribution(Record):
    """Order statistics of counts; a percentile is the smallest value that this share of the rows does not exceed."""

    min: int
    p50: int
    p90: int
    p99: int
    max: int
    total: int


class LongRow(Record):
    """A row among the longest."""

    id: str
    tokens: int


class Refusal(Record):
    """A reason why rows cannot be rendered or encoded, how many share it, and the first of them."""

    reason: str
    rows: int
    first: str


class FormatStats(Record):
    """The data set in one wire format. Shares are fractions between 0 and 1.

    Attributes:
        format: its name.
        rows: those that could be encoded; everything below is about them.
        refused: the others, by reason.
        tokens: of a row; None without rows.
        supervised_tokens: training targets.
        supervised_share: of all tokens.
        unsupervised_rows: rows without any target, which no trainer takes.
        prefix_groups: groups of rows with the same tools and developer text, see `group_by_prefix`.
        prefix_tokens: length of the prefix that a group shares, averaged over rows.
        prefix_share: share of all tokens that packing does not compute, at best: each prefix once.
        longest: the longest rows, longest first.
        max_length: the length that rows were held against; None for none.
        too_long: rows beyond it; 0 without `max_length`.
    """

    format: str
    rows: int
    refused: tuple[Refusal, ...]
    tokens: Distribution | None
    supervised_tokens: int
    supervised_share: float
    unsupervised_rows: int
    prefix_groups: int
    prefix_tokens: float
    prefix_share: float
    longest: tuple[LongRow, ...]
    max_length: int | None
    too_long: int


class DatasetStats(Record):
    """What a data set holds.

    Attributes:
        rows: conversations.
        splits: rows per split.
        sources: rows per source; "" where none is named.
        calls_per_row: rows by their number of calls, over all messages.
        tools_per_row: rows by the number of tools on offer.
        tool_sets: distinct offers; the order of the tools counts, since prompts differ by it.
        tools_called: calls per tool, most frequent first.
        tools_never_called: tools on offer that no row calls, in alphabetical order.
        argument_types: arguments of calls per JSON type; integer and number are told apart.
        rows_without_call: rows whose answer may be text alone.
        multi_turn_share: share of rows with more than one user turn; adjacent user messages are one.
        rows_with_results: rows that hold the result of a call.
        formats: what it costs, for each wire format.
    """

    rows: int
    splits: dict[str, int]
    sources: dict[str, int]
    calls_per_row: dict[int, int]
    tools_per_row: dict[int, int]
    tool_sets: int
    tools_called: dict[str, int]
    tools_never_called: tuple[str, ...]
    argument_types: dict[str, int]
    rows_without_call: int
    multi_turn_share: float
    rows_with_results: int
    formats: tuple[FormatStats, ...]


def dataset_stats(
    conversations: Sequence[Conversation],
    fmt: Format,
    tokenizer: TextTokenizer,
    *,
    beside: Iterable[tuple[Format, TextTokenizer]] = (),
    max_length: int | None = None,
) -> DatasetStats:
    """Count a data set, in one format or in several.

    Args:
        conversations: all rows.
        fmt: the format that is trained.
        tokenizer: the tokenizer for it.
        beside: further formats to compare, each with its tokenizer.
        max_length: count the rows that need more tokens.

    Raises:
        UserError: no conversations.
    """
    if not conversations:
        raise UserError("there are no conversations to count", fix="Check the data set and its splits")
    calls = [[call for m in c.messages for call in m.tool_calls] for c in conversations]
    called = Counter(call.name for row in calls for call in row)
    offered = {tool.name for c in conversations for tool in c.tools}
    types = Counter(json_type(value) for row in calls for call in row for value in call.arguments.values())
    return DatasetStats(
        rows=len(conversations),
        splits=_ordered(Counter(c.split for c in conversations)),
        sources=_ordered(Counter(c.source for c in conversations)),
        calls_per_row=dict(sorted(Counter(map(len, calls)).items())),
        tools_per_row=dict(sorted(Counter(len(c.tools) for c in conversations).items())),
        tool_sets=len({"".join(tool.model_dump_json() for tool in c.tools) for c in conversations}),
        tools_called=_ordered(called),
        tools_never_called=tuple(sorted(offered - called.keys())),
        argument_types=_ordered(types),
        rows_without_call=sum(not row for row in calls),
        multi_turn_share=sum(_user_turns(c) > 1 for c in conversations) / len(conversations),
        rows_with_results=sum(any(m.role == "tool" for m in c.messages) for c in conversations),
        formats=tuple(format_stats(conversations, f, t, max_length) for f, t in ((fmt, tokenizer), *beside)),
    )


def format_stats(
    conversations: Sequence[Conversation], fmt: Format, tokenizer: TextTokenizer, max_length: int | None = None
) -> FormatStats:
    """The cost of a data set in one format. A row that it refuses is counted with the reason."""
    cached = CachedTokenizer(tokenizer)
    rows: list[Row] = []
    refused: dict[str, list[str]] = {}
    for conversation in conversations:
        try:
            segments = fmt.render(conversation)
            check_reversible(segments, cached, conversation.id)
            encoded = encode(segments, cached)
        except UserError as error:
            refused.setdefault(error.what, []).append(conversation.id)
            continue
        rows.append(Row(conversation.id, tuple(encoded.ids), tuple(encoded.loss), prefix_key=prefix_key(conversation)))
    trainable = [row for row in rows if any(row.loss)]
    groups = group_by_prefix(trainable)
    lengths = [len(row.ids) for row in rows]
    supervised = sum(sum(row.loss) for row in rows)
    longest = sorted(rows, key=lambda row: -len(row.ids))[:LONGEST]
    return FormatStats(
        format=fmt.name,
        rows=len(rows),
        refused=tuple(
            Refusal(reason=reason, rows=len(ids), first=ids[0])
            for reason, ids in sorted(refused.items(), key=lambda item: -len(item[1]))
        ),
        tokens=_distribution(lengths) if lengths else None,
        supervised_tokens=supervised,
        supervised_share=supervised / max(sum(lengths), 1),
        unsupervised_rows=len(rows) - len(trainable),
        prefix_groups=len(groups),
        prefix_tokens=sum(group.prefix * len(group.rows) for group in groups) / max(len(trainable), 1),
        prefix_share=share_saved(groups),
        longest=tuple(LongRow(id=row.id, tokens=len(row.ids)) for row in longest),
        max_length=max_length,
        too_long=sum(length > max_length for length in lengths) if max_length is not None else 0,
    )


def _distribution(values: Sequence[int]) -> Distribution:
    low, p50, p90, p99, high = np.quantile(values, [0, 0.5, 0.9, 0.99, 1], method="inverted_cdf").tolist()
    return Distribution(min=low, p50=p50, p90=p90, p99=p99, max=high, total=sum(values))


def _ordered(counts: Counter[str]) -> dict[str, int]:
    """Most frequent first; ties in alphabetical order."""
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _user_turns(conversation: Conversation) -> int:
    return sum(role == "user" for role, _ in groupby(m.role for m in conversation.messages if m.role != "developer"))


# ------------------------------------------------------------------------------------------------- tables


def stats_tables(stats: DatasetStats, *, most_tools: int = 20) -> Group:
    """The statistics as tables for a terminal.

    Args:
        stats: what to show.
        most_tools: list so many tools by calls; the rest is one line.
    """
    parts: list[RenderableType] = [_contents(stats), _formats(stats.formats), _longest(stats.formats)]
    if stats.tools_called:
        parts.append(_tools(stats, most_tools))
    if any(found.refused for found in stats.formats):
        parts.append(_refusals(stats.formats))
    return Group(*parts)


def _contents(stats: DatasetStats) -> Table:
    table = Table("", "", title="Data set", title_justify="left", show_header=False)
    without = stats.rows_without_call
    for label, value in (
        ("rows", f"{stats.rows:,} ({_listed(stats.splits)})"),
        ("sources", _listed({name or "(not named)": rows for name, rows in stats.sources.items()})),
        ("calls per row", _listed(stats.calls_per_row, of=": ", unit=" rows")),
        ("rows without a call", f"{without:,} ({without / stats.rows:.1%})"),
        ("rows with results", f"{stats.rows_with_results:,}"),
        ("more than one user turn", f"{stats.multi_turn_share:.1%}"),
        ("tools on offer", _listed(stats.tools_per_row, of=": ", unit=" rows")),
        ("distinct offers", f"{stats.tool_sets:,}"),
        ("arguments", _listed(stats.argument_types) or "none"),
    ):
        table.add_row(label, escape(value))
    return table


def _formats(formats: Sequence[FormatStats]) -> Table:
    table = Table("", title="Tokens", title_justify="left")
    for found in formats:
        table.add_column(found.format, justify="right")
    table.add_row("rows", *(f"{f.rows:,}" for f in formats))
    table.add_row("refused", *(f"{sum(r.rows for r in f.refused):,}" for f in formats))
    for name in ("min", "p50", "p90", "p99", "max", "total"):
        table.add_row(name, *(f"{getattr(f.tokens, name):,}" if f.tokens else "-" for f in formats))
    table.add_row("supervised", *(f"{f.supervised_share:.1%}" for f in formats))
    table.add_row("rows without a target", *(f"{f.unsupervised_rows:,}" for f in formats))
    table.add_row("prompt groups", *(f"{f.prefix_groups:,}" for f in formats))
    table.add_row("shared prefix", *(f"{f.prefix_tokens:,.0f}" for f in formats))
    table.add_row("saved by packing, at best", *(f"{f.prefix_share:.1%}" for f in formats))
    if any(f.max_length is not None for f in formats):
        table.add_row(f"longer than {formats[0].max_length:,}", *(f"{f.too_long:,}" for f in formats))
    return table


def _longest(formats: Sequence[FormatStats]) -> Table:
    table = Table("format", "row", title="Longest rows", title_justify="left")
    table.add_column("tokens", justify="right")
    for found in formats:
        for row in found.longest:
            table.add_row(found.format, escape(row.id), f"{row.tokens:,}")
    return table


def _tools(stats: DatasetStats, most: int) -> Table:
    table = Table("tool", title="Calls", title_justify="left")
    table.add_column("calls", justify="right")
    shown = list(stats.tools_called.items())
    for name, calls in shown[:most]:
        table.add_row(escape(name), f"{calls:,}")
    if rest := shown[most:]:
        table.add_row(f"({len(rest)} more tools)", f"{sum(calls for _, calls in rest):,}")
    if stats.tools_never_called:
        table.add_row(f"({len(stats.tools_never_called)} tools on offer)", "0")
    return table


def _refusals(formats: Sequence[FormatStats]) -> Table:
    table = Table("format", "reason", title="Refused rows", title_justify="left")
    table.add_column("rows", justify="right")
    table.add_column("first")
    for found in formats:
        for refusal in found.refused:
            table.add_row(found.format, escape(refusal.reason), f"{refusal.rows:,}", escape(refusal.first))
    return table


def _listed[K: (int, str)](counts: dict[K, int], of: str = " ", unit: str = "") -> str:
    return ", ".join(f"{key}{of}{count:,}{unit}" for key, count in counts.items())
