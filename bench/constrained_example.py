"""What the untuned Gemma 3 270M answers with a grammar and without: the example of docs/grammar.md.

    python bench/constrained_example.py       in the environment of `nox -s tests`

Greedy decoding with transformers in float32; a grammar masks the logits before each choice.
"""

import numpy as np
import torch
import transformers

from portlab_spec.assets import default_model
from portlab_spec.conversation import Conversation, Message
from portlab_spec.formats import encode, find_format
from portlab_spec.formats.grammar import compile_grammar, constraint_tokenizer, lark_grammar
from portlab_spec.tokenizer import Tokenizer
from portlab_spec.tools import tool_from_function

LONGEST = 48


def get_weather(city: str, days: int, unit: str = "metric") -> str:
    """Get the weather forecast for a city.

    Args:
        city: Name of the city.
        days: Number of days to forecast.
        unit: Either metric or imperial.
    """


def get_time(city: str) -> str:
    """Get the local time in a city.

    Args:
        city: Name of the city.
    """


TOOLS = (tool_from_function(get_weather), tool_from_function(get_time))
QUESTION = Message(role="user", content="What will the weather be like in Oslo for the next 3 days?")


def main() -> None:
    """Answer the question in each format, free and constrained."""
    folder = default_model().path
    tokenizer = Tokenizer.load(folder)
    constraint = constraint_tokenizer(tokenizer)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    stops = {tokenizer.token_id(token) for token in ("<eos>", "<end_of_turn>", "<start_function_response>")}
    for name in ("gemma3-json", "gemma3-python", "functiongemma"):
        fmt = find_format(name)
        prompt = fmt.render(Conversation(id="c", tools=TOOLS, messages=(QUESTION,)), generation_prompt=True)
        grammar = lark_grammar(TOOLS, fmt, calls="one")
        for matcher in (None, compile_grammar(grammar, constraint)):
            unseen, past = encode(prompt, tokenizer).ids, None
            answer: list[int] = []
            while len(answer) < LONGEST and not (answer and answer[-1] in stops):
                with torch.no_grad():
                    out = model(torch.tensor([unseen]), past_key_values=past, use_cache=True)
                logits, past = out.logits[0, -1].numpy(), out.past_key_values
                if matcher is not None:
                    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
                    logits = np.where(bits[: logits.size], logits, -np.inf)
                answer.append(int(logits.argmax()))
                unseen = answer[-1:]
                if matcher is not None:
                    matcher.consume_token(answer[-1])
            print(f"{name}, {'free' if matcher is None else 'calls=one'}: {tokenizer.decode(answer)!r}")


if __name__ == "__main__":
    main()
