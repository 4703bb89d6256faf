"""Loading a base: every published layout of its files, nothing silently left out, nothing read that is not needed."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eight_devices import on_eight_devices, run_on_eight_devices
from safetensors.numpy import load_file, save_file

from portlab_jax.mesh import MeshPlan
from portlab_jax.weights import abstract_params, load_params, random_params, survey
from portlab_spec.errors import UserError
from portlab_spec.models import PREFIXES, GemmaConfig
from portlab_spec.recipe import Mesh
from portlab_spec.safetensors_file import TensorView

F32 = jnp.dtype(jnp.float32)


@pytest.fixture
def folder(tiny_one, tmp_path):
    """A copy of a model folder to be changed."""
    return shutil.copytree(tiny_one.folder, tmp_path / "model")


def rewrite(folder, change):
    """Put what `change` makes of a folder's tensors in their place."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(change(tensors), path, metadata={"format": "pt"})


def load(folder, mesh, dtype=F32):
    return load_params(folder, GemmaConfig.load(folder), dtype, mesh)


def assert_equal(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, x), y in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(x, y, err_msg=jax.tree_util.keystr(path))


# --- layouts


@pytest.mark.parametrize("prefix", PREFIXES)
def test_every_prefix_is_found(tiny_one, folder, prefix):
    rewrite(folder, lambda tensors: {prefix + name.removeprefix("model."): t for name, t in tensors.items()})
    params, report = load(folder, tiny_one.mesh)
    assert report.prefix == prefix
    assert_equal(params, tiny_one.params)


def test_an_unknown_prefix_is_named(tiny_one, folder):
    rewrite(folder, lambda tensors: {f"transformer.{name}": t for name, t in tensors.items()})
    with pytest.raises(UserError, match=r"no tensor embed_tokens\.weight"):
        survey(folder, tiny_one.config)


def test_a_multimodal_model_gives_its_text_model_and_says_what_it_leaves_out(tiny_one, folder):
    raw = {"model_type": "gemma3", "text_config": json.loads((folder / "config.json").read_text())}
    (folder / "config.json").write_text(json.dumps(raw))
    vision = {f"model.vision_tower.layers.{i}.weight": np.zeros((2, 2), np.float32) for i in range(3)}
    vision["model.multi_modal_projector.weight"] = np.zeros((2, 2), np.float32)
    rewrite(
        folder,
        lambda tensors: {f"model.language_model.{n.removeprefix('model.')}": t for n, t in tensors.items()} | vision,
    )
    params, report = load(folder, tiny_one.mesh)
    assert report.unmapped == {"multi_modal_projector": 1, "vision_tower": 3}
    assert "left out: 1 multi_modal_projector, 3 vision_tower" in report.describe()
    assert_equal(params, tiny_one.params)


def test_shards_are_read_through_the_index(tiny_one, folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    params, _ = load(folder, tiny_one.mesh)
    assert_equal(params, tiny_one.params)


def test_stored_types_may_differ_from_the_wanted_one(tiny_one, folder):
    half = "model.layers.1.mlp.up_proj.weight"
    rewrite(folder, lambda tensors: tensors | {half: tensors[half].astype(np.float16)})
    params, _ = load(folder, tiny_one.mesh, jnp.dtype(jnp.bfloat16))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    expected = load_file(folder / "model.safetensors")[half].astype(jnp.bfloat16)
    np.testing.assert_array_equal(params["layers"]["full"]["mlp.up_proj"][0], expected)


# --- what does not belong together


def test_a_missing_tensor_is_named(tiny_one, folder):
    name = "model.layers.2.self_attn.k_norm.weight"
    rewrite(folder, lambda tensors: {n: t for n, t in tensors.items() if n != name})
    with pytest.raises(UserError, match=f"the tensor {name} is missing"):
        survey(folder, tiny_one.config)


def test_a_wrong_shape_is_named_with_both_shapes(tiny_one, folder):
    name = "model.layers.0.mlp.down_proj.weight"
    rewrite(folder, lambda tensors: tensors | {name: tensors[name].T.copy()})
    with pytest.raises(UserError, match=r"down_proj.weight has shape \(64, 32\), config.json says \(32, 64\)"):
        survey(folder, tiny_one.config)


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.9.mlp.up_proj.weight", "model.layers.x"]
)
def test_a_tensor_that_the_model_would_not_use_is_refused(tiny_one, folder, name):
    rewrite(folder, lambda tensors: tensors | {name: np.zeros(4, np.float32)})
    with pytest.raises(UserError, match=f"the tensor {name} has no place in this model"):
        survey(folder, tiny_one.config)


@pytest.mark.parametrize("shipped", [True, False])
def test_keys_and_values_that_a_layer_shares_may_be_shipped_or_not(tiny_model, tmp_path, shipped):
    """transformers writes none; some releases hold them."""
    tiny = tiny_model("gemma4, shared keys and values")
    folder = shutil.copytree(tiny.folder, tmp_path / "model")
    spare = [f"model.layers.{i}.self_attn.{name}.weight" for i in (3, 4, 5) for name in ("k_proj", "v_proj", "k_norm")]
    rest = {n: t for n, t in load_file(folder / "model.safetensors").items() if n not in spare}
    if shipped:
        rest |= {name: np.zeros((4, 4), np.float32) for name in spare}
    save_file(rest, folder / "model.safetensors", metadata={"format": "pt"})
    params, report = load(folder, tiny.mesh)
    assert report.unmapped == ({"keys and values of layers that share them": 9} if shipped else {})
    assert_equal(params, tiny.params)


# --- without weights


def test_abstract_and_random_weights_have_the_shapes_of_real_ones(tiny):
    abstract = abstract_params(tiny.config, F32, tiny.mesh)
    with jax.set_mesh(tiny.mesh.mesh):
        drawn = random_params(tiny.config, F32, tiny.mesh, jax.random.key(0))
    for like in (abstract, drawn):
        assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), like) == jax.tree.map(
            lambda x: (x.shape, x.dtype, x.sharding), tiny.params
        )
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(drawn))


# --- on several devices


class Counting:
    """A memory-mapped tensor that counts what is taken out of it."""

    def __init__(self, array, taken):
        self.array, self.taken = array, taken

    def __getitem__(self, index):
        part = self.array[index]
        self.taken.append(part.nbytes)
        return part


@on_eight_devices
@pytest.mark.parametrize("sizes", [(1, 8, 1), (2, 2, 2), (1, 1, 8)], ids=str)
@pytest.mark.parametrize("case", ["gemma4, keys are values", "gemma4, experts"])
def test_mesh_parts_hold_their_slice_and_read_no_more(tiny_model, monkeypatch, case, sizes):
    tiny = tiny_model(case)
    data, fsdp, tp = sizes
    mesh = MeshPlan.create(Mesh(data=data, fsdp=fsdp, tp=tp))
    taken = []
    numpy = TensorView.numpy
    monkeypatch.setattr(TensorView, "numpy", lambda view: Counting(numpy(view), taken))
    params, _ = load(tiny.folder, mesh)
    assert_equal(params, tiny.params)
    # A slice that several devices hold is read for each of them at most once.
    on_devices = sum(shard.data.nbytes for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards)
    assert sum(taken) <= on_devices
    largest = max(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(params))
    assert max(taken) <= largest


def test_on_eight_devices():
    assert "6 passed" in run_on_eight_devices(__file__, "-k", "test_mesh")
