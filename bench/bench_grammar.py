"""What constrained decoding costs: compiling a grammar, and the mask of each token.

    nox -s bench_grammar       writes bench/results/bench_grammar.json

For every format, the tools of fitness-213 (7, without arguments) and of fitness-plus (28, with all kinds). Masks are
those of 200 test rows of the set, decoded token by token as a server would: compute the mask, take the row's token.
One thread; Gemma's vocabulary of 262,144 tokens.
"""

import statistics
import time
from typing import Any

from portlab_spec.assets import default_model
from portlab_spec.data import fitness, fitness_plus, load_dataset
from portlab_spec.formats import Format, encode, find_format
from portlab_spec.formats.gemma4 import Gemma4
from portlab_spec.formats.grammar import compile_grammar, constraint_tokenizer, lark_grammar
from portlab_spec.tokenizer import GEMMA4_TOKENS, Tokenizer
from result_file import write_result

FORMATS = ("functiongemma", "gemma4", "gemma3-json", "gemma3-python")
SETS = {"fitness-213": fitness.tools(), "fitness-plus": fitness_plus.tools()}
ROWS, COMPILES = 200, 9


def measure(fmt: Format, name: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """Milliseconds to compile, microseconds for each mask."""
    grammar, constraint = lark_grammar(SETS[name], fmt), constraint_tokenizer(tokenizer)
    compiles = []
    for _ in range(COMPILES):
        start = time.perf_counter()
        compile_grammar(grammar, constraint)
        compiles.append(time.perf_counter() - start)
    masks: list[float] = []
    asked = [row for row in load_dataset(name) if row.split == "test" and row.messages[-2].role == "user"]
    for row in asked[:ROWS]:
        turn = row.model_copy(update={"messages": row.messages[-2:]})  # its last question and the answer
        encoded = encode(fmt.render(turn), tokenizer)
        answer = [i for i, learnt in zip(encoded.ids, encoded.loss, strict=True) if learnt]
        matcher = compile_grammar(grammar, constraint)
        for token in answer:
            start = time.perf_counter()
            matcher.compute_bitmask()
            masks.append(time.perf_counter() - start)
            if not matcher.consume_token(token):
                raise SystemExit(f"bench_grammar: {fmt.name} does not admit {row.id}")
    return {
        "tools": len(SETS[name]),
        "grammar_characters": len(grammar),
        "compile_ms": 1e3 * statistics.median(compiles),
        "masks": len(masks),
        "mask_us_median": 1e6 * statistics.median(masks),
        "mask_us_mean": 1e6 * statistics.mean(masks),
        "mask_us_p99": 1e6 * statistics.quantiles(masks, n=100)[98],
        "mask_us_max": 1e6 * max(masks),
    }


def main() -> None:
    """Measure every format with both sets of tools."""
    own = Tokenizer.load(default_model().path)
    renamed = own.renamed(GEMMA4_TOKENS)
    figures = {}
    print("| format | tools | compile, ms | mask, median µs | mean | 99 % | worst |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for fmt in map(find_format, FORMATS):
        for name in SETS:
            f = figures[f"{fmt.name}, {name}"] = measure(fmt, name, renamed if isinstance(fmt, Gemma4) else own)
            cells = (f["compile_ms"], f["mask_us_median"], f["mask_us_mean"], f["mask_us_p99"], f["mask_us_max"])
            print(
                f"| {fmt.name} | {f['tools']} | {cells[0]:.1f} | " + " | ".join(f"{c:,.0f}" for c in cells[1:]) + " |"
            )
    write_result("bench_grammar", ("portlab-spec", "llguidance", "tokenizers"), figures, {})


if __name__ == "__main__":
    main()
