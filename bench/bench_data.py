"""What happens to a data set before training: leaks found, long rows fitted, buckets, groups with one prompt.

    nox -s bench_data       writes bench/results/bench_data.json; the figures of docs/batching.md

BFCL v4 comes from its wheel, which is downloaded once; the rows for leaks and prompts are generated. FunctionGemma's
format, the default model's tokenizer, one thread.
"""

import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import wheels
from bench_spec import WORDS, rows
from portlab_spec.assets import default_model
from portlab_spec.conversation import Conversation, Message, Split
from portlab_spec.data.batching import buckets, group_by_prefix, padding, share_saved
from portlab_spec.data.bfcl import read_bfcl
from portlab_spec.data.leakage import find_leakage
from portlab_spec.data.rows import import_rows
from portlab_spec.data.tokens import Row, fit_rows, tokenize
from portlab_spec.errors import UserError
from portlab_spec.formats import find_format
from portlab_spec.tokenizer import Tokenizer
from result_file import write_result

BFCL = "bfcl-eval==2026.3.23"
FORMAT = find_format("functiongemma")
QUESTIONS, MAX_LENGTH, BATCH, BUCKETS = 20_000, 1024, 32, (1, 2, 4, 8)


def leaks() -> dict[str, Any]:
    """Seconds to find every pair of alike questions among 20,000, a tenth of them test, a tenth validation."""
    rng = random.Random(0)

    def words(count: int) -> str:
        return " ".join(rng.choices(WORDS, k=count))

    def number(top: int) -> int:
        return rng.randint(1, top)

    makers: dict[str, Callable[[], str]] = {
        "random words, 6 to 20": lambda: words(rng.randint(6, 20)),
        "one template with five slots": lambda: (
            f"Please plan {words(1)} and {words(1)} with {words(1)}, {number(9999)} minutes, on day {number(9999)}"
        ),
        "one template with one number": lambda: f"Please set my daily step goal to {number(10**6)} steps",
    }
    out = {}
    for name, make in makers.items():
        questions = [question(make(), n) for n in range(QUESTIONS)]
        start = time.perf_counter()
        found = find_leakage(questions)
        seconds = time.perf_counter() - start
        out[name] = {"seconds": seconds, "exact pairs": found.exact_pairs, "near pairs": found.near_pairs}
    return out


def question(text: str, number: int) -> Conversation:
    """A row that asks something, in the split of its number."""
    split: Split = {0: "test", 1: "validation"}.get(number % 10, "train")  # type: ignore[assignment]
    return Conversation(id=f"q{number}", split=split, messages=(Message(role="user", content=text),))


def bfcl(tokenizer: Tokenizer) -> dict[str, Any]:
    """Rows that the format can write, what each policy keeps of them, and what buckets save."""
    renderable = []
    for conversation in read_bfcl(wheels.wheel(BFCL)).conversations:
        try:
            if any(segment.loss for segment in FORMAT.render(conversation)):
                renderable.append(conversation)
        except UserError:
            continue
    lengths = [len(row.ids) for row in tokenize(renderable, FORMAT, tokenizer, 10**6)]
    dropped = {
        policy: len(fit_rows(renderable, FORMAT, tokenizer, MAX_LENGTH, policy).dropped)
        for policy in ("drop", "drop_turns", "drop_tools")
    }
    computed = {k: padding(lengths, buckets(lengths, k)) for k in BUCKETS}
    return {
        "rows": len(lengths),
        "shortest": min(lengths),
        "longest": max(lengths),
        "dropped at 1024": dropped,
        "padding": {k: found.waste for k, found in computed.items()},
        "fewer tokens": {k: computed[1].computed / found.computed for k, found in computed.items()},
    }


def prompts(tokenizer: Tokenizer) -> dict[str, Any]:
    """Shared tokens, and the share of all tokens that packing leaves out, with and without a date before the tools."""
    out = {}
    raw = rows(1_000)
    sets = [raw[n]["tools"] for n in range(3)]
    for name, dated in (("date first", True), ("no date", False)):
        for n, row in enumerate(raw):
            row["tools"] = sets[n % len(sets)]
            if not dated:
                row["messages"][0]["content"] = "Use these functions"
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            file.writelines(json.dumps(row) + "\n" for row in raw)
            file.flush()
            conversations = import_rows(file.name).conversations
        tokens = tokenize(conversations, FORMAT, tokenizer, 4096)
        together = group_by_prefix([one_key(row) for row in tokens], BATCH)
        apart = group_by_prefix(tokens, BATCH)
        for how, groups in (("one group", together), ("grouped by tools", apart)):
            out[f"{name}, {how}"] = {
                "groups": len(groups),
                "shared tokens": sorted({group.prefix for group in groups}),
                "not computed": share_saved(groups, BATCH),
            }
    return out


def one_key(row: Row) -> Row:
    """The row as one of a single group."""
    return Row(row.id, row.ids, row.loss, row.stratum, "all")


def table(title: str, lines: Sequence[Sequence[object]]) -> None:
    """Print rows of a Markdown table."""
    print(f"\n{title}")
    for line in lines:
        print("| " + " | ".join(map(str, line)) + " |")


def main() -> None:
    """Measure, print and write."""
    tokenizer = Tokenizer.load(default_model().path)
    figures = {"leaks": leaks(), "bfcl": bfcl(tokenizer), "prompts": prompts(tokenizer)}
    table("leaks", [(n, f"{f['seconds']:.1f}", f"{f['near pairs']:,}") for n, f in figures["leaks"].items()])
    found = figures["bfcl"]
    table("BFCL", [(key, found[key]) for key in ("rows", "shortest", "longest", "dropped at 1024")])
    table("buckets", [(k, f"{found['padding'][k]:.0%}", f"{found['fewer tokens'][k]:.1f}x") for k in BUCKETS])
    table("prompts", [(n, f["shared tokens"], f"{f['not computed']:.0%}") for n, f in figures["prompts"].items()])
    write_result("bench_data", ("portlab-spec", "numpy", "tokenizers"), figures, {}, data=BFCL)


if __name__ == "__main__":
    main()
