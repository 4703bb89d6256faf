"""Reading BFCL rows: from a small wheel of the same layout, and from the real one where it is at hand.

The real wheel is named by PORTLAB_BFCL_WHEEL (`pip download bfcl-eval==2026.3.23 --no-deps`).
"""

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

from portlab_spec.data.bfcl import ANY_CALL, CALLS, CATEGORIES, NO_CALL, REFUSAL, BfclData, read_bfcl
from portlab_spec.errors import UserError
from portlab_spec.formats import FORMATS
from portlab_spec.metrics import Prediction, per_example, score

WHEEL = os.environ.get("PORTLAB_BFCL_WHEEL")
needs_wheel = pytest.mark.skipif(not WHEEL, reason="PORTLAB_BFCL_WHEEL does not name a bfcl-eval wheel")

TRIP = {
    "name": "travel.plan",
    "description": "Plan a trip.",
    "parameters": {
        "type": "dict",
        "properties": {
            "days": {"type": "integer", "description": "Length."},
            "budget": {"type": "float", "description": "In euros."},
            "position": {"type": "tuple", "items": {"type": "float"}, "description": "Start."},
            "note": {"type": "any", "description": "Anything."},
            "options": {
                "type": "dict",
                "description": "Wishes.",
                "properties": {"pace": {"type": "string", "description": "Pace."}},
            },
        },
        "required": ["days"],
    },
}


def question(id: str, *functions: dict[str, Any], text: str = "Three days, please.") -> dict[str, Any]:
    return {"id": id, "question": [[{"role": "user", "content": text}]], "function": list(functions or (TRIP,))}


def truth(id: str, *calls: dict[str, Any]) -> dict[str, Any]:
    return {"id": id, "ground_truth": list(calls)}


def trip(**accepted: Any) -> dict[str, Any]:
    return {"travel.plan": {"days": [3], **accepted}}


class Data:
    """The layout of the wheel, with one row in each category unless told otherwise."""

    def __init__(self) -> None:
        self.questions: dict[str, list[Any]] = {c: [question(f"{c}_0")] for c in CATEGORIES}
        self.answers: dict[str, list[Any]] = {c: [truth(f"{c}_0", trip())] for c in CALLS}

    def files(self) -> dict[str, str]:
        text = {f"BFCL_v4_{c}.json": rows for c, rows in self.questions.items()}
        text |= {f"possible_answer/BFCL_v4_{c}.json": rows for c, rows in self.answers.items()}
        return {
            f"bfcl_eval/data/{name}": "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
            for name, rows in text.items()
        }

    def wheel(self, folder: Path) -> Path:
        path = folder / "bfcl_eval-1-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in self.files().items():
                archive.writestr(name, text)
        return path

    def folder(self, folder: Path) -> Path:
        for name, text in self.files().items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        return folder


@pytest.fixture
def data() -> Data:
    return Data()


def read_one(data: Data, folder: Path, row: dict[str, Any], *calls: dict[str, Any]) -> BfclData:
    data.questions["simple_python"], data.answers["simple_python"] = [row], [truth(row["id"], *calls)]
    return read_bfcl(data.wheel(folder), ["simple_python"])


def test_a_wheel_and_the_folder_it_is_unpacked_to_read_the_same(data: Data, tmp_path: Path):
    folder = data.folder(tmp_path / "unpacked")
    from_wheel = read_bfcl(data.wheel(tmp_path))
    assert len(from_wheel.conversations) == len(CATEGORIES)
    for place in (folder, folder / "bfcl_eval", folder / "bfcl_eval" / "data"):
        assert read_bfcl(place) == from_wheel


def test_types_become_those_of_json_schema(data: Data, tmp_path: Path):
    (conversation,) = read_one(data, tmp_path, question("x"), trip()).conversations
    (tool,) = conversation.tools
    assert tool.name == "travel.plan"
    assert tool.parameters["type"] == "object"
    properties: Any = tool.parameters["properties"]
    assert {name: schema.get("type") for name, schema in properties.items()} == {
        "days": "integer",
        "budget": "number",
        "position": "array",
        "note": None,
        "options": "object",
    }


@pytest.mark.parametrize(
    ("accepted", "arguments"),
    [
        ({"days": [3, 4]}, {"days": 3}),
        ({"budget": [100.5, ""]}, {"days": 3, "budget": 100.5}),
        ({"budget": ["", 100.5]}, {"days": 3}),
        ({"days": ["", 5]}, {"days": 5}),
        ({"position": [[1.5, 2.5]]}, {"days": 3, "position": [1.5, 2.5]}),
        ({"options": [{"pace": ["slow", "calm"]}]}, {"days": 3, "options": {"pace": "slow"}}),
        ({"options": [{"pace": ["", "calm"]}]}, {"days": 3, "options": {}}),
        ({"options": [{"pace": "slow"}]}, {"days": 3, "options": {"pace": "slow"}}),
        ({"undeclared": [1, ""]}, {"days": 3}),
    ],
    ids=[
        "the first value",
        "the first value of an optional parameter",
        "left out where that comes first",
        "but never if it is required",
        "an array",
        "an object holds values per key",
        "a key may be left out",
        "a bare value of a key",
        "an undeclared parameter that may be left out",
    ],
)
def test_the_target_takes_the_first_accepted_value(
    data: Data, tmp_path: Path, accepted: dict[str, Any], arguments: dict[str, Any]
):
    read = read_one(data, tmp_path, question("x"), trip(**accepted))
    assert read.rejects == []
    (call,) = read.conversations[0].target.tool_calls
    assert (call.name, call.arguments) == ("travel.plan", arguments)


def test_all_accepted_values_are_kept(data: Data, tmp_path: Path):
    (conversation,) = read_one(data, tmp_path, question("x"), trip(days=[3, 4])).conversations
    assert conversation.meta == {"category": "simple_python", "accepted": [{"travel.plan": {"days": [3, 4]}}]}
    assert (conversation.id, conversation.split, conversation.source) == ("x", "test", "bfcl")


def test_parallel_calls_are_one_message(data: Data, tmp_path: Path):
    (conversation,) = read_one(data, tmp_path, question("x"), trip(days=[1]), trip(days=[2])).conversations
    assert [call.arguments["days"] for call in conversation.target.tool_calls] == [1, 2]


def test_a_system_message_is_the_developers(data: Data, tmp_path: Path):
    row = question("x")
    row["question"][0].insert(0, {"role": "system", "content": "Be brief."})
    (conversation,) = read_one(data, tmp_path, row, trip()).conversations
    assert [m.role for m in conversation.messages] == ["developer", "user", "assistant"]


@pytest.mark.parametrize("category", NO_CALL)
def test_irrelevant_questions_are_refused_in_text(data: Data, tmp_path: Path, category: str):
    (conversation,) = read_bfcl(data.wheel(tmp_path), [category]).conversations
    assert (conversation.target.content, conversation.target.tool_calls) == (REFUSAL, ())


@pytest.mark.parametrize("category", ANY_CALL)
def test_relevant_questions_take_any_call(data: Data, tmp_path: Path, category: str):
    (conversation,) = read_bfcl(data.wheel(tmp_path), [category]).conversations
    assert conversation.messages[-1].role == "user"
    assert conversation.meta == {"category": category, "expects": "call"}


@pytest.mark.parametrize(
    ("row", "calls", "reason"),
    [
        (question("x"), [{"travel.book": {}}], "the accepted answer calls travel.book, which is not offered"),
        (question("x"), [{"travel.plan": {}}], "cannot be given: travel.plan: days is missing"),
        (question("x"), [trip(days=[])], "cannot be given: travel.plan: days is missing"),
        (question("x"), [trip(speed=[5])], "cannot be given: travel.plan: speed is not expected"),
        (question("x"), [{"travel.plan": {}, "other": {}}], "an accepted call with 2 names"),
        (question("x") | {"question": [[], []]}, [trip()], "2 turns, where one is read"),
        (question("x") | {"function": [{"name": "two words", "parameters": {}}]}, [trip()], "two words"),
        ({"id": "x", "question": [[]]}, [trip()], "not a BFCL row (KeyError: 'function')"),
    ],
)
def test_a_row_that_cannot_be_converted_is_listed_with_its_reason(
    data: Data, tmp_path: Path, row: dict[str, Any], calls: list[dict[str, Any]], reason: str
):
    read = read_one(data, tmp_path, row, *calls)
    (reject,) = read.rejects
    assert (read.conversations, reject.category, reject.line, reject.id) == ([], "simple_python", 1, "x")
    assert reason in reject.reason
    assert "\n" not in reject.reason


def test_rejects_do_not_stop_the_rows_behind_them(data: Data, tmp_path: Path):
    data.questions["multiple"] = ["{broken", question("a"), "", question("a"), question("b"), question("c")]
    data.answers["multiple"] = [truth("a", trip()), truth("c", trip())]
    read = read_bfcl(data.wheel(tmp_path), ["multiple"])
    assert [c.id for c in read.conversations] == ["a", "c"]
    assert [(r.line, r.id) for r in read.rejects] == [(1, ""), (4, "a"), (5, "b")]
    assert [r.reason for r in read.rejects[1:]] == ["the id occurs twice", "no accepted answer"]
    assert read.rows == {"multiple": 5}


def test_categories_with_several_turns_are_counted_not_read(data: Data, tmp_path: Path):
    data.questions["multi_turn_base"] = [{"id": "m0"}, {"id": "m1"}]
    data.questions["memory"] = [{"id": "n0"}]
    assert read_bfcl(data.wheel(tmp_path)).skipped == {"memory": 1, "multi_turn_base": 2}


def test_an_unknown_category_names_the_known_ones(data: Data, tmp_path: Path):
    with pytest.raises(UserError, match=r"'multi_turn_base' is no single-turn category of BFCL.*simple_python"):
        read_bfcl(data.wheel(tmp_path), ["multi_turn_base"])


def test_a_missing_category_is_an_error(data: Data, tmp_path: Path):
    del data.questions["parallel"]
    with pytest.raises(UserError, match="the category parallel is missing"):
        read_bfcl(data.wheel(tmp_path))


def test_missing_answers_are_an_error(data: Data, tmp_path: Path):
    del data.answers["parallel"]
    with pytest.raises(UserError, match="the accepted answers are missing"):
        read_bfcl(data.wheel(tmp_path))


@pytest.mark.parametrize("content", ["nothing", "text", "empty folder"])
def test_what_holds_no_data_is_an_error_with_the_way_to_get_them(tmp_path: Path, content: str):
    path = tmp_path / "bfcl"
    if content == "text":
        path.write_text("no wheel")
    elif content == "empty folder":
        path.mkdir()
    with pytest.raises(UserError, match="pip download bfcl-eval --no-deps"):
        read_bfcl(path)


@pytest.fixture(scope="module")
def real() -> BfclData:
    assert WHEEL
    return read_bfcl(WHEEL)


@needs_wheel
def test_the_published_counts(real: BfclData):
    assert real.rows == {
        "simple_python": 400,
        "simple_java": 100,
        "simple_javascript": 50,
        "multiple": 200,
        "parallel": 200,
        "parallel_multiple": 200,
        "live_simple": 258,
        "live_multiple": 1053,
        "live_parallel": 16,
        "live_parallel_multiple": 24,
        "irrelevance": 240,
        "live_irrelevance": 884,
        "live_relevance": 16,
    }
    assert len(real.conversations) + len(real.rejects) == sum(real.rows.values()) == 3_641
    assert real.skipped == {
        "format_sensitivity": 10,
        "memory": 155,
        "multi_turn_base": 200,
        "multi_turn_long_context": 200,
        "multi_turn_miss_func": 200,
        "multi_turn_miss_param": 200,
        "web_search": 100,
    }


@needs_wheel
def test_the_only_rejects_are_rows_without_a_possible_answer(real: BfclData):
    assert [reject.id for reject in real.rejects] == [
        "live_simple_106-63-0",
        "live_simple_112-68-0",
        "live_multiple_862-181-3",
        "live_multiple_964-207-0",
    ]


@needs_wheel
def test_the_targets_score_full_marks(real: BfclData):
    rows = [c for c in real.conversations if c.messages[-1].role == "assistant"]
    predictions = []
    for row in rows:
        calls = row.target.tool_calls
        predictions.append(Prediction(row.id, calls, None, True, tuple(call.name for call in calls)))
    scores = score(rows, predictions)
    for name in ("call_exact", "args_ast", "relevance_accuracy", "irrelevance_accuracy"):
        assert scores[name].value == 1, name
    assert scores["irrelevance_accuracy"].count == 240 + 884
    assert not [record.id for record in per_example(rows, predictions) if record.reason]


@needs_wheel
@pytest.mark.parametrize("name", FORMATS)
def test_targets_survive_every_format(real: BfclData, name: str):
    """Rendered and parsed back, strictly and leniently, they still score full marks."""
    form = FORMATS[name]
    rows, predictions = [], []
    for row in real.conversations[::10]:
        if row.messages[-1].role != "assistant":
            continue
        try:
            segments = form.render(row)
        except UserError:
            continue  # its tools or values have no place in the format
        prompt = form.render(row.prompt, generation_prompt=True)
        if any(segment.loss for segment in prompt):
            continue  # an earlier answer carries loss too
        output = "".join(segment.text for segment in segments if segment.loss)
        rows.append(row)
        predictions.append(
            Prediction.from_parsed(row.id, form.parse_text(output), form.parse_text(output, lenient=True))
        )
    assert len(rows) > 250
    scores = score(rows, predictions)
    for metric in ("call_exact", "args_ast", "irrelevance_accuracy", "stopped_rate", "call_exact_lenient"):
        assert scores[metric].value == 1, metric
