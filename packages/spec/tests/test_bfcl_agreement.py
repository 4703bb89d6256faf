"""`args_ast` against BFCL's own AST checker, run from the wheel that PORTLAB_BFCL_WHEEL names.

bench/bfcl_agreement.py does the same over every row and writes the counts down.
"""

import os
from pathlib import Path

import pytest

WHEEL = os.environ.get("PORTLAB_BFCL_WHEEL")
BENCH = Path(__file__).parents[3] / "bench"


@pytest.mark.skipif(not WHEEL, reason="PORTLAB_BFCL_WHEEL does not name a bfcl-eval wheel")
def test_every_verdict_on_right_and_mutated_answers_agrees(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import bfcl_agreement

    tallies, _ = bfcl_agreement.agreement(Path(str(WHEEL)), every=5)
    assert {category: dict(tally.differ) for category, tally in tallies.items() if tally.differ} == {}
    assert sum(tally.agree.total() for tally in tallies.values()) > 30_000
    assert all(tally.right for tally in tallies.values())
