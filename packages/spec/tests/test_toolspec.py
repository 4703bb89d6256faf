"""The command line `toolspec`: what it prints, and how it ends."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from portlab_spec.assets import default_model
from portlab_spec.data import load_dataset
from portlab_spec.data.store import read_conversations
from portlab_spec.errors import UserError
from portlab_spec.formats import FORMATS, encode, find_format
from portlab_spec.formats.segments import Segment
from portlab_spec.tokenizer import Tokenizer
from portlab_spec.toolspec import view
from portlab_spec.toolspec.cli import main

CALL = "<start_function_call>call:get_steps{}<end_function_call><start_function_response>"
MAP = {"type": "object", "additionalProperties": {"type": "string"}}
TOOLS = [
    {
        "name": "book",
        "description": "Book a room.",
        "parameters": {
            "type": "object",
            "properties": {
                "nights": {"type": ["integer", "null"], "description": "Nights.", "default": 1},
                "labels": {**MAP, "description": "Labels."},
            },
        },
    }
]
ROW = {"user_query": "How far?", "function_call": {"name": "get_steps", "arguments": {}}}
STEPS = {"type": "function", "function": {"name": "get_steps", "description": "Steps.", "parameters": {}}}


@pytest.fixture
def tools_file(tmp_path: Path) -> str:
    path = tmp_path / "booking.json"
    path.write_text(json.dumps(TOOLS))
    return str(path)


@pytest.fixture
def rows_file(tmp_path: Path) -> Path:
    """Two good rows and a bad one between them."""
    path = tmp_path / "rows.jsonl"
    good = [json.dumps({**ROW, "id": name, "user_query": f"{name}?", "tools": [STEPS]}) for name in ("a", "b")]
    path.write_text("\n".join([good[0], '{"user_query": "x"}', good[1]]) + "\n")
    return path


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    return json.loads(capsys.readouterr().out)


# --------------------------------------------------------------------------------------------------- lint


def test_lint_names_each_construct_and_fails_on_an_error(tools_file: str, capsys: pytest.CaptureFixture[str]):
    assert main(["lint", tools_file, "--format", "gemma4"]) == 1
    out = capsys.readouterr().out
    assert "book.nights" in out
    assert "book.labels" in out
    assert "1 tools," in out


def test_lint_passes_clean_tools_of_a_data_set(capsys: pytest.CaptureFixture[str]):
    assert main(["lint", "fitness-213"]) == 0
    assert "7 tools, 0 errors, 0 warnings" in capsys.readouterr().out


def test_lint_fails_on_warnings_only_when_strict(capsys: pytest.CaptureFixture[str]):
    assert main(["lint", "fitness-plus", "--format", "functiongemma"]) == 0
    assert main(["lint", "fitness-plus", "--format", "functiongemma", "--strict"]) == 1


def test_lint_fix_writes_limits_into_descriptions_and_lowers_types(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    nights = {"type": ["integer", "null"], "description": "Nights.", "default": 1}
    tool = {"name": "book", "description": "Book.", "parameters": {"type": "object", "properties": {"nights": nights}}}
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps([tool])))
    assert main(["lint", "--fix"]) == 0
    fixed = json.loads(capsys.readouterr().out)[0]["function"]["parameters"]["properties"]["nights"]
    assert fixed["type"] == "integer"
    assert "1" in fixed["description"]


def test_lint_json_holds_every_finding(tools_file: str, capsys: pytest.CaptureFixture[str]):
    main(["lint", tools_file, "--format", "gemma4", "--json"])
    report = printed(capsys)
    assert report["tools"] == 1
    assert {f["code"] for f in report["findings"]} >= {"type-list"}  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------- render


def test_render_prints_the_text_of_the_format(capsys: pytest.CaptureFixture[str]):
    assert main(["render", "fitness-213", "--id", "steps-01"]) == 0
    row = next(c for c in load_dataset("fitness-213") if c.id == "steps-01")
    text = "".join(s.text for s in find_format("functiongemma").render(row))
    assert capsys.readouterr().out == text + "\n"


@pytest.mark.parametrize("name", FORMATS)
def test_render_ends_where_the_model_goes_on(name: str, capsys: pytest.CaptureFixture[str]):
    assert main(["render", "fitness-213", "--id", "steps-01", "--prompt", "--format", name]) == 0
    assert "get_steps{}" not in capsys.readouterr().out


@pytest.mark.real_model
def test_render_json_aligns_ids_and_mask(capsys: pytest.CaptureFixture[str]):
    assert main(["render", "fitness-213", "--limit", "2", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 2
    assert all(len(line["ids"]) == len(line["loss"]) for line in lines)
    assert all(line["ids"][-1] == 50 and line["loss"][-1] == 1 for line in lines)  # the stop token after a call


@pytest.mark.real_model
def test_show_mask_says_in_words_what_is_learnt(capsys: pytest.CaptureFixture[str]):
    assert main(["render", "fitness-213", "--id", "steps-01", "--show-mask"]) == 0
    out = capsys.readouterr().out
    assert "304 tokens, 9 learnt" in out
    assert f"learnt: {CALL}" in out


def test_the_mask_is_drawn_in_the_colours_of_what_is_learnt():
    segments = [Segment("<bos>", control=True), Segment("hi\n"), Segment("yes", loss=True)]
    drawn = view.segments_view([*segments, Segment("<eos>", loss=True, control=True)])
    styles = {drawn.plain[span.start : span.end]: span.style for span in drawn.spans}
    assert styles == {"<bos>": view.CONTROL, "yes": view.LEARNT, "<eos>": view.LEARNT_CONTROL}


def test_an_id_that_no_row_has_is_refused():
    with pytest.raises(UserError, match="no row has the id 'nope'"):
        main(["render", "fitness-213", "--id", "nope"])


# -------------------------------------------------------------------------------------------------- parse


def test_parse_reads_calls_from_stdin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(CALL + "\n"))
    assert main(["parse"]) == 0
    assert capsys.readouterr().out.splitlines() == ["call      get_steps {}", "stopped"]


def test_parse_fails_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "output.txt"
    path.write_text("<start_function_call>call:get_steps{a:None}<end_function_call><start_function_response>")
    assert main(["parse", str(path)]) == 1
    assert "'None' is no value" in capsys.readouterr().out
    assert main(["parse", str(path), "--lenient", "--json"]) == 0
    assert printed(capsys)["calls"] == [{"name": "get_steps", "arguments": {"a": None}}]


@pytest.mark.real_model
def test_parse_reads_token_ids(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    main(["render", "fitness-213", "--id", "steps-01", "--json"])
    line = json.loads(capsys.readouterr().out)
    learnt = [i for i, loss in zip(line["ids"], line["loss"], strict=True) if loss]
    monkeypatch.setattr("sys.stdin", io.StringIO(" ".join(map(str, learnt))))
    assert main(["parse", "--ids", "--json"]) == 0
    assert printed(capsys)["calls"] == [{"name": "get_steps", "arguments": {}}]


# ------------------------------------------------------------------------------------------------ convert


def test_convert_writes_what_can_be_used_and_fails_for_the_rest(
    rows_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out, rejects = tmp_path / "out.jsonl", tmp_path / "rejects.jsonl"
    command = ["convert", str(rows_file), str(out), "--rejects", str(rejects)]
    assert main(command) == 1
    assert [c.id for c in read_conversations(out)] == ["a", "b"]
    (reject,) = map(json.loads, rejects.read_text().splitlines())
    assert (reject["line"], reject["raw"]) == (2, {"user_query": "x"})
    assert f"rejected {rows_file}:2" in capsys.readouterr().err
    assert main([*command, "--allow-rejects"]) == 0


@pytest.mark.parametrize("shape", ["openai", "trl"])
def test_convert_to_another_shape_is_read_back_the_same(rows_file: Path, tmp_path: Path, shape: str):
    out, back = tmp_path / "out.jsonl", tmp_path / "back.jsonl"
    main(["convert", str(rows_file), str(out), "--to", shape])
    main(["convert", str(out), str(back)])
    assert [c.messages for c in read_conversations(back)] == [c.messages for c in _good_rows(rows_file, tmp_path)]


def _good_rows(rows_file: Path, tmp_path: Path):
    main(["convert", str(rows_file), str(tmp_path / "good.jsonl")])
    return list(read_conversations(tmp_path / "good.jsonl"))


def test_convert_prints_data_on_stdout_and_the_summary_on_stderr(rows_file: Path, capsys: pytest.CaptureFixture[str]):
    main(["convert", str(rows_file)])
    captured = capsys.readouterr()
    assert [json.loads(line)["id"] for line in captured.out.splitlines()] == ["a", "b"]
    assert "2 rows converted, 1 rejected" in captured.err


# ---------------------------------------------------------------------------------------- stats and split


@pytest.mark.real_model
def test_stats_compares_formats(capsys: pytest.CaptureFixture[str]):
    assert main(["stats", "fitness-213", "--format", "functiongemma", "gemma4", "--max-length", "300", "--json"]) == 0
    report = printed(capsys)
    assert report["rows"] == 213
    first, second = report["formats"]  # type: ignore[misc]
    assert (first["format"], second["format"]) == ("functiongemma", "gemma4")
    assert first["too_long"] == sum(n > 300 for n in _lengths())
    assert main(["stats", "fitness-213"]) == 0
    assert "saved by packing" in capsys.readouterr().out


def _lengths() -> list[int]:
    fmt, tokenizer = find_format("functiongemma"), Tokenizer.load(default_model().path)
    return [len(encode(fmt.render(row), tokenizer).ids) for row in load_dataset("fitness-213")]


def test_split_is_written_and_reports_what_two_splits_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "split.jsonl"
    assert main(["split", "fitness-213", str(out), "--test", "0.3", "--validation", "0.1", "--json"]) == 0
    counts = printed(capsys)["rows"]
    assert sum(counts.values()) == 213  # type: ignore[attr-defined]
    assert abs(counts["test"] - 0.3 * 213) <= 7  # type: ignore[index]  # one row for each tool
    again = tmp_path / "again.jsonl"
    main(["split", "fitness-213", str(again), "--test", "0.3", "--validation", "0.1"])
    assert again.read_bytes() == out.read_bytes()


def test_split_fails_where_two_splits_ask_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "leak.jsonl"
    rows = [{**ROW, "tools": [STEPS], "id": name, "split": split} for name, split in (("a", "train"), ("b", "test"))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["split", str(path)]) == 1
    assert "a in train and b in test ask the same" in capsys.readouterr().err.replace(
        "b in test and a in train", "a in train and b in test"
    )


# --------------------------------------------------------------------------------------------------- eval


def test_eval_scores_outputs_and_names_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = [c for c in load_dataset("fitness-213") if c.split == "validation"]
    outputs = [{"id": c.id, "output": CALL} for c in rows]
    path = tmp_path / "outputs.jsonl"
    path.write_text("".join(json.dumps(output) + "\n" for output in outputs))
    command = ["eval", "fitness-213", str(path), "--split", "validation"]
    assert main([*command, "--json"]) == 0
    exact = printed(capsys)["call_exact"]
    assert (exact["hits"], exact["count"]) == (4, 28)  # type: ignore[index]
    assert main([*command, "--per-example"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("ok") for line in lines) == 4
    assert main(command) == 0
    assert "call_exact" in capsys.readouterr().out


def test_eval_refuses_what_is_no_prediction(tmp_path: Path):
    path = tmp_path / "outputs.jsonl"
    path.write_text('{"id": "steps-01"}\n')
    with pytest.raises(UserError, match=r"outputs\.jsonl:1: not a prediction"):
        main(["eval", "fitness-213", str(path)])


# --------------------------------------------------------------------------------------- the process itself


def run(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "portlab_spec.toolspec", *args]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)


def test_a_user_error_is_one_line_and_exit_code_2():
    done = run("stats", "nope.jsonl")
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("toolspec: error: nope.jsonl: ")


@pytest.mark.parametrize("command", ["", "lint", "render", "parse", "convert", "stats", "split", "eval", "grammar"])
def test_help_answers(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        main([*command.split(), "--help"])
    assert end.value.code == 0
    assert "usage: toolspec" in capsys.readouterr().out


def seconds_to_import(statement: str) -> float:
    """CPU seconds of a statement in a fresh interpreter, and the proof that it loads no framework."""
    code = (
        f"import sys, time; start = time.process_time(); {statement};"
        "heavy = {'jax', 'torch', 'transformers', 'pyarrow', 'llguidance', 'pandas'} & sys.modules.keys();"
        "print(time.process_time() - start, *heavy)"
    )
    seconds, *heavy = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert heavy == []
    return float(seconds)


def test_the_package_is_imported_in_half_a_second_without_a_framework():
    assert min(seconds_to_import("import portlab_spec") for _ in range(3)) < 0.5


def test_all_light_parts_together_load_no_framework():
    parts = "conversation, tools, formats, data, metrics, recipe, tokenizer, report"
    assert seconds_to_import(f"from portlab_spec import {parts}") < 3  # about 0.3 on an idle core, numpy half of it
