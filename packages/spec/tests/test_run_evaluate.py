"""Scoring a model by what it generates, with a model that is a function of the prompt."""

import pytest
from char_tokenizer import CharTokenizer

from portlab_spec.conversation import Conversation, Message, Tool, ToolCall
from portlab_spec.formats import encode, find_format
from portlab_spec.run.evaluate import evaluate, prompt_ids, stop_ids

FMT = find_format("functiongemma")
TOOLS = (Tool(name="get_steps", description="Steps of today"), Tool(name="get_pulse", description="Pulse of now"))


@pytest.fixture
def tokenizer():
    return CharTokenizer(sorted({*FMT.control_tokens, *FMT.stop_tokens, "<bos>"}))


def ask(name, question, tool, split="test"):
    messages = (Message(role="user", content=question), Message(role="assistant", tool_calls=(ToolCall(name=tool),)))
    return Conversation(id=name, tools=TOOLS, messages=messages, split=split)


TRAIN = [ask("t", "Steps?", "get_steps", "train")]
HELD_OUT = [ask("a", "How many steps?", "get_steps"), ask("b", "How fast is my heart?", "get_pulse")]


@pytest.fixture
def answers(tokenizer):
    """Of a model that calls get_steps whatever it is asked, and stops."""
    asked = []
    call = "<start_function_call>call:get_steps{}<end_function_call><start_function_response>"

    def generate(prompts):
        asked.extend(prompts)
        return [ids_of(call, tokenizer) for _ in prompts]

    return evaluate(generate, HELD_OUT, FMT, tokenizer, train=TRAIN), asked


def ids_of(text, tokenizer):
    ids = []
    while text:
        control = next((token for token in tokenizer.controls if text.startswith(token)), None)
        ids += [tokenizer.token_id(control)] if control else tokenizer.encode(text[0])
        text = text[len(control or "x") :]
    return ids


def test_a_prompt_ends_where_the_model_is_to_answer(tokenizer):
    ids = prompt_ids(HELD_OUT[0], FMT, tokenizer)
    assert tokenizer.decode(ids).endswith("<start_of_turn>model\n")
    assert ids == encode(FMT.render(HELD_OUT[0]), tokenizer).ids[: len(ids)]


def test_the_format_says_what_ends_an_answer(tokenizer):
    assert [tokenizer.decode([i]) for i in stop_ids(FMT, tokenizer)] == list(FMT.stop_tokens)


def test_every_conversation_is_asked_once_in_order(answers, tokenizer):
    _, asked = answers
    assert asked == [prompt_ids(c, FMT, tokenizer) for c in HELD_OUT]


def test_the_answers_are_scored(answers):
    evaluation = answers[0].evaluation
    assert (evaluation.split, evaluation.examples) == ("test", 2)
    assert (evaluation.metrics["call_exact"].hits, evaluation.metrics["call_exact"].count) == (1, 2)
    assert evaluation.metrics["stopped_rate"].value == 1


def test_the_baseline_comes_from_the_training_rows(answers):
    assert answers[0].evaluation.metrics["most_frequent_tool"].hits == 1


def test_outputs_keep_their_control_tokens(answers):
    assert set(answers[0].outputs) == {"a", "b"}
    assert answers[0].outputs["a"].endswith("<end_function_call><start_function_response>")
