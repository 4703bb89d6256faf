"""QLoRA: linear weights in few bits train as their dequantised values would, in a fraction of the memory."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eight_devices import on_eight_devices, run_on_eight_devices

from portlab_jax.lora import AdapterOptions, adapter_shardings, init_adapter
from portlab_jax.mesh import MeshPlan
from portlab_jax.quantize import gathered, quantize, require_qwix
from portlab_jax.step import StepOptions, gradients
from portlab_jax.weights import load_params
from portlab_spec.errors import UserError
from portlab_spec.models import param_table, plan_adapter
from portlab_spec.recipe import Lora, Mesh

pytest.importorskip("qwix")

F32 = jnp.dtype(jnp.float32)


@pytest.fixture
def one_device():
    return MeshPlan.create(Mesh(data=1, fsdp=1, tp=1), jax.devices()[:1])


@pytest.fixture
def stack(rng, one_device):
    """Normal weights (2, 96, 256)."""
    return jax.device_put(jnp.array(rng.normal(size=(2, 96, 256)), F32), one_device.sharding((), lead=3))


def whole(weight, mesh):
    """A stack back in float32."""
    with jax.set_mesh(mesh.mesh):
        rows = [gathered(jax.tree.map(lambda leaf, i=i: leaf[i], weight), dtype=F32) for i in range(len(weight.qvalue))]
        return jnp.stack(rows)


@pytest.mark.parametrize(("kind", "rms", "worst"), [("int8", 0.008, 0.5 / 127.5), ("nf4", 0.10, 0.152)])
def test_the_error_is_that_of_the_type(stack, one_device, kind, rms, worst):
    """At worst half of the widest gap between two values, times the largest weight of the tile, and rounding."""
    error = np.abs(np.asarray(whole(quantize(stack, kind), one_device)) - np.asarray(stack))
    tile = {"int8": 128, "nf4": 64}[kind]
    largest = np.abs(np.asarray(stack)).reshape(2, 96, -1, tile).max(-1, keepdims=True)
    assert np.sqrt(np.mean(error**2)) < rms
    assert (error.reshape(2, 96, -1, tile) <= worst * largest * (1 + 1e-4)).all()


@pytest.mark.parametrize(("kind", "bytes_per_weight"), [("int8", 1 + 4 / 128), ("nf4", 0.5 + 4 / 64)])
def test_the_memory_is_that_of_the_type(stack, one_device, kind, bytes_per_weight):
    small = quantize(stack, kind)
    with jax.set_mesh(one_device.mesh):
        compiled = jax.jit(lambda weight: jax.tree.map(lambda leaf: leaf[0], weight)).lower(small).compile()
    held = compiled.memory_analysis().argument_size_in_bytes
    assert held == pytest.approx(stack.size * bytes_per_weight, rel=0.01)


def check_step(tiny, mesh, kind, make_rows, packed):
    """Loss and gradients from quantised weights equal those from their dequantised values."""
    small, _ = load_params(tiny.folder, tiny.config, F32, mesh, kind=kind)
    targets = [*Lora().targets, *(["experts.gate_up_proj", "experts.down_proj"] if tiny.config.experts else [])]
    leaves = plan_adapter(tiny.config, Lora(rank=4, targets=targets))
    layers = {}
    for param in param_table(tiny.config):
        if param.stack:
            weight = small["layers"][param.stack][param.name]
            assert isinstance(weight, jax.Array) != param.target, param.key
            place = layers.setdefault(param.stack, {})
            place[param.name] = weight
            if param.target:
                assert weight.qvalue.sharding.is_equivalent_to(mesh.sharding(param.dims, lead=1), weight.ndim)
                place[param.name] = jax.device_put(whole(weight, mesh), mesh.sharding(param.dims, lead=1))
    large = small | {"layers": layers}

    batch, chunk = packed(make_rows(n=8), tiny.config, groups=mesh.groups)
    with jax.set_mesh(mesh.mesh):
        adapter = jax.tree.map(lambda leaf: np.asarray(leaf) + 0.02, init_adapter(leaves, jax.random.key(0)))
        adapter = jax.device_put(adapter, adapter_shardings(leaves, mesh))
        batch = mesh.put_rows(batch, axis=1)
        step = jax.jit(gradients, static_argnames=("options", "chunk"))
        options = StepOptions(tiny.config, AdapterOptions(leaves))
        (sums, _, grads), (expected, _, expected_grads) = (
            jax.device_get(step(adapter, params, batch, options=options, chunk=chunk)) for params in (small, large)
        )
    assert sums.loss == pytest.approx(expected.loss, rel=1e-6)
    for (path, x), y in zip(jax.tree.leaves_with_path(grads), jax.tree.leaves(expected_grads), strict=True):
        assert np.linalg.norm(x - y) <= 1e-5 * np.linalg.norm(y), jax.tree_util.keystr(path)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_step_is_that_of_the_dequantised_weights(tiny_one, one_device, kind, make_rows, packed):
    check_step(tiny_one, one_device, kind, make_rows, packed)


@on_eight_devices
def test_mesh_parts_quantise_what_they_hold(tiny_model, make_rows, packed):
    mesh = MeshPlan.create(Mesh(data=2, fsdp=2, tp=2))
    check_step(tiny_model("gemma4, experts"), mesh, "nf4", make_rows, packed)


def test_qwix_is_asked_for_by_name(tiny_one, one_device, monkeypatch):
    monkeypatch.setitem(sys.modules, "qwix", None)
    with pytest.raises(UserError, match=r"lora.quantize: .* not installed. pip install 'portlab-train-jax\[qlora\]'"):
        require_qwix()
    with pytest.raises(UserError, match="need qwix"):
        load_params(tiny_one.folder, tiny_one.config, F32, one_device, kind="nf4")


def test_on_eight_devices():
    assert "1 passed" in run_on_eight_devices(__file__, "-k", "test_mesh")
