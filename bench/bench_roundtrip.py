"""Random conversations, written and read back: what a format renders, its strict parser must return unchanged.

    nox -s bench_roundtrip                        a million conversations; writes bench/results/bench_roundtrip.json
    nox -s bench_roundtrip -- --minutes 4         as many as that time allows; the same command goes on from there
    python bench/bench_roundtrip.py --seed 123 --format gemma4@905e84b      one conversation, to look at a failure

Each conversation is drawn from its own seed with every construct and hostile text. Its last message is parsed from
the text that carries loss; one in eight also streamed in random pieces, one in sixteen also from the real tokenizer's
ids (Qwen3's from one of single characters), whole and streamed. Formats take turns. Two worker processes.
"""

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from portlab_spec.assets import default_model
from portlab_spec.conversation import Conversation
from portlab_spec.files import read_json
from portlab_spec.formats import Format, Parsed, encode, find_format
from portlab_spec.formats.functiongemma import FunctionGemma
from portlab_spec.formats.gemma4 import REVISIONS, Gemma4
from portlab_spec.formats.qwen3 import Qwen3
from portlab_spec.formats.segments import TextTokenizer
from portlab_spec.tokenizer import GEMMA4_TOKENS, Tokenizer
from result_file import RESULTS, write_result

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from char_tokenizer import CharTokenizer
from random_conversations import conversation, taste_of

RESULT = RESULTS / "bench_roundtrip.json"
FORMATS = (  # an odd number, so that the slower checks meet each
    *("functiongemma",) * 5,
    *("gemma3-json", "gemma3-python", "qwen3") * 2,
    *(
        f"gemma4{size}{thinking}@{commit}"
        for commit in REVISIONS
        for size in ("", "-31b")
        for thinking in ("", "-thinking")
    ),
)
MILLION, BLOCK = 1_000_000, 1_000
STREAMED, FROM_IDS = 8, 16  # one in so many
THOUGHT = "<|channel>thought\n"


@cache
def tokenizer(family: str) -> TextTokenizer:
    """The default model's tokenizer, with the names of a format's control tokens; a stand-in for another model's."""
    if family == "qwen3":
        return CharTokenizer(find_format(family).control_tokens)
    own = Tokenizer.load(default_model().path)
    return own.renamed(GEMMA4_TOKENS) if family == "gemma4" else own


def drawn(seed: int, fmt: Format) -> Conversation:
    """The conversation of a seed."""
    return conversation(random.Random(seed), taste_of(fmt), id=f"seed {seed}")


def check(seed: int, name: str, *, ids: bool = True) -> list[str]:
    """What is wrong with one conversation; nothing if all parses equal its last message.

    Args:
        seed: of the conversation; also decides which of the slower checks it gets.
        name: of the format.
        ids: allow the checks that need the real tokenizer.
    """
    fmt = find_format(name)
    conv = drawn(seed, fmt)
    answer = [s for s in fmt.render(last_supervised(conv)) if s.loss]
    text, rng = "".join(s.text for s in answer), random.Random(seed)
    parses = {"text": fmt.parse_text(text)}
    if isinstance(fmt, Gemma4):
        opened = fmt.after(fmt.render(conv.prompt, generation_prompt=True))
        if opened.in_thought and text.startswith(THOUGHT):
            parses["text after a prompt that opens the thought"] = opened.parse_text(text.removeprefix(THOUGHT))
    if seed % STREAMED == 0:
        stream = fmt.stream()
        for piece in cut(text, rng):
            stream.feed(piece)
        parses["stream"] = stream.close()
    if ids and seed % FROM_IDS == 1:
        real = tokenizer(name.partition("@")[0].partition("-")[0])
        tokens = encode(answer, real).ids
        parses["ids"] = fmt.parse(tokens, real)
        if isinstance(fmt, Gemma4 | FunctionGemma | Qwen3):
            of_ids = fmt.stream(tokenizer=real)
            for group in cut(tokens, rng):
                of_ids.feed_ids(group)
            parses["stream of ids"] = of_ids.close()
    wrong = ((way, difference(conv, parsed)) for way, parsed in parses.items())
    return [f"{name} seed {seed}, {way}: {what}" for way, what in wrong if what]


def last_supervised(conv: Conversation) -> Conversation:
    """The conversation with loss on its last message only."""
    context = [m.model_copy(update={"supervised": m.role != "assistant"}) for m in conv.messages[:-1]]
    target = conv.target.model_copy(update={"supervised": True})
    return conv.model_copy(update={"messages": (*context, target)})


def cut(whole: Any, rng: random.Random) -> Iterator[Any]:
    """Pieces of one to twelve characters or ids."""
    at = 0
    while at < len(whole):
        size = rng.randint(1, 12)
        yield whole[at : at + size]
        at += size


def difference(conv: Conversation, parsed: Parsed) -> str:
    """How a parse differs from the last message of its conversation; the order of keys is not held."""
    target = conv.target
    if parsed.error:
        return f"refused: {parsed.error}"
    if not parsed.stopped:
        return "no stop token seen"
    calls, expected = (
        json.dumps([[c.name, c.arguments] for c in found], sort_keys=True)
        for found in (parsed.calls, target.tool_calls)
    )
    if calls != expected:
        return f"calls {calls}, not {expected}"
    if parsed.text != ("" if target.tool_calls else (target.content or "").strip()):
        return f"text {parsed.text!r}, not {target.content!r}"
    if parsed.reasoning != (target.reasoning or ""):
        return f"reasoning {parsed.reasoning!r}, not {target.reasoning!r}"
    return ""


def block(first: int) -> list[str]:
    """The faults of one block of seeds."""
    return [fault for seed in range(first, first + BLOCK) for fault in check(seed, FORMATS[seed % len(FORMATS)])]


def main() -> None:
    """Check blocks of seeds until the count or the time is reached, and record how far it went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=MILLION, help="conversations in all")
    parser.add_argument("--minutes", type=float, default=24 * 60, help="stop after this time")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--fresh", action="store_true", help="start over instead of going on from the last result")
    parser.add_argument("--seed", type=int, help="check this conversation only, and print it")
    names = sorted(set(FORMATS))
    parser.add_argument("--format", choices=names, default="functiongemma", metavar="NAME", help="for --seed")
    args = parser.parse_args()
    if args.seed is not None:
        print(drawn(args.seed, find_format(args.format)).model_dump_json(indent=2))
        raise SystemExit("\n".join(check(args.seed, args.format)) or 0)
    before = {} if args.fresh or not RESULT.exists() else read_json(RESULT)["figures"]["portlab"]
    done, faults, seconds = before.get("conversations", 0), before.get("faults", []), before.get("seconds", 0.0)
    start = time.monotonic()
    with ProcessPoolExecutor(args.workers) as pool:
        firsts = iter(range(done, args.count, BLOCK))
        while time.monotonic() - start < 60 * args.minutes and (batch := list(itertools.islice(firsts, args.workers))):
            for found in pool.map(block, batch):
                done, faults = done + BLOCK, faults + found
                print(*found, sep="\n", end="\n" if found else "")
            print(f"{done:,} conversations, {len(faults)} faults", file=sys.stderr)
    seconds += time.monotonic() - start
    figures = {
        "conversations": done,
        "streamed": done // STREAMED,
        "from token ids": done // FROM_IDS,
        "faults": faults,
        "seconds": round(seconds, 1),
    }
    write_result("bench_roundtrip", ("portlab-spec", "tokenizers"), {"portlab": figures}, {}, formats=names)
    raise SystemExit(bool(faults))


if __name__ == "__main__":
    main()
