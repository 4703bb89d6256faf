"""A model folder in this process: prompt and output in the wire format, streaming, time limit, Ctrl-C.

The model is a stub that writes a scripted output, so that the tests hold what is around it.
"""

import asyncio
import time

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from fitnesscoach.backends import BackendError, discard, folder  # noqa: E402
from fitnesscoach.session import Session, TextPiece  # noqa: E402
from fitnesscoach.tools import tool_set  # noqa: E402
from portlab_spec.conversation import Message, ToolCall  # noqa: E402
from portlab_spec.errors import UserError  # noqa: E402
from portlab_spec.formats import FORMATS  # noqa: E402
from portlab_spec.tokenizer import Tokenizer  # noqa: E402

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
    """Answers with texts in turn, a token at a time, as `generate` does."""

    device = "cpu"

    def __init__(self, tokenizer, outputs, pause=0.0):
        self.tokenizer, self.outputs, self.pause = tokenizer, iter(outputs), pause
        self.prompts, self.written = [], 0

    def generate(self, input_ids, *, streamer, stopping_criteria, max_new_tokens, **options):
        assert options["do_sample"] is False
        self.prompts.append(self.tokenizer.decode(input_ids[0].tolist()))
        streamer.put(input_ids)
        for token in self.tokenizer.encode(next(self.outputs))[:max_new_tokens]:
            time.sleep(self.pause)
            streamer.put(torch.tensor([token]))
            self.written += 1
            if stopping_criteria(input_ids, None).all():
                break
        streamer.end()


@pytest.fixture
def scripted(model_folder, monkeypatch):
    def make(*outputs, pause=0.0, **options):
        model = Scripted(Tokenizer.load(model_folder), outputs, pause)
        monkeypatch.setattr(folder, "_load", lambda _: model)
        return folder.Folder(model_folder, **options), model

    return make


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
    answer = asyncio.run(backend.answer([Message(role="user", content="x")], (), discard))
    assert answer.strict.error
    assert answer.usable.calls == (ToolCall(name="get_steps"),)


def test_a_slow_model_is_given_up_and_stops(scripted):
    backend, model = scripted("x" * 250, "Hi.<end_of_turn>", pause=0.02, timeout=0.3)

    async def scenario():
        with pytest.raises(BackendError, match="no complete answer within"):
            await backend.answer([Message(role="user", content="x")], (), discard)
        await asyncio.sleep(0.2)
        written = model.written
        await asyncio.sleep(0.2)
        assert model.written == written < 40
        return await backend.answer([Message(role="user", content="x")], (), discard)

    assert asyncio.run(scenario()).strict.text == "Hi."


def test_two_questions_are_answered_one_after_the_other(scripted):
    backend, _ = scripted("One.<end_of_turn>", "Two.<end_of_turn>")

    async def scenario():
        asked = [backend.answer([Message(role="user", content="x")], (), discard) for _ in range(2)]
        return [answer.strict.text for answer in await asyncio.gather(*asked)]

    assert asyncio.run(scenario()) == ["One.", "Two."]


def test_an_output_without_end_is_cut_and_said_to_be(scripted):
    backend, _ = scripted("x" * 100, max_tokens=10)
    answer = asyncio.run(backend.answer([Message(role="user", content="x")], (), discard))
    assert not answer.strict.stopped


def test_a_conversation_that_the_format_cannot_write_is_one_line(scripted):
    backend, model = scripted()
    with pytest.raises(BackendError, match="control token"):
        asyncio.run(backend.answer([Message(role="user", content="<end_of_turn>")], (), discard))
    assert not model.prompts


def test_a_fault_of_the_model_is_one_line(scripted, monkeypatch):
    backend, model = scripted()

    def fail(**options):
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(model, "generate", fail)
    with pytest.raises(BackendError, match="out of memory"):
        asyncio.run(backend.answer([Message(role="user", content="x")], (), discard))


def test_a_folder_without_weights_is_refused(model_folder):
    (model_folder / "config.json").write_text('{"model_type": "gemma3_text"}')
    with pytest.raises(UserError, match="transformers cannot load the model"):
        folder.Folder(model_folder)
