"""docs/parity.md: its tables are the code's, and its examples what the tool says."""

import re
from pathlib import Path

import parity_faults
import parity_tables

from portlab_hf.evidence import collect, load_script
from portlab_parity.causes import explain
from portlab_parity.compare import compare
from portlab_parity.report import describe

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/parity.md").read_text()


def block(name):
    """What stands behind a marker, up to the next empty line."""
    return PAGE.partition(f"<!-- {name} -->\n\n")[2].partition("\n\n")[0]


def without_numbers(text):
    return re.sub(r"[-\d.,e+%]*\d[\d.,e+%-]*", "#", re.sub(r" {2,}", " ", text))


def test_tables_are_the_codes():
    assert block("tolerances") == parity_tables.tolerances()
    assert block("causes") == parity_tables.causes()


def test_agreement_is_what_the_tool_says(work, plain):
    other = collect(work, load_script(ROOT / "packages/parity/examples/trl_script.py"), "trl_script")
    comparison = compare(plain, other)
    said = describe(comparison, *explain(comparison, plain, other))
    assert without_numbers(f"```text\n{said}\n```") == without_numbers(block("agreement"))


def test_difference_is_what_the_tool_says(work, plain):
    mine = collect(work, parity_faults.on_model(parity_faults.one_rope), "mine")
    comparison = compare(plain, mine)
    said = describe(comparison, *explain(comparison, plain, mine))
    assert without_numbers(f"```text\n{said}\n```") == without_numbers(block("difference"))
