"""What holds for every format: render then parse is identity, masks are the model's tokens, one <bos>, prefixes."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_conversations import Seeded, conversation, taste_of

from portlab_spec.assets import default_model
from portlab_spec.conversation import Conversation, Message
from portlab_spec.errors import UserError
from portlab_spec.formats import FORMATS, Format, Parsed, Segment, encode, find_format
from portlab_spec.formats.gemma4 import REVISIONS, Gemma4
from portlab_spec.tokenizer import GEMMA4_TOKENS, Tokenizer
from portlab_spec.tools import same_json

EVERY = [*FORMATS, *(f"gemma4@{r}" for r in REVISIONS), "gemma4-31b-thinking@b446025"]
# Those that the default model's tokenizer can encode; qwen3 has tests of its own for ids.
GEMMA = [name for name in EVERY if name != "qwen3"]
# The prompt of these ends in an empty thought, or opens one after a result, that the full text does not hold.
NOT_PREFIXES = ("qwen3", "gemma4-31b", "gemma4-thinking", "gemma4-31b-thinking", "gemma4@4742fe8")

formats = st.sampled_from(EVERY).map(find_format)
gemma_formats = st.sampled_from(GEMMA).map(find_format)
randoms = st.integers(0, 2**40).map(Seeded)
Tokenizers = Callable[[Format], Tokenizer]


@pytest.fixture(scope="module")
def tokenizers() -> Tokenizers:
    """The real tokenizer, under the names that a format gives its tokens."""
    gemma3 = Tokenizer.load(default_model().path)
    gemma4 = gemma3.renamed(GEMMA4_TOKENS)
    return lambda fmt: gemma4 if isinstance(fmt, Gemma4) else gemma3


def text_of(segments: list[Segment]) -> str:
    return "".join(segment.text for segment in segments)


def supervise(conv: Conversation, which: Callable[[int], bool]) -> Conversation:
    """The conversation with exactly the chosen assistant messages supervised."""
    messages = (
        m.model_copy(update={"supervised": which(i)}) if m.role == "assistant" else m
        for i, m in enumerate(conv.messages)
    )
    return conv.model_copy(update={"messages": tuple(messages)})


def only_target(conv: Conversation) -> Conversation:
    return supervise(conv, lambda i: i == len(conv.messages) - 1)


def assert_is(parsed: Parsed, message: Message) -> None:
    assert parsed.error is None
    assert parsed.stopped
    assert parsed.text == (message.content or "")
    assert parsed.reasoning == (message.reasoning or "")
    assert [c.name for c in parsed.calls] == [c.name for c in message.tool_calls]
    assert all(same_json(a.arguments, b.arguments) for a, b in zip(parsed.calls, message.tool_calls, strict=True))
    assert set(parsed.names) == {c.name for c in message.tool_calls} or not message.tool_calls


@settings(max_examples=1000, deadline=None)
@given(formats, randoms)
def test_parsing_what_was_rendered_gives_it_back(fmt: Format, rng: Random):
    conv = only_target(conversation(rng, taste_of(fmt)))
    output = text_of([s for s in fmt.render(conv) if s.loss])
    for lenient in (False, True):
        assert_is(fmt.parse_text(output, lenient=lenient), conv.target)


@pytest.mark.real_model
def test_parsing_ids_gives_it_back(tokenizers: Tokenizers):
    @settings(max_examples=600, deadline=None)
    @given(gemma_formats, randoms)
    def check(fmt: Format, rng: Random) -> None:
        conv = only_target(conversation(rng, taste_of(fmt)))
        encoded = encode(fmt.render(conv), tokenizers(fmt))
        ids = [i for i, loss in zip(encoded.ids, encoded.loss, strict=True) if loss]
        assert_is(fmt.parse(ids, tokenizers(fmt)), conv.target)

    check()


@pytest.mark.real_model
def test_ids_are_those_of_the_whole_text_in_one_piece_with_one_bos(tokenizers: Tokenizers):
    @settings(max_examples=600, deadline=None)
    @given(gemma_formats, randoms, st.booleans())
    def check(fmt: Format, rng: Random, prompt: bool) -> None:
        segments = fmt.render(conversation(rng, taste_of(fmt)), generation_prompt=prompt)
        encoded = encode(segments, tokenizers(fmt))
        assert encoded.ids == tokenizers(fmt).encode(text_of(segments))
        assert encoded.ids.count(tokenizers(fmt).bos_id) == 1
        assert encoded.ids[0] == tokenizers(fmt).bos_id

    check()


@settings(max_examples=1000, deadline=None)
@given(st.sampled_from([n for n in EVERY if n not in NOT_PREFIXES and "thinking" not in n]).map(find_format), randoms)
def test_a_prompt_is_a_prefix_and_the_mask_is_what_follows_up_to_the_stop_token(fmt: Format, rng: Random):
    conv = conversation(rng, replace(taste_of(fmt), reasoning=""))  # earlier turns' reasoning is forgotten
    conv = supervise(conv, lambda i: rng.random() < 0.7)
    segments = fmt.render(conv)
    full, expected = text_of(segments), set()
    for i, message in enumerate(conv.messages):
        if message.role != "assistant":
            continue
        so_far = conv.model_copy(update={"messages": conv.messages[:i]})
        prompt = text_of(fmt.render(so_far, generation_prompt=True))
        assert full.startswith(prompt)
        if message.supervised:
            ends = [full.find(stop, len(prompt)) + len(stop) for stop in fmt.stop_tokens if stop in full[len(prompt) :]]
            expected |= set(range(len(prompt), min(ends)))
    masked, at = set(), 0
    for segment in segments:
        if segment.loss:
            masked |= set(range(at, at + len(segment.text)))
        at += len(segment.text)
    assert masked == expected


@settings(max_examples=600, deadline=None)
@given(formats, randoms)
def test_a_stream_cut_anywhere_ends_like_the_whole(fmt: Format, rng: Random):
    conv = only_target(conversation(rng, taste_of(fmt)))
    output = text_of([s for s in fmt.render(conv) if s.loss])
    output = output[: rng.choice((len(output), rng.randint(0, len(output))))]
    for lenient in (False, True):
        stream, events, at = fmt.stream(lenient=lenient), [], 0
        while at < len(output):
            size = rng.choice((1, 1, 2, 5, 30))
            events += stream.feed(output[at : at + size])
            at += size
        whole = fmt.parse_text(output, lenient=lenient)
        assert stream.close() == whole
        assert [e for e in events if not hasattr(e, "kind")] == (list(whole.calls) if lenient else [])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("field", ["developer", "user", "answer", "result", "argument", "description", "enum"])
def test_text_that_holds_a_control_token_is_refused_with_its_field(name: str, field: str):
    fmt = find_format(name)
    for token in fmt.control_tokens:
        with pytest.raises(UserError, match=r"holds the control token") as refusal:
            fmt.render(_holding(field, f"a {token} b"))
        assert refusal.value.where.startswith("c: ")


def _holding(field: str, text: str) -> Conversation:
    def at(name: str) -> str:
        return text if field == name else "x"

    parameters = {"type": "object", "properties": {"p": {"type": "string", "description": "P.", "enum": [at("enum")]}}}
    return Conversation.model_validate(
        {
            "id": "c",
            "tools": [{"name": "f", "description": at("description"), "parameters": parameters}],
            "messages": [
                {"role": "developer", "content": at("developer")},
                {"role": "user", "content": at("user")},
                {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"p": at("argument")}}]},
                {"role": "tool", "name": "f", "content": at("result")},
                {"role": "assistant", "content": at("answer")},
            ],
        }
    )


@pytest.mark.parametrize("name", EVERY)
def test_a_format_is_found_by_its_name(name: str):
    assert find_format(name).name == name.removesuffix("@8995379")


@pytest.mark.parametrize("name", ["gemma5", "gemma4@1234567", "functiongemma@4742fe8", ""])
def test_an_unknown_format_is_refused_with_those_that_exist(name: str):
    with pytest.raises(UserError, match="Choose one of"):
        find_format(name)
