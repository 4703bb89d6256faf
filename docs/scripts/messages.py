"""docs/messages.md: every error message of Portlab with its remedy, read from the code that raises it.

python docs/scripts/messages.py > docs/messages.md
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
EXIT_CODES = {"UserError": 2, "CheckFailed": 1}
PROGRAMS = {
    "spec": "All programs: recipes, data, formats, models, prices",
    "train-jax": "`train-jax` and `plan-tpu`",
    "train-xla": "`train-xla`",
    "train-torchax": "`train-torchax`",
    "hf": "The PyTorch trainers",
    "merge-ckpt": "`merge-ckpt`",
    "serve": "`portlab-serve`",
    "coach": "`fitnesscoach`",
    "bench": "`portlab-bench`",
    "port": "`portlab-port`",
    "parity": "`portlab-parity`",
}
HEAD = """# Error messages

Every message of Portlab, read from the code that raises it, with what to do about it. A program prints one line,
`where: what. remedy`, and ends with the exit code: 2 for input that it cannot take, 1 for a check that failed. `…` is
what differs from case to case: search for the words around it. `--debug` shows where in the code it happened.
"""


class Message(NamedTuple):
    """One place that raises.

    Attributes:
        what: the sentence; "…" for what is only known when it is raised.
        fix: the remedy.
        code: exit code of the program.
    """

    what: str
    fix: str
    code: int


def messages(source: str) -> Iterator[Message]:
    """Those of a module, in the order of its lines."""
    calls = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in EXIT_CODES and node.args
    ]
    for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        assert isinstance(call.func, ast.Name)
        fix = next((_text(keyword.value) for keyword in call.keywords if keyword.arg == "fix"), "")
        yield Message(_text(call.args[0]), fix, EXIT_CODES[call.func.id])


def _text(node: ast.expr) -> str:
    """What an expression will say, as far as the code alone tells."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_text(part) for part in parts)
        case ast.IfExp(body=one, orelse=other):
            return f"{_text(one)} / {_text(other)}"
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return _text(left) + _text(right)
    return "…"


def page() -> str:
    """The page, Markdown."""
    lines = [HEAD]
    for package, title in PROGRAMS.items():
        lines.append(f"## {title}\n")
        for path in sorted((ROOT / "packages" / package / "src").rglob("*.py")):
            source = path.read_text()
            found = [m for m in messages(source) if m.what.strip("… ") or m.fix.strip("… ")]
            if not found:
                continue
            about = (ast.get_docstring(ast.parse(source)) or path.stem).splitlines()[0].split(":", 1)[0].rstrip(".")
            lines += [f"### {about}\n", "| message | remedy | exit code |", "|---|---|---|"]
            lines += [f"| {_cell(m.what)} | {_cell(m.fix)} | {m.code} |" for m in dict.fromkeys(found)]
            lines.append("")
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Text that Markdown and HTML leave as it is; what stands in backticks they leave so by themselves."""
    plain_and_code = " ".join(text.split()).replace("|", "\\|").split("`")
    for i in range(0, len(plain_and_code), 2):
        plain_and_code[i] = re.sub(r"[\\<>*\[\]](?!\|)|\b_|_\b", r"\\\g<0>", plain_and_code[i])
    return "`".join(plain_and_code)


if __name__ == "__main__":
    sys.stdout.write(page())
