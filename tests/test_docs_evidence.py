"""What docs/porting.md says is held by tests, and those that it names exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/porting.md").read_text()


def test_every_test_that_is_named_exists():
    files = [*ROOT.glob("packages/*/tests/**/test_*.py"), *ROOT.glob("tests/test_*.py")]
    known = {
        name for file in files for name in re.findall(r"^\s*(?:async )?def (test_\w+)", file.read_text(), re.MULTILINE)
    }
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) > 30
    assert named - known == set()


def test_every_line_of_the_tables_names_one():
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| on a GPU")]
    assert len(rows) > 15
    assert [row for row in rows if "`test_" not in row.rsplit(" | ", 1)[1]] == []
