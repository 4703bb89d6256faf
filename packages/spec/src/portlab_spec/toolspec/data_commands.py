"""`toolspec convert`, `toolspec stats` and `toolspec split`."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portlab_spec.conversation import Conversation
from portlab_spec.data.leakage import find_leakage
from portlab_spec.data.rows import Imported, Reject
from portlab_spec.data.split import assign_splits, first_tool
from portlab_spec.data.stats import dataset_stats, stats_tables
from portlab_spec.data.store import to_openai, to_trl, write_conversations
from portlab_spec.errors import UserError
from portlab_spec.files import new_file
from portlab_spec.formats import find_format
from portlab_spec.toolspec.inputs import STDIN, conversations_of, rows_of, tokenizer_of
from portlab_spec.toolspec.output import note, print_json, print_line, show

if TYPE_CHECKING:
    from portlab_spec.toolspec.cli import ConvertCommand, SplitCommand, StatsCommand

SHOWN = 10  # rejects or leaks that are printed; files and --json hold them all
_SHAPES: dict[str, Callable[[Conversation], dict[str, Any]]] = {"openai": to_openai, "trl": to_trl}


def convert(command: "ConvertCommand") -> int:
    """Write what can be used; 1 if a row cannot and that is not allowed."""
    rows = rows_of(command.data, command)
    if not rows.conversations and not rows.rejects:
        raise UserError("there are no rows", where=command.data, fix="Check the file")
    _write(command.out, rows.conversations, command.to)
    if command.rejects is not None:
        _write_lines(command.rejects, [_reject_record(reject) for reject in rows.rejects])
    if command.json:
        text = json.dumps(_summary(rows), indent=2, ensure_ascii=False)
        print(text, file=sys.stderr if str(command.out) == STDIN else sys.stdout)
    else:
        _tell(rows, command.rejects)
    return int(bool(rows.rejects) and not command.allow_rejects)


def _write(out: Path, conversations: list[Conversation], shape: str) -> None:
    if str(out) == STDIN:
        for conversation in conversations:
            print_line(_SHAPES.get(shape, _record)(conversation))
    elif shape == "portlab":
        write_conversations(out, conversations)
    elif out.suffix == ".jsonl":
        _write_lines(out, [_SHAPES[shape](conversation) for conversation in conversations])
    else:
        raise UserError(f"{shape} rows are written as JSON lines", where=str(out), fix="End the name in .jsonl")


def _record(conversation: Conversation) -> dict[str, Any]:
    return conversation.model_dump(exclude_defaults=True)


def _write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    with new_file(path) as stream:
        for record in records:
            stream.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")


def _reject_record(reject: Reject) -> dict[str, Any]:
    return {"file": reject.file, "line": reject.line, "id": reject.id, "reason": reject.reason, "raw": reject.raw}


def _summary(rows: Imported) -> dict[str, Any]:
    return {
        "converted": len(rows.conversations),
        "rejected": [{k: v for k, v in _reject_record(reject).items() if k != "raw"} for reject in rows.rejects],
        "repairs": dict(rows.repairs),
        "shapes": dict(rows.shape_counts),
    }


def _tell(rows: Imported, rejects_file: Path | None) -> None:
    note(f"toolspec: {len(rows.conversations)} rows converted, {len(rows.rejects)} rejected")
    for shape, count in rows.shape_counts.most_common():
        note(f"  {count} of shape {shape}")
    for repair, count in rows.repairs.most_common():
        note(f"  mended: {repair} ({count})")
    for reject in rows.rejects[:SHOWN]:
        note(f"  rejected {reject.where}: {reject.reason}")
    if len(rows.rejects) > SHOWN:
        rest = f"all in {rejects_file}" if rejects_file else "write them all with --rejects FILE"
        note(f"  ... and {len(rows.rejects) - SHOWN} more; {rest}")


def stats(command: "StatsCommand") -> int:
    """Counts by format, as a table or JSON."""
    conversations = conversations_of(command.data, command)
    first, *others = [(fmt, tokenizer_of(command.model, fmt)) for fmt in map(find_format, command.format)]
    found = dataset_stats(conversations, *first, beside=others, max_length=command.max_length)
    if command.json:
        print_json(found.model_dump())
    else:
        show(stats_tables(found))
    return 0


def split(command: "SplitCommand") -> int:
    """Splits written, and leaks reported; 1 if two splits ask the same."""
    conversations = conversations_of(command.data, command)
    if command.out is not None:
        conversations = assign_splits(
            conversations,
            {"validation": command.validation, "test": command.test},
            seed=command.seed,
            stratify=first_tool if command.stratify == "tool" else None,
            similarity=command.similarity,
        )
        _write(command.out, conversations, "portlab")
    counts = {name: sum(c.split == name for c in conversations) for name in ("train", "validation", "test")}
    leakage = find_leakage(conversations, threshold=command.leak_threshold)
    if command.json:
        value = {"rows": counts, **asdict(leakage)}
        text = json.dumps(value, indent=2, ensure_ascii=False)
        print(text, file=sys.stderr if str(command.out) == STDIN else sys.stdout)
    else:
        note("toolspec: " + ", ".join(f"{count} {name}" for name, count in counts.items()) + f"; {leakage.summary()}")
        for leak in leakage.leaks[:SHOWN]:
            how = "ask the same" if leak.exact else f"are alike ({leak.similarity:.2f})"
            note(f"  {leak.ids[0]} in {leak.splits[0]} and {leak.ids[1]} in {leak.splits[1]} {how}")
        if len(leakage.leaks) > SHOWN:
            note(f"  ... and {len(leakage.leaks) - SHOWN} more; --json lists them all")
    return int(leakage.exact_pairs > 0)
