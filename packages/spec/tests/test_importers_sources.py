"""Rows come out of every kind of file alike, with the place where they stand."""

import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from portlab_spec.data.rows import import_rows, load_dataset
from portlab_spec.data.sources import read_rows
from portlab_spec.errors import UserError

ROWS = [{"instruction": f"Say {i}.", "response": str(i)} for i in range(3)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def answers(path: Any) -> list[str | None]:
    got = import_rows(path)
    assert [reject.reason for reject in got.rejects] == []
    return [row.target.content for row in got.conversations]


def gzipped(text: str) -> bytes:
    """The same bytes at every call: gzip writes the clock into its header, and parameters name tests by their bytes."""
    return gzip.compress(text.encode(), mtime=0)


def saved(folder: Path, rows: list[dict[str, Any]], *, split: str | None = None) -> None:
    """A folder as `datasets.Dataset.save_to_disk` leaves it, in two shards."""
    pa = pytest.importorskip("pyarrow")
    folder.mkdir(parents=True)
    names = [f"data-0000{i}-of-00002.arrow" for i in range(2)]
    for name, part in zip(names, (rows[:1], rows[1:]), strict=True):
        table = pa.Table.from_pylist(part)
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": name} for name in names], "_split": split})
    )
    (folder / "dataset_info.json").write_text("{}")


# ------------------------------------------------------------------------------------------------ text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rows.jsonl", LINES),
        ("rows.ndjson", LINES),
        ("rows", LINES),
        ("rows.json", LINES),
        ("rows.json", "\n" + LINES),
        ("rows.json", LINES.replace("\n", ",\n")),
        ("rows.json", json.dumps(ROWS)),
        ("rows.json", json.dumps(ROWS, indent=2)),
        ("rows.json", json.dumps({"data": ROWS})),
        ("rows.json", json.dumps({"version": 1, "data": ROWS}, indent=2)),
        ("rows.jsonl", "\ufeff" + LINES),
        ("rows.json", "\ufeff" + json.dumps(ROWS)),
        ("rows.jsonl", LINES.replace("\n", "\r\n")),
        ("rows.jsonl", LINES.rstrip()),
    ],
)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_texts(tmp_path, name, text, packed):
    path = tmp_path / (name + ".gz" if packed else name)
    path.write_bytes(gzipped(text) if packed else text.encode())
    assert answers(path) == ["0", "1", "2"]


def test_one_object_over_several_lines_is_one_row(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(ROWS[0], indent=2))
    assert answers(path) == ["0"]


@pytest.mark.parametrize("text", [LINES, json.dumps(ROWS)], ids=["lines", "array"])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_standard_input(monkeypatch, text, packed):
    data = gzipped(text) if packed else text.encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    rows = load_dataset("-")
    assert [(row.id, row.source) for row in rows] == [(f"stdin-{i}", "stdin") for i in (1, 2, 3)]


def test_a_bad_line_is_a_reject_with_its_text(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(LINES + "{oops\n")
    (reject,) = import_rows(path).rejects
    assert (reject.line, reject.raw, reject.id) == (4, "{oops", None)
    assert reject.reason.startswith("not JSON (")


def test_json_lines_are_read_as_they_are_needed(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(LINES + "{oops\n")
    assert next(read_rows(path)).value == ROWS[0]


@pytest.mark.parametrize(
    ("name", "data", "what"),
    [
        ("rows.json", b"[{]", "not JSON"),
        ("rows.json", b"3", "neither a list nor an object"),
        ("rows.jsonl.gz", gzipped(LINES)[:-10], "not a whole gzip file"),
        ("rows.parquet", b"PAR1", "not a parquet file"),
        ("rows.arrow", b"ARROW", "not a arrow file"),
    ],
)
def test_a_broken_file_is_named(tmp_path, name, data, what):
    if name.endswith(("parquet", "arrow")):
        pytest.importorskip("pyarrow")
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(UserError) as caught:
        import_rows(path)
    assert caught.value.where == str(path)
    assert caught.value.what.startswith(what)


# ------------------------------------------------------------------------------------------------ Arrow


def test_parquet(tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet", row_group_size=2)
    assert answers(tmp_path / "rows.parquet") == ["0", "1", "2"]


def test_what_arrow_adds_to_structs_is_undone(tmp_path):
    """Parquet gives every message, call and tool the keys of all others, as nulls."""
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")

    def row(name: str, **arguments: Any) -> dict[str, Any]:
        properties = {key: {"type": "string", "description": "Text."} for key in arguments}
        function = {"name": name, "description": "Does it.", "parameters": {"type": "object", "properties": properties}}
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call]}]
        return {"messages": messages, "tools": [{"type": "function", "function": function}]}

    rows = [row("find", query="x"), row("note", text="y")]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    from_parquet = import_rows(tmp_path / "rows.parquet")
    from_lines = import_rows(tmp_path / "rows.jsonl")
    assert from_parquet.rejects == []
    for a, b in zip(from_parquet.conversations, from_lines.conversations, strict=True):
        assert (a.messages, a.tools) == (b.messages, b.tools)
    assert from_parquet.repairs == {"null argument of another tool dropped": 2}


def test_times_become_text(tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    table = pa.Table.from_pylist(ROWS[:1]).append_column("at", pa.array([0], pa.timestamp("s")))
    pq.write_table(table, tmp_path / "rows.parquet")
    (row,) = import_rows(tmp_path / "rows.parquet").conversations
    assert row.meta == {"at": "1970-01-01 00:00:00.000"}


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"need pyarrow.*portlab-spec\[parquet\]"):
        import_rows(tmp_path / "rows.parquet")


def test_a_saved_dataset(tmp_path):
    saved(tmp_path / "set", ROWS, split="test")
    got = import_rows(tmp_path / "set")
    assert [row.target.content for row in got.conversations] == ["0", "1", "2"]
    assert {row.split for row in got.conversations} == {"test"}


def test_a_saved_dataset_with_splits(tmp_path):
    saved(tmp_path / "set" / "train", ROWS[:2])
    saved(tmp_path / "set" / "validation", ROWS[1:])
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train", "validation"]}')
    got = import_rows(tmp_path / "set")
    assert got.rejects == []
    assert [(row.split, row.target.content) for row in got.conversations] == [
        ("train", "0"),
        ("train", "1"),
        ("validation", "1"),
        ("validation", "2"),
    ]
    assert got.conversations[3].id == "validation-data-00001-of-00002-1"


def test_a_saved_dataset_cannot_point_outside_its_folder(tmp_path):
    saved(tmp_path / "set", ROWS)
    (tmp_path / "set" / "state.json").write_text('{"_data_files": [{"filename": "../other.arrow"}]}')
    with pytest.raises(UserError, match="lists no data files"):
        import_rows(tmp_path / "set")


# ------------------------------------------------------------------------------------------------ folders


def test_a_folder_takes_splits_from_names_and_tools_from_beside(tmp_path):
    tool = {"name": "go", "description": "Goes."}
    (tmp_path / "tools.json").write_text(json.dumps([tool]))
    for i, name in enumerate(["train-00000-of-00002.jsonl", "data/test.jsonl", "dev/part.json", "more.jsonl"]):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"user_query": f"{i}?", "function_call": {"name": "go"}}))
    (tmp_path / ".cache.jsonl").write_text("not data")
    (tmp_path / "README.md").write_text("not data")
    rows = {row.messages[1].content: row for row in load_dataset(tmp_path)}
    assert {question: row.split for question, row in rows.items()} == {
        "0?": "train",
        "1?": "test",
        "2?": "validation",
        "3?": "train",
    }
    assert {row.tools[0].name for row in rows.values()} == {"go"}


def test_a_row_says_its_split_before_the_name_of_its_file(tmp_path):
    (tmp_path / "train.jsonl").write_text(json.dumps(ROWS[0] | {"split": "dev"}))
    assert import_rows(tmp_path).conversations[0].split == "validation"


def test_the_same_id_in_two_files_names_the_first(tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(json.dumps(ROWS[0] | {"id": "x"}))
    (reject,) = import_rows(tmp_path).rejects
    assert reject.where == f"{tmp_path / 'b.jsonl'}:1"
    assert reject.reason == f"the id 'x' is already that of {tmp_path / 'a.jsonl'}:1. Give every row its own id"
