"""The example of docs/tools.md prints what the page says, and its table names every code."""

import contextlib
import io
import re
from pathlib import Path
from typing import get_args

from portlab_spec.tools.lint import Code

PAGE = (Path(__file__).parents[3] / "docs" / "tools.md").read_text(encoding="utf-8")


def test_the_example_prints_what_the_page_says():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (expected,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "docs/tools.md", "exec"), {"__name__": "docs_tools"})
    assert printed.getvalue() == expected


def test_the_table_names_every_code():
    documented = re.findall(r"^\| `([a-z-]+)` \|", PAGE, re.MULTILINE)
    assert sorted(documented) == sorted(get_args(Code))
