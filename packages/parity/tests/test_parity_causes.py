"""Every known cause is planted in a script of its own, and has to be found and named; what is not known is not."""

import numpy as np
import parity_faults
import pytest
from tiny_run import save_tokenizer
from toy_gemmas import CASES, randomize
from toy_rows import tool_rows

from portlab_hf import plain_script
from portlab_hf.evidence import collect
from portlab_parity.causes import CAUSES, explain
from portlab_parity.compare import compare
from portlab_parity.prepare import write
from portlab_spec.data.tokens import Row
from portlab_spec.recipe import Recipe

RECIPE = {
    "steps": 20,
    "batch_size": 4,
    "max_length": 64,
    "dtype": "float32",
    "lora": {"rank": 3, "alpha": 6.0, "targets": ["q_proj", "k_proj", "v_proj", "down_proj"]},
    "optimizer": {
        "learning_rate": 1e-2,
        "schedule": "cosine",
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "b2": 0.95,
        "clip_norm": 0.1,
    },
}


def some_rows():
    """Rows that begin with BOS, without which nothing can be doubled."""
    return [Row(row.id, (2, *row.ids), (False, *row.loss)) for row in tool_rows(12)]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder, rows = tmp_path_factory.mktemp("parity"), some_rows()
    randomize(CASES["gemma3, two kv heads"]()).save_pretrained(folder / "base")
    save_tokenizer(folder / "base")
    return write(
        Recipe.model_validate(RECIPE),
        folder / "base",
        [rows[i : i + 4] for i in range(0, 12, 4)],
        folder / "work",
        stops=(1,),
        new_tokens=4,
    )


@pytest.fixture(scope="module")
def right(work):
    return collect(work, plain_script, "right")


def test_the_same_script_agrees(work, right):
    found = compare(right, collect(work, plain_script, "again"))
    assert found.difference is None
    assert not any(found.errors.values())


def test_every_cause_is_planted():
    assert {cause.name for cause in CAUSES} == {name for _, name in parity_faults.SCRIPTS.values()}


@pytest.mark.parametrize("fault", parity_faults.SCRIPTS)
def test_the_cause_is_named(work, right, fault):
    make, name = parity_faults.SCRIPTS[fault]
    wrong = collect(work, make(), "wrong")
    for a, b in ((right, wrong), (wrong, right)):
        comparison = compare(a, b)
        finding, untested = explain(comparison, a, b)
        assert finding is not None, comparison.difference
        assert (finding.cause.name, finding.backend) == (name, "wrong"), finding
        assert not untested


def test_no_cause_is_made_up(work, right):
    wrong = collect(work, parity_faults.on_model(parity_faults.unknown), "wrong")
    comparison = compare(right, wrong)
    assert comparison.difference is not None
    assert comparison.difference.tensor == "hidden.layer.02"
    assert np.isfinite(comparison.difference.error)
    assert explain(comparison, right, wrong) == (None, "")
