"""`toolspec render`, `toolspec parse` and `toolspec eval`."""

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.text import Text

from portlab_spec.conversation import Conversation
from portlab_spec.errors import UserError
from portlab_spec.formats import Format, Parsed, encode, find_format
from portlab_spec.metrics import Prediction, per_example, score
from portlab_spec.tokenizer import Tokenizer
from portlab_spec.toolspec.inputs import conversations_of, read_text, tokenizer_of
from portlab_spec.toolspec.output import note, print_json, print_line, show
from portlab_spec.toolspec.view import LEGEND, mask_summary, metrics_view, segments_view

if TYPE_CHECKING:
    from portlab_spec.toolspec.cli import EvalCommand, ParseCommand, RenderCommand


def render(command: "RenderCommand") -> int:
    """Rows as text, as segments with their mask, or as JSON lines."""
    fmt = find_format(command.format)
    rows = _chosen(command)
    needs_ids = command.json or command.show_mask
    tokenizer = tokenizer_of(command.model, fmt) if needs_ids else None
    if command.show_mask and not command.json:
        show(LEGEND)
    for row in rows:
        segments = fmt.render(row.prompt if command.prompt else row, generation_prompt=command.prompt)
        if tokenizer is None:
            print("".join(segment.text for segment in segments))
            continue
        encoded = encode(segments, tokenizer)
        if command.json:
            record = {"id": row.id, "format": fmt.name, "segments": [asdict(segment) for segment in segments]}
            print_line({**record, "ids": encoded.ids, "loss": [int(flag) for flag in encoded.loss]})
        else:
            show(Text(f"{row.id}  {row.split}", "bold"))
            show(segments_view(segments))
            show(mask_summary(encoded, segments))
    return 0


def _chosen(command: "RenderCommand") -> list[Conversation]:
    rows = conversations_of(command.data, command)
    if command.id is not None:
        rows = [row for row in rows if row.id == command.id]
        if not rows:
            raise UserError(f"no row has the id {command.id!r}", where=command.data, fix="Check the id")
    if command.limit is None and command.id is None and len(rows) > 1 and not command.json and sys.stdout.isatty():
        note(f"toolspec: the first of {len(rows)} rows; --limit N shows more")
        return rows[:1]
    return rows[: command.limit]


def parse(command: "ParseCommand") -> int:
    """What an output says; 1 if the grammar refuses it."""
    fmt = find_format(command.format)
    text = read_text(command.output)
    if command.ids:
        parsed = fmt.parse(_ids(text, command.output), tokenizer_of(command.model, fmt), lenient=command.lenient)
    else:
        parsed = fmt.parse_text(text.removesuffix("\n"), lenient=command.lenient)
    if command.json:
        print_json(_plain(parsed))
    else:
        show(_parsed_view(parsed))
    return int(parsed.error is not None)


def _ids(text: str, where: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").strip("[] \n").split()]
    except ValueError as error:
        raise UserError(f"not token ids ({error})", where=where, fix="Write numbers, apart by spaces") from None


def _plain(parsed: Parsed) -> dict[str, Any]:
    return {**asdict(parsed), "calls": [call.model_dump() for call in parsed.calls]}


def _parsed_view(parsed: Parsed) -> Text:
    out = Text()
    for call in parsed.calls:
        out.append("call      ", "green")
        out.append(f"{call.name} {json.dumps(call.arguments, ensure_ascii=False)}\n")
    for name, text in (("text", parsed.text), ("reasoning", parsed.reasoning)):
        if text:
            out.append(f"{name:10}", "cyan")
            out.append(f"{text}\n")
    out.append(f"{'stopped' if parsed.stopped else 'cut off'}")
    if parsed.error:
        out.append(f"\nerror     {parsed.error}", "bold red")
    return out


def evaluate(command: "EvalCommand") -> int:
    """Metrics of predictions, or every example's verdict."""
    fmt = find_format(command.format)
    rows = conversations_of(command.data, command)
    chosen = [row for row in rows if command.split in ("all", row.split)]
    if not chosen:
        raise UserError(f"no row is in the split {command.split!r}", where=command.data, fix="Choose another --split")
    predictions = _predictions(command, fmt)
    if command.per_example:
        for example in per_example(chosen, predictions):
            if command.json:
                print_line(example.model_dump())
            else:
                show(Text(f"{'ok   ' if not example.reason else 'wrong'} {example.id}  {example.reason}"))
        return 0
    train = [row for row in rows if row.split == "train"]
    metrics = score(chosen, predictions, train=train or None)
    if command.json:
        print_json({name: metric.model_dump() for name, metric in metrics.items()})
    else:
        show(metrics_view(metrics))
    return 0


def _predictions(command: "EvalCommand", fmt: Format) -> list[Prediction]:
    tokenizer: Tokenizer | None = None
    out = []
    for number, line in enumerate(read_text(command.predictions).splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{command.predictions}:{number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"not JSON ({error})", where=where, fix="Write one JSON object per line") from None
        match row:
            case {"id": str(name), "ids": list(ids)} if all(isinstance(i, int) for i in ids):
                tokenizer = tokenizer or tokenizer_of(command.model, fmt)
                strict, lenient = (fmt.parse(ids, tokenizer, lenient=flag) for flag in (False, True))
            case {"id": str(name), "output": str(output)}:
                strict, lenient = (fmt.parse_text(output, lenient=flag) for flag in (False, True))
            case _:
                fix = 'Write {"id": "...", "output": "..."} or {"id": "...", "ids": [...]}'
                raise UserError("not a prediction", where=where, fix=fix)
        out.append(Prediction.from_parsed(name, strict, lenient))
    return out
