"""8 devices compute what one does, each with its own part of weights, adapter and optimiser state."""

import jax
import numpy as np
import pytest
from eight_devices import on_eight_devices, run_on_eight_devices
from jax.sharding import PartitionSpec as P

from portlab_spec.packing import pack_batch
from portlab_torchax.setup import initial_state, jit_step

STEPS = 5
MESHES = [(8, 1, 1), (1, 4, 2), (2, 2, 2)]
BASE = "base_model.model.model."


def name_of(sizes):
    return "x".join(map(str, sizes))


@pytest.fixture(scope="module")
def trained(toy, make_rows):
    """5 steps on a mesh, made once: the setup, the last state, losses and gradient norms, the jitted step."""
    made = {}

    def get(sizes, case="gemma3, two kv heads", **changes):
        key = sizes, case, str(changes)
        if key not in made:
            mesh = dict(zip(("data", "fsdp", "tp"), sizes, strict=True))
            setup = toy(case, mesh=mesh, batch_size=8, **changes)
            batches = [make_rows(8, seed=seed) for seed in range(STEPS)]
            plan = setup.plan(batches, accumulate=setup.recipe.accumulate)
            state, found = initial_state(setup), []
            step = jit_step(setup, state, plan.layouts[0])
            for rows in batches:
                batch = setup.placement.put_rows(pack_batch(rows, plan.layouts[0]), axis=1)
                state, metrics = step(state, setup.frozen, batch)
                found.append((float(metrics.loss), float(metrics.grad_norm)))
            made[key] = setup, state, np.array(found), step
        return made[key]

    return get


@pytest.fixture(scope="module")
def on_one_device(trained):
    """The same on the first of the devices."""

    def get(*args, **changes):
        with pytest.MonkeyPatch.context() as patch:
            first = jax.devices()[:1]
            patch.setattr(jax, "devices", lambda *_: first)
            return trained((1, 1, 1), *args, **changes)[2]

    return get


@on_eight_devices
@pytest.mark.parametrize("sizes", MESHES, ids=name_of)
def test_the_curve_of_one_device(sizes, trained, on_one_device):
    np.testing.assert_allclose(trained(sizes)[2], on_one_device(), rtol=1e-4)


@on_eight_devices
@pytest.mark.parametrize("case", ["gemma4, experts", "gemma4, shared keys and values"])
def test_the_curve_of_one_device_for_every_kind_of_layer(case, trained, on_one_device):
    np.testing.assert_allclose(trained((2, 2, 2), case)[2], on_one_device(case), rtol=1e-4)


@on_eight_devices
@pytest.mark.parametrize("changes", [{"method": "full"}, {"remat": "block", "accumulate": 2}], ids=["full", "block"])
def test_the_curve_of_one_device_however_it_trains(changes, trained, on_one_device):
    found, expected = trained((2, 2, 2), "llama", **changes)[2], on_one_device("llama", **changes)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@on_eight_devices
@pytest.mark.parametrize("sizes", MESHES, ids=name_of)
def test_one_compilation(sizes, trained):
    assert trained(sizes)[3]._cache_size() == 1


@on_eight_devices
def test_weights_are_cut_as_the_table_says(trained):
    setup = trained((2, 2, 2))[0]
    layer = f"{BASE}layers.0."
    cuts = {
        f"{layer}self_attn.q_proj.base_layer.weight": (P("tp", "fsdp"), 4),
        f"{layer}self_attn.o_proj.base_layer.weight": (P("fsdp", "tp"), 4),
        f"{layer}mlp.down_proj.base_layer.weight": (P("fsdp", "tp"), 4),
        f"{BASE}embed_tokens.token_adapter.base_layer.weight": (P("tp", "fsdp"), 4),
    }
    for name, (spec, parts) in cuts.items():
        value = setup.frozen[name]
        assert value.sharding.spec == spec, name
        assert {shard.data.size * parts for shard in value.addressable_shards} == {value.size}, name


@on_eight_devices
@pytest.mark.parametrize(
    ("changes", "moments_of_a_leaf"), [({}, 2), ({"optimizer": {"name": "adafactor"}}, 1)], ids=["adamw", "adafactor"]
)
def test_adapter_and_optimiser_state_stay_cut_as_their_weights(changes, moments_of_a_leaf, trained):
    setup, state, *_ = trained((2, 2, 2), **changes)
    layer = f"{BASE}layers.0."
    assert state.trained[f"{layer}self_attn.q_proj.lora_A.default.weight"].sharding.spec == P(None, "fsdp")
    assert state.trained[f"{layer}self_attn.q_proj.lora_B.default.weight"].sharding.spec == P("tp", None)
    assert state.trained[f"{layer}mlp.down_proj.lora_A.default.weight"].sharding.spec == P(None, "tp")
    for name, value in state.trained.items():
        assert value.sharding.spec == P(*setup.specs[name]), name
    moments = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt):
        name = path[-1].key if isinstance(path[-1], jax.tree_util.DictKey) else None
        if name and leaf.shape == state.trained[name].shape:
            moments += 1
            assert leaf.sharding.is_equivalent_to(state.trained[name].sharding, leaf.ndim), name
        else:
            assert leaf.sharding.is_fully_replicated
    assert moments == len(state.trained) * moments_of_a_leaf


def test_on_eight_devices():
    assert "passed" in run_on_eight_devices(__file__)
