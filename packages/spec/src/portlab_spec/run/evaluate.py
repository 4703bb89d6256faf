"""Score a model by the tool calls that it generates."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from portlab_spec.conversation import Conversation
from portlab_spec.formats import Format, encode
from portlab_spec.metrics import Prediction, score
from portlab_spec.report import Evaluation
from portlab_spec.tokenizer import Tokenizer


@dataclass(frozen=True)
class Answers:
    """What a model said to each conversation of a split.

    Attributes:
        evaluation: the metrics.
        outputs: raw generated text by conversation id, control tokens included.
    """

    evaluation: Evaluation
    outputs: dict[str, str]


def prompt_ids(conversation: Conversation, fmt: Format, tokenizer: Tokenizer) -> list[int]:
    """Ids of a conversation up to where the model is to answer."""
    return encode(fmt.render(conversation.prompt, generation_prompt=True), tokenizer).ids


def stop_ids(fmt: Format, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids that end a generated turn."""
    return tuple(tokenizer.token_id(token) for token in fmt.stop_tokens)


def evaluate(
    generate: Callable[[Sequence[Sequence[int]]], Sequence[list[int]]],
    conversations: Sequence[Conversation],
    fmt: Format,
    tokenizer: Tokenizer,
    *,
    train: Sequence[Conversation],
) -> Answers:
    """Generate an answer to each conversation and score them all.

    Args:
        generate: prompts in ids -> the ids that the model answers each with, its stop token included.
        conversations: one split; the last message of each is the expected answer.
        fmt: wire format.
        tokenizer: the model's.
        train: training conversations, for the most-frequent-tool baseline.
    """
    prompts = [prompt_ids(c, fmt, tokenizer) for c in conversations]
    outputs = generate(prompts)
    predictions = []
    for conversation, ids in zip(conversations, outputs, strict=True):
        strict, lenient = (fmt.parse(ids, tokenizer, lenient=flag) for flag in (False, True))
        predictions.append(Prediction.from_parsed(conversation.id, strict, lenient))
    evaluation = Evaluation(
        split=conversations[0].split,
        examples=len(conversations),
        metrics=score(conversations, predictions, train=train),
    )
    texts = {c.id: tokenizer.decode(ids) for c, ids in zip(conversations, outputs, strict=True)}
    return Answers(evaluation, texts)
