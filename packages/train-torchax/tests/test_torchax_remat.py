"""What is computed again in the backward pass changes neither losses nor gradients, and is not stored."""

import jax
import numpy as np
import pytest
from toy_gemmas import gemma3, randomize

from portlab_spec.assets import ModelFolder
from portlab_spec.packing import pack_batch
from portlab_spec.recipe import Recipe
from portlab_torchax.setup import set_up

SHARED = "gemma4, shared keys and values"


@pytest.fixture(scope="module")
def computed(toy, make_rows, gradients):
    """Mean loss and gradients of a toy with a policy, made once."""
    made = {}

    def get(case, remat, **lora):
        key = case, remat, str(lora)
        if key not in made:
            sums, total, grads = gradients(toy(case, remat=remat, lora=lora), make_rows())
            made[key] = float(sums.loss / total), grads
        return made[key]

    return get


def assert_same(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert found[1].keys() == expected[1].keys()
    for name, grad in found[1].items():
        scale = float(abs(expected[1][name]).max())
        assert scale > 0, name
        np.testing.assert_allclose(grad, expected[1][name], rtol=0, atol=1e-5 * scale, err_msg=name)


@pytest.mark.parametrize("remat", ["dots", "block", "offload"])
def test_the_same_gradients(remat, computed):
    assert_same(computed("qwen3", remat), computed("qwen3", "none"))


@pytest.mark.parametrize("remat", ["dots", "block"])
def test_the_same_gradients_where_layers_read_keys_and_values_of_others(remat, computed):
    """Adapters of the layers that are read get the readers' gradients too: those of `none` are PyTorch's, see
    test_torchax_curves."""
    assert_same(computed(SHARED, remat), computed(SHARED, "none"))


def test_dropout_draws_again_what_it_drew(computed):
    assert_same(computed("qwen3", "block", dropout=0.3), computed("qwen3", "none", dropout=0.3))
    assert computed("qwen3", "none", dropout=0.3)[0] != computed("qwen3", "none")[0]


@pytest.fixture(scope="module")
def temporaries(tmp_path_factory, make_rows):
    """Bytes that the gradients of a taller model need beside arguments and results."""
    folder = tmp_path_factory.mktemp("tall")
    randomize(gemma3(layers=8, intermediate_size=256)).save_pretrained(folder)
    rows = make_rows(8)

    def get(remat):
        lora = {"rank": 4, "targets": ("q_proj", "down_proj")}
        recipe = Recipe.model_validate({"dtype": "float32", "max_length": 64, "remat": remat, "lora": lora})
        setup = set_up(recipe, ModelFolder(folder, "tall", None), ())
        layout = setup.plan([rows]).layouts[0]
        batch = pack_batch(rows, layout)

        def grads(trained, frozen, batch, key):
            return setup.program.gradients(trained, frozen, batch, layout.chunk, key)[2]

        program = jax.jit(grads).lower(setup.start, setup.frozen, batch, jax.random.key(0)).compile()
        return program.memory_analysis().temp_size_in_bytes

    return get


def test_less_is_stored(temporaries):
    none, dots, block = map(temporaries, ("none", "dots", "block"))
    assert dots < 0.5 * none
    assert block < 0.25 * none
