"""Outputs of about n characters that invite a parser to do the same work again and again."""

from collections.abc import Callable

from portlab_spec.formats.markers import Markers

# {c} opens a call, {e} ends it, {q} delimits a string, {r} stops the output, {short} lacks one character of a marker.
HOSTILE: dict[str, Callable[[int], str]] = {
    "brackets": lambda n: "{c}call:f{{a:" + "[" * n + "{e}",
    "braces": lambda n: "{c}call:f" + "{{" * n + "{e}",
    "braces closed": lambda n: "{c}call:f{{a:" + "{{a:" * (n // 4) + "}}" * (n // 4) + "}}{e}",
    "quotes": lambda n: '{c}call:f{{a:"' + '\\"' * (n // 2) + "}}{e}",
    "quotes in pairs": lambda n: "{c}call:f{{" + '"' * n + "}}{e}",
    "apostrophes": lambda n: "{c}call:f{{a:" + "'\\" * (n // 2) + "}}{e}",
    "delimiters": lambda n: "{c}call:f{{a:" + "{q}" * (n // 6) + "}}{e}",
    "delimiters outside": lambda n: "{q}" * (n // 6),
    "less-than": lambda n: "<" * n,
    "almost a marker": lambda n: "{short}" * (n // 12),
    "almost a marker in a call": lambda n: "{c}call:f{{a:{q}" + "{short}" * (n // 12) + "{q}}}{e}",
    "calls in text": lambda n: "call:" * (n // 5),
    "long name in text": lambda n: "call:" + "a" * n,
    "long name": lambda n: "{c}call:" + "a" * n + "{e}",
    "words in the name": lambda n: "{c}" + "call " * (n // 5) + "{e}",
    "spaces": lambda n: "{c}call:f{{a:" + " " * n + "b}}{e}",
    "spaces in a key": lambda n: "{c}call:f{{a" + " " * n + "<:1}}{e}",
    "spaces outside": lambda n: " " * n + "{c}",
    "keys": lambda n: "{c}call:f{{" + "a:" * (n // 2) + "}}{e}",
    "many keys": lambda n: "{c}call:f{{" + ",".join(f"k{i}:{i}" for i in range(n // 14)) + "}}{e}{r}",
    "equals signs": lambda n: "{c}call:f{{" + ",".join(f"k{i}={i}" for i in range(n // 14)) + "}}{e}",
    "equals signs alone": lambda n: "{c}call:f{{" + "=" * n + "}}{e}",
    "parentheses": lambda n: "{c}call:f(" + ")" * n + "{e}",
    "digits": lambda n: "{c}call:f{{a:" + "1" * n + "}}{e}",
    "commas": lambda n: "{c}call:f{{a:[" + "," * n + "]}}{e}",
    "calls": lambda n: "{c}call:f{{}}{e}" * (n // 30),
    "call markers": lambda n: "{c}" * (n // 12),
    "call markers with bodies": lambda n: "{c}call:f{{a:1}}" * (n // 24),
    "thinking": lambda n: "<|channel>" + "thought\n" * (n // 8),
    "channels": lambda n: "<|channel>thought\n\n<channel|>" * (n // 28),
    "a channel's name": lambda n: "<|channel>" + "x" * n,
    "stops": lambda n: "{r}" * (n // 16),
    "a long string": lambda n: "{c}call:f{{a:{q}" + "x" * n + "{q}}}{e}{r}",
    "a long answer": lambda n: "x " * (n // 2),
}


def hostile(name: str, markers: Markers, n: int) -> str:
    """One of the outputs in a dialect."""
    m = markers
    return HOSTILE[name](n).format(c=m.call, e=m.end_call, q=m.quote, r=m.response, short=m.end_call[:-1])
