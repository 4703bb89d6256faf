"""The example of docs/metrics.md prints what the page says."""

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_the_example_prints_what_the_page_says():
    page = PAGE.read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[-1]
    printed = re.findall(r"```text\n(.*?)```", page, re.DOTALL)[-1]
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == printed
