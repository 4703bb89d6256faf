"""Coverage-guided fuzzing of the native parsers.

    pip install atheris && python bench/fuzz_parsers.py -max_total_time=60

Bytes choose pieces of the grammar, so that libFuzzer mutates outputs rather than letters. Any exception, any stream
that ends unlike the whole, any lenient parse that contradicts the strict one and any partial call is a crash.
Arguments are libFuzzer's.
"""

import sys

import atheris

with atheris.instrument_imports(include=["portlab_spec.formats"]):
    from portlab_spec.formats import find_format
    from portlab_spec.formats.gemma4 import Gemma4

FORMATS = (find_format("functiongemma"), Gemma4(), Gemma4(in_thought=True))
FRAGMENTS = (
    "call:f", "call:", "call", ":f", "f(", ")", "{", "}", "[", "]", ":", ",", "=", "a:", "b:", "c=", "my-key:",
    "my key:", "1", "-2.5", "1e5", "007", "true", "null", "None", "word", "two words", " ", "\n", "thought\n", "\"",
    "'", "\"x\"", "'y'",
    "\\", '\\"', "é", "🦙", "<", "<|", "|>", "<esc", "\x00",
)  # fmt: skip


def output_of(data: bytes) -> tuple[int, str]:
    """(format, output) that the bytes spell."""
    if not data:
        return 0, ""
    index = data[0] % len(FORMATS)
    pieces = (*FORMATS[index].control_tokens, *FRAGMENTS)
    return index, "".join(pieces[b] if b < len(pieces) else chr(b) for b in data[1:])


def check(data: bytes) -> None:
    """One execution."""
    index, text = output_of(data)
    fmt = FORMATS[index]
    strict, lenient = fmt.parse_text(text), fmt.parse_text(text, lenient=True)
    assert strict.error or strict == lenient
    assert strict.names == lenient.names
    stream = fmt.stream(lenient=True)
    size = 1 + len(data) % 7
    for start in range(0, len(text), size):
        stream.feed(text[start : start + size])
    assert stream.close() == lenient
    part = fmt.parse_text(text[: len(text) * (data[-1] if data else 0) // 255], lenient=True)
    assert part.calls == lenient.calls[: len(part.calls)]


if __name__ == "__main__":
    atheris.Setup(sys.argv, check)
    atheris.Fuzz()
