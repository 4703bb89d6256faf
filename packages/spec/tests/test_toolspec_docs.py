"""docs/toolspec.md shows commands with their real output: each is run here, and must print what stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parents[3] / "docs" / "toolspec.md"
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)


def commands(text: str) -> list[tuple[str, str]]:
    """Each command of a document with the output that stands below it."""
    found = []
    for block in BLOCK.findall(text):
        parts = re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
        for part in parts:
            end = part.index("\nEND\n") + len("\nEND\n") if "<<'END'" in part.split("\n")[0] else part.index("\n") + 1
            found.append((part[:end].rstrip("\n"), part[end:].rstrip("\n")))
    return found


def run(command: str, folder: Path) -> str:
    shell = f'toolspec() {{ "{sys.executable}" -m portlab_spec.toolspec "$@"; }}\n{command}\n'
    env = os.environ | {"COLUMNS": "120", "TERM": "dumb"}
    done = subprocess.run(
        ["bash", "-c", shell],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return "\n".join(line.rstrip() for line in done.stdout.rstrip("\n").split("\n"))


@pytest.mark.real_model
def test_every_command_prints_what_the_document_shows(tmp_path: Path):
    pairs = commands(DOCUMENT.read_text(encoding="utf-8"))
    assert len(pairs) > 10
    for command, shown in pairs:
        assert run(command, tmp_path) == shown, command


def test_the_python_example_of_the_formats_prints_what_its_comment_says():
    page = (DOCUMENT.parent / "formats.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.strip() == code.strip().split("\n")[-1].rpartition("#")[2].strip()


if __name__ == "__main__":  # rewrite the document's outputs
    import tempfile

    text = DOCUMENT.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:

        def block(match: re.Match[str]) -> str:
            lines = []
            for command, _ in commands(match[0]):
                output = run(command, Path(folder))
                lines.append(f"$ {command}\n" + (f"{output}\n" if output else ""))
            return "```console\n" + "".join(lines) + "```"

        DOCUMENT.write_text(BLOCK.sub(block, text), encoding="utf-8")
