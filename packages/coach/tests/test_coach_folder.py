"""A model folder in this process: prompt and output in the wire format, streaming, time limit, Ctrl-C.

The model is a stub that writes a scripted output, so that the tests hold what is around it.
"""

import asyncio
import threading

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from fitnesscoach.backends import BackendError, discard, folder
from fitnesscoach.session import Session, TextPiece
from fitnesscoach.tools import tool_set
from portlab_spec.conversation import Message, ToolCall
from portlab_spec.formats import FORMATS
from portlab_spec.tokenizer import Tokenizer

CALL = "<start_function_call>call:get_steps{}<end_function_call><start_function_response>"


@pytest.fixture
def model_folder(tmp_path):
    """A folder with a byte-level tokenizer that knows FunctionGemma's control tokens."""
    alphabet = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(FORMATS["functiongemma"].control_tokens))
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


class Scripted:
    """A decoder that answers with texts in turn, a token at a time.

    Attributes:
        hangs: it waits before its fifth token until it is let go.
        ended: set when an answer has ended or was given up.
    """

    positions = 4000

    def __init__(self, tokenizer, outputs, hangs):
        self.tokenizer, self.outputs = tokenizer, iter(outputs)
        self.prompts, self.prepared, self.written = [], [], 0
        self.let_go, self.ended = threading.Event(), threading.Event()
        if not hangs:
            self.let_go.set()

    def prepare(self, length, limit):
        self.prepared.append((length, limit))

    def decode(self, prompt, stop_ids, limit):
        assert self.prepared[-1] == (len(prompt), limit)
        assert 1 <= limit <= self.positions - len(prompt)
        self.prompts.append(self.tokenizer.decode(prompt))
        self.ended.clear()
        try:
            for token in self.tokenizer.encode(next(self.outputs))[:limit]:
                if self.written == 4:
                    self.let_go.wait()
                self.written += 1
                yield token
                if token in stop_ids:
                    return
        finally:
            self.ended.set()


@pytest.fixture
def scripted(model_folder, monkeypatch):
    def make(*outputs, hangs=False, **options):
        model = Scripted(Tokenizer.load(model_folder), outputs, hangs)
        monkeypatch.setattr(folder, "load_decoder", lambda path, runtime: model)
        return folder.Folder(model_folder, **options), model

    return make


def ask(backend, text="x"):
    return backend.answer([Message(role="user", content=text)], (), discard)


def test_a_question_is_rendered_and_its_call_parsed_in_the_format_of_the_tokenizer(scripted, data):
    backend, model = scripted(CALL, "You walked.<end_of_turn>")
    shown = []

    async def show(update):
        shown.append(update)

    finish = asyncio.run(Session(backend, tool_set("basic", data), data).ask("How many?", show))
    assert (finish.outcome, finish.text) == ("answered", "You walked.")
    first, second = model.prompts
    assert first.startswith("<bos><start_of_turn>developer\nYou are a model")
    assert first.endswith("<start_of_turn>user\nHow many?<end_of_turn>\n<start_of_turn>model\n")
    # The answer to a result goes on in the turn of the call.
    assert second == first + CALL + "response:get_steps{steps:5074}<end_function_response>"
    assert "".join(update.text for update in shown if isinstance(update, TextPiece)) == "You walked."


def test_characters_of_several_tokens_are_shown_whole(scripted):
    backend, _ = scripted("Größe: 5 €<end_of_turn>")
    pieces = []

    async def show(text):
        pieces.append(text)

    answer = asyncio.run(backend.answer([Message(role="user", content="x")], (), show))
    assert answer.strict.text == "".join(pieces) == "Größe: 5 €"
    assert "\ufffd" not in "".join(pieces)


def test_a_call_that_only_the_lenient_parser_can_read_is_used(scripted):
    backend, _ = scripted("<start_function_call>call:get_steps{}<end_function_call><end_of_turn>")
    answer = asyncio.run(ask(backend))
    assert answer.strict.error
    assert answer.usable.calls == (ToolCall(name="get_steps"),)


def test_a_slow_model_is_given_up_and_stops(scripted):
    backend, model = scripted("x" * 250, "Hi.<end_of_turn>", hangs=True, timeout=0.3)

    async def scenario():
        with pytest.raises(BackendError, match=r"no complete answer within 0\.3 s"):
            await ask(backend)
        model.let_go.set()
        assert await asyncio.to_thread(model.ended.wait, 10)
        assert model.written == 5  # the token that it hung at
        return await ask(backend)

    assert asyncio.run(scenario()).strict.text == "Hi."


def test_a_question_that_is_given_up_stops(scripted):
    backend, model = scripted("x" * 250, hangs=True)

    async def scenario():
        four = asyncio.Event()

        async def show(text):
            if len(text) == 4 or model.written == 4:
                four.set()

        asking = asyncio.create_task(backend.answer([Message(role="user", content="x")], (), show))
        await four.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        model.let_go.set()
        assert await asyncio.to_thread(model.ended.wait, 10)
        assert model.written == 5

    asyncio.run(scenario())


def test_compiling_is_no_part_of_an_answer(scripted, monkeypatch):
    backend, model = scripted("Hi.<end_of_turn>", timeout=0.2)
    prepare, slow = model.prepare, threading.Event()

    def compile_slowly(length, limit):
        slow.wait(0.5)
        prepare(length, limit)

    monkeypatch.setattr(model, "prepare", compile_slowly)
    assert asyncio.run(ask(backend)).strict.text == "Hi."


def test_two_questions_are_answered_one_after_the_other(scripted):
    backend, _ = scripted("One.<end_of_turn>", "Two.<end_of_turn>")

    async def scenario():
        return [answer.strict.text for answer in await asyncio.gather(ask(backend), ask(backend))]

    assert asyncio.run(scenario()) == ["One.", "Two."]


def test_an_output_without_end_is_cut_and_said_to_be(scripted):
    backend, model = scripted("x" * 100, max_tokens=10)
    assert not asyncio.run(ask(backend)).strict.stopped
    assert model.written == 10


def test_an_answer_fits_into_the_positions_of_the_model(scripted, monkeypatch):
    backend, model = scripted("x" * 100)
    asyncio.run(ask(backend))
    ((tokens, _),) = model.prepared
    assert model.written == 100
    monkeypatch.setattr(model, "positions", tokens + 7)
    model.outputs, model.written = iter(["x" * 100]), 0
    asyncio.run(ask(backend))
    assert model.written == 7


def test_a_conversation_beyond_the_positions_of_the_model_is_one_line(scripted):
    backend, model = scripted()
    with pytest.raises(BackendError, match=r"has 5,\d\d\d tokens, the model 4,000 positions\. Start a new one$"):
        asyncio.run(ask(backend, "x" * 5000))
    assert not model.prompts


def test_a_conversation_that_the_format_cannot_write_is_one_line(scripted):
    backend, model = scripted()
    with pytest.raises(BackendError, match="control token"):
        asyncio.run(ask(backend, "<end_of_turn>"))
    assert not model.prompts


@pytest.mark.parametrize("where", ["prepare", "decode"])
def test_a_fault_of_the_model_is_one_line(scripted, monkeypatch, where):
    backend, model = scripted()

    def fail(*args):
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(model, where, fail)
    with pytest.raises(BackendError, match="out of memory"):
        asyncio.run(ask(backend))


def test_a_closed_folder_lets_its_model_go(scripted):
    backend, model = scripted("Hi.<end_of_turn>")

    async def scenario():
        await ask(backend)
        await backend.close()

    asyncio.run(scenario())
    assert model not in vars(backend).values()
