"""train-jax and plain transformers with PEFT agree on toys of every kind of layer of Gemma 4."""

import os

os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # compiles in half the time

import pytest
from parity_work import toy_work
from toy_gemmas import CASES

from portlab_hf import plain_script
from portlab_hf.evidence import collect
from portlab_jax.evidence import collect as collect_in_jax
from portlab_parity.compare import TOLERANCES, compare

LONG = "gemma3, two kv heads"  # three steps and answers; the others take one step


# Each compiles for half a minute; `nox -s parity` computes those of every family.
QUICK = "gemma4, shared keys and values"


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case == QUICK else [pytest.mark.slow])
        for case in CASES
        if case.startswith("gemma4")
    ],
)
def test_both_agree(case, tmp_path):
    steps = 3 if case == LONG else 1
    work = toy_work(tmp_path, case, steps=steps, token_ids=(3, 5), answers=case == LONG)
    found = compare(collect(work, plain_script, "plain"), collect_in_jax(work))
    assert found.difference is None
    # Far from the bounds, which a fault would have to hide behind.
    inexact = {name: error for name, error in found.errors.items() if error}
    assert all(error < TOLERANCES[name].float32 / 4 for name, error in inexact.items()), inexact
    assert len(found.errors) == len(TOLERANCES) - (case != LONG)
