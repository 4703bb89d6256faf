"""Verification finds what is wrong on disk and names it."""

import json
import shutil

import numpy as np
import pytest

from portlab_merge.overlay import MergeOptions, merge
from portlab_merge.peft_adapter import export_adapter
from portlab_merge.verify import verify_adapter, verify_merged
from portlab_spec.errors import CheckFailed
from portlab_spec.files import sha256_file
from portlab_spec.safetensors_header import DTYPES, encode_header, lay_out, read_header


@pytest.fixture
def merged(run, tmp_path):
    merge(run.plan(), tmp_path / "merged", MergeOptions())
    return tmp_path / "merged"


@pytest.fixture
def rewrite():
    """Change the bytes of one tensor and make the manifest agree, as a wrong merge would."""

    def change(folder, name, edit, weights="model.safetensors"):
        header = read_header(folder / weights)
        tensor = next(t for t in header.tensors if t.name == name)
        with (folder / weights).open("r+b") as file:
            file.seek(header.data_start + tensor.start)
            values = np.frombuffer(file.read(tensor.nbytes), np.uint16 if tensor.dtype == "BF16" else np.float32).copy()
            file.seek(header.data_start + tensor.start)
            file.write(edit(values.reshape(tensor.shape)).tobytes())
        if (folder / "merge_manifest.json").exists():
            manifest = json.loads((folder / "merge_manifest.json").read_text())
            manifest["files_sha256"][weights] = sha256_file(folder / weights)
            (folder / "merge_manifest.json").write_text(json.dumps(manifest))

    return change


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("options", [{}, {"dtype": "float32"}, {"dtype": "bfloat16"}, {"scale": -0.3}])
def test_a_merge_is_verified(make_base, make_run, tmp_path, dtype, options):
    run = make_run(make_base(dtype))
    merge(run.plan(), tmp_path / "out", MergeOptions(**options))
    assert verify_merged(run.plan(), tmp_path / "out") == []


def test_a_sharded_merge_is_verified(make_base, make_run, tmp_path):
    run = make_run(make_base(max_shard_size="40KB"))
    merge(run.plan(), tmp_path / "out", MergeOptions())
    assert verify_merged(run.plan(), tmp_path / "out") == []
    index = tmp_path / "out" / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"total_size": ', '"total_size": 9'))
    assert any("total_size" in fault for fault in verify_merged(run.plan(), tmp_path / "out"))


def test_tensors_of_every_dtype_are_copied(base, make_run, tmp_path):
    folder = tmp_path / "base"
    shutil.copytree(base, folder)
    file = folder / "model.safetensors"
    header, data = read_header(file), file.read_bytes()
    others = [(f"vision_tower.{dtype}", dtype, (3, 5)) for dtype in DTYPES] + [("vision_tower.scale", "I64", ())]
    layout = lay_out([(t.name, t.dtype, t.shape) for t in header.tensors] + others)
    more = np.random.default_rng(0).bytes(layout[-1].end - header.data_bytes)
    file.write_bytes(encode_header(layout, header.metadata) + data[header.data_start :] + more)
    plan = make_run(folder).plan()
    merge(plan, tmp_path / "out", MergeOptions())
    assert verify_merged(plan, tmp_path / "out") == []
    assert (tmp_path / "out" / "model.safetensors").read_bytes().endswith(more)


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    "wrong",
    [lambda w: w[:, ::-1], lambda w: w[::-1], lambda w: np.roll(w, 1, axis=0), lambda w: np.zeros_like(w)],
    ids=["columns", "rows", "shifted", "zero"],
)
def test_a_wrong_update_is_named(run, merged, rewrite, wrong):
    rewrite(merged, UP, wrong)
    faults = verify_merged(run.plan(), merged)
    assert len(faults) == 1
    assert f"tensor {UP} is not base + update" in faults[0]


def test_an_update_with_another_scaling_is_named(run, merged, tmp_path):
    manifest = merge(run.plan(), tmp_path / "scaled", MergeOptions(scale=1.02))
    manifest["scale"] = 1.0
    (tmp_path / "scaled" / "merge_manifest.json").write_text(json.dumps(manifest))
    faults = verify_merged(run.plan(), tmp_path / "scaled")
    assert sum("is not base + update" in fault for fault in faults) == 21


def test_no_update_at_all_is_named(run, merged, rewrite):
    base = read_header(run.base / "model.safetensors")
    tensor = next(t for t in base.tensors if t.name == UP)
    raw = (run.base / "model.safetensors").read_bytes()[base.data_start :][tensor.start : tensor.end]
    rewrite(merged, UP, lambda w: np.frombuffer(raw, w.dtype))
    assert any(f"tensor {UP} is not base + update" in fault for fault in verify_merged(run.plan(), merged))


def test_a_changed_untouched_tensor_is_named(run, merged, rewrite):
    rewrite(merged, "model.norm.weight", lambda w: w ^ 1)
    faults = verify_merged(run.plan(), merged)
    assert faults == ["tensor model.norm.weight differs from the base and no update touches it"]


@pytest.mark.parametrize(("row", "reason"), [(46, "row 46 is not the trained one"), (47, "were not trained differ")])
def test_a_changed_embedding_row_is_named(run, merged, rewrite, row, reason):
    def edit(w):
        w[row, 3] ^= 1
        return w

    rewrite(merged, "model.embed_tokens.weight", edit)
    faults = verify_merged(run.plan(), merged)
    assert len(faults) == 1
    assert reason in faults[0]


def test_one_flipped_bit_is_caught_by_the_manifest(run, merged):
    data = bytearray((merged / "model.safetensors").read_bytes())
    data[-5] ^= 1
    (merged / "model.safetensors").write_bytes(data)
    assert "model.safetensors differs from its sha256 in the manifest" in verify_merged(run.plan(), merged)


@pytest.mark.parametrize(
    ("file", "reason"), [("config.json", "config.json differs"), ("tokenizer.json", "tokenizer.json differs")]
)
def test_a_changed_side_file_is_named(run, merged, file, reason):
    (merged / file).write_text((merged / file).read_text().replace("1", "3"))
    assert any(reason in fault for fault in verify_merged(run.plan(), merged))


@pytest.mark.parametrize("spoil", ["truncate", "no weights", "no manifest"])
def test_a_folder_that_is_no_model_fails(run, merged, spoil):
    weights = merged / "model.safetensors"
    if spoil == "truncate":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif spoil == "no weights":
        weights.unlink()
    else:
        (merged / "merge_manifest.json").unlink()
    with pytest.raises(CheckFailed, match="not a merged model"):
        verify_merged(run.plan(), merged)


def test_another_adapter_is_named(make_run, base, merged, make_tree):
    def other(tree, metadata):
        tree["lora"]["mlp.up_proj"]["b"] *= -1
        from hashlib import sha256

        metadata["leaf_sha256"]["lora/mlp.up_proj/b"] = sha256(tree["lora"]["mlp.up_proj"]["b"]).hexdigest()

    shutil.rmtree(merged.parent / "run")
    faults = verify_merged(make_run(base, other).plan(), merged)
    assert "the manifest names another adapter than this checkpoint's" in faults
    assert sum("mlp.up_proj.weight is not base + update" in fault for fault in faults) == 3


def test_an_adapter_is_verified(run, tmp_path, rewrite):
    export_adapter(run.plan(), tmp_path / "adapter")
    assert verify_adapter(run.plan(), tmp_path / "adapter") == []
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"
    rewrite(tmp_path / "adapter", name, lambda w: w + np.float32(1e-6), weights="adapter_model.safetensors")
    assert verify_adapter(run.plan(), tmp_path / "adapter") == [f"tensor {name} differs from the checkpoint"]


def test_a_changed_adapter_config_is_named(run, tmp_path):
    export_adapter(run.plan(), tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "lora_alpha": 16}))
    assert verify_adapter(run.plan(), tmp_path / "adapter") == ["adapter_config.json: lora_alpha is 16, expected 8"]
    path.unlink()
    with pytest.raises(CheckFailed, match="not an adapter"):
        verify_adapter(run.plan(), tmp_path / "adapter")
