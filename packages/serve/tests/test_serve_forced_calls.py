"""`tool_choice` `required` or a tool by name: a grammar that admits calls of what is offered and nothing else."""

import pytest

from portlab_serve.forced_calls import forced_grammar
from portlab_spec.assets import default_model
from portlab_spec.errors import UserError
from portlab_spec.formats import find_format
from portlab_spec.formats.grammar import compile_grammar, constraint_tokenizer
from portlab_spec.tokenizer import GEMMA4_TOKENS, Tokenizer

FG, GEMMA4 = find_format("functiongemma"), find_format("gemma4")
DAY = {"type": "object", "properties": {"day": {"type": "integer", "description": "Day."}}, "required": ["day"]}
TOOLS = [
    {"type": "function", "function": {"name": "steps", "description": "Steps of a day.", "parameters": DAY}},
    {"type": "function", "function": {"name": "sleep"}},  # the API wants no more than a name
]
STEPS = "<start_function_call>call:steps{day:3}<end_function_call>"
SLEEP = "<start_function_call>call:sleep{}<end_function_call>"
END = "<start_function_response>"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(default_model().path)


@pytest.fixture(scope="module")
def admits(tokenizer):
    converted = constraint_tokenizer(tokenizer)

    def check(grammar: str, output: str) -> bool:
        matcher = compile_grammar(grammar, converted)
        ids = tokenizer.encode(output)
        return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()

    return check


@pytest.mark.parametrize(
    ("name", "parallel", "admitted"),
    [
        (None, True, {STEPS + END, SLEEP + END, STEPS + SLEEP + END}),
        (None, False, {STEPS + END, SLEEP + END}),
        ("sleep", True, {SLEEP + END}),
        ("steps", True, {STEPS + END}),
    ],
)
def test_what_may_be_said(admits, name, parallel, admitted):
    grammar = forced_grammar(FG, TOOLS, name=name, parallel=parallel)
    others = {"Hello.<end_of_turn>", STEPS.replace("3", "true") + END, STEPS.replace("steps", "walk") + END}
    for output in (others, {STEPS + END, SLEEP + END, STEPS + SLEEP + END}):
        assert {text for text in output if admits(grammar, text)} == (output & admitted)


@pytest.mark.parametrize("tool", [TOOLS[0], TOOLS[0]["function"]], ids=["chat", "responses"])
def test_tools_of_both_interfaces(admits, tool):
    assert admits(forced_grammar(FG, [tool], name=None, parallel=True), STEPS + END)


@pytest.mark.parametrize("thinking", [False, True])
def test_gemma4_may_think_first_where_it_was_asked_to(tokenizer, thinking):
    renamed = tokenizer.renamed(GEMMA4_TOKENS)
    matcher = compile_grammar(forced_grammar(GEMMA4, TOOLS, name=None, parallel=True, thinking=thinking), renamed)
    ids = renamed.encode("<|channel>thought\nHm.<channel|><|tool_call>call:sleep{}<tool_call|>")
    assert (matcher.validate_tokens(ids) == len(ids)) is thinking


@pytest.mark.parametrize("name", ["gemma3-json", "gemma3-python"])
def test_gemma3_has_grammars_too(name):
    assert "sleep" in forced_grammar(find_format(name), TOOLS, name="sleep", parallel=True)


def test_what_is_refused():
    with pytest.raises(UserError, match="there is no grammar for qwen3"):
        forced_grammar(find_format("qwen3"), TOOLS, name=None, parallel=True)
    with pytest.raises(UserError, match="tool_choice names walk, which is not among the tools"):
        forced_grammar(FG, TOOLS, name="walk", parallel=True)
    impossible = {"type": "object", "properties": {"a": {"type": "integer", "enum": []}}, "required": ["a"]}
    with pytest.raises(UserError, match="f"):
        forced_grammar(FG, [{"name": "f", "parameters": impossible}], name=None, parallel=True)
