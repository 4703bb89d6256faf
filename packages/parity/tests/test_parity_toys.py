"""train-jax and plain transformers with PEFT agree on toys of every kind of layer."""

import jax
import numpy as np
import pytest
from parity_work import toy_work
from toy_gemmas import CASES

from portlab_hf import plain_script
from portlab_hf.evidence import collect
from portlab_jax.evidence import collect as collect_in_jax
from portlab_jax.evidence import watched
from portlab_jax.setup import initial_state, set_up
from portlab_jax.step import supervised_hidden
from portlab_parity.compare import TOLERANCES, compare
from portlab_spec.assets import ModelFolder
from portlab_spec.packing import pack_batch

pytestmark = pytest.mark.usefixtures("quick_compilation")

LONG = "gemma3, two kv heads"  # three steps and answers; the others take one step
# One of each family. Each compiles for half a minute; `nox -s parity` computes those of every kind.
QUICK = (LONG, "gemma4, shared keys and values")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in CASES]
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


def test_what_is_watched_is_what_training_computes(tmp_path):
    work = toy_work(tmp_path, LONG, steps=1, answers=False)
    setup = set_up(work.recipe, ModelFolder(work.model, "toy", None), work.token_ids)
    layout = setup.plan(work.steps).layout(0)
    options, micro = setup.for_layout(layout), jax.tree.map(lambda x: x[0], pack_batch(work.steps[0], layout))
    with jax.set_mesh(setup.mesh.mesh):
        adapter = initial_state(setup).adapter
        batch = setup.mesh.put_rows(micro, axis=0)
        seen = jax.jit(lambda a, f, b: watched(a, f, b, None, options, setup.config.stacks))(
            adapter, setup.frozen, batch
        )
        trained = jax.jit(lambda a, f, b: supervised_hidden(options.weights(a, f), b, options))(
            adapter, setup.frozen, batch
        )
    picked = np.take_along_axis(np.asarray(seen["hidden.final"]), np.asarray(micro.slots)[..., None], 1)
    held = np.asarray(micro.weights) > 0
    np.testing.assert_allclose(picked[held], np.asarray(trained)[held], rtol=1e-5, atol=1e-6)
