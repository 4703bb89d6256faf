"""A merged folder is the base plus the adapter: the numbers, the bytes, the files."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from portlab_merge.overlay import MergeOptions, merge
from portlab_spec.errors import UserError
from portlab_spec.files import sha256_file
from portlab_spec.safetensors_header import encode_header, lay_out, read_header


@pytest.mark.parametrize(("dtype", "kv_heads"), [("bfloat16", 2), ("float32", 1)])
def test_merged_logits_are_those_of_base_plus_adapter(
    make_base, make_run, exact_weights, logits, tmp_path, dtype, kv_heads
):
    run = make_run(make_base(dtype, kv_heads))
    merge(run.plan(), tmp_path / "out", MergeOptions(dtype="float32"))
    expected = logits(run.base, exact_weights(run))
    assert np.abs(expected - logits(run.base)).max() > 1  # the adapter does something
    np.testing.assert_allclose(logits(tmp_path / "out"), expected, atol=1e-5 * np.abs(expected).max())


def test_merged_logits_in_bfloat16_differ_by_its_rounding_only(run, exact_weights, logits, tmp_path):
    merge(run.plan(), tmp_path / "out", MergeOptions())
    exact = exact_weights(run)
    rounded = {name: torch.from_numpy(w).float().bfloat16().double().numpy() for name, w in exact.items()}
    expected = logits(run.base, rounded)
    np.testing.assert_allclose(logits(tmp_path / "out"), expected, atol=1e-3 * np.abs(expected).max())


@pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", 8), ("float16", 11), ("float32", 24)])
def test_every_element_is_rounded_once(make_base, make_run, exact_weights, tmp_path, dtype, bits):
    run = make_run(make_base(dtype))
    merge(run.plan(), tmp_path / "out", MergeOptions())
    merged = load_file(tmp_path / "out" / "model.safetensors")
    for name, exact in exact_weights(run).items():
        half_step = np.exp2(np.floor(np.log2(np.maximum(np.abs(exact), 2.0**-14))) - bits)
        arithmetic = 2.0**-20 * (1 + np.abs(exact))  # f32 sums of four products and the weight
        error = np.abs(merged[name].to(torch.float64).numpy() - exact)
        assert (error <= half_step + arithmetic).all(), name


def test_untouched_tensors_keep_their_bytes(run, tmp_path):
    merge(run.plan(), tmp_path / "out", MergeOptions())
    old, new = (load_file(f / "model.safetensors") for f in (run.base, tmp_path / "out"))
    norms = [name for name in old if "norm" in name]
    assert norms
    assert all(torch.equal(old[name], new[name]) for name in norms)
    rows = [i for i in range(96) if i not in (46, 5, 90)]
    assert torch.equal(old["model.embed_tokens.weight"][rows], new["model.embed_tokens.weight"][rows])


def test_layout_and_side_files_are_those_of_the_base(run, tmp_path):
    (run.base / "model.bin").write_text("other weights")
    merge(run.plan(), tmp_path / "out", MergeOptions())
    (run.base / "model.bin").unlink()
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert names == {p.name for p in run.base.iterdir()} | {"merge_manifest.json", "README.md"}
    assert (tmp_path / "out" / "config.json").read_bytes() == (run.base / "config.json").read_bytes()
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_bytes_do_not_depend_on_threads(run, tmp_path, monkeypatch):
    monkeypatch.setattr("portlab_merge.arithmetic.BLOCK_ELEMENTS", 512)  # many blocks per tensor
    one = merge(run.plan(), tmp_path / "one", MergeOptions(threads=1))
    four = merge(run.plan(), tmp_path / "four", MergeOptions(threads=4))
    assert one == four
    assert sha256_file(tmp_path / "one/model.safetensors") == sha256_file(tmp_path / "four/model.safetensors")


def test_shards_stay_as_they_are(make_base, make_run, exact_weights, logits, tmp_path):
    run = make_run(make_base(max_shard_size="40KB"))
    shards = sorted(p.name for p in run.base.glob("*.safetensors"))
    assert len(shards) > 2
    manifest = merge(run.plan(), tmp_path / "out", MergeOptions(dtype="float32"))
    assert sorted(p.name for p in (tmp_path / "out").glob("*.safetensors")) == shards
    old, new = (json.loads((f / "model.safetensors.index.json").read_text()) for f in (run.base, tmp_path / "out"))
    assert new["weight_map"] == old["weight_map"]
    assert new["metadata"]["total_size"] == 2 * old["metadata"]["total_size"]
    assert manifest["files_sha256"] == {name: sha256_file(tmp_path / "out" / name) for name in shards}
    expected = logits(run.base, exact_weights(run))
    np.testing.assert_allclose(logits(tmp_path / "out"), expected, atol=1e-5 * np.abs(expected).max())


def test_manifest_reports_what_each_tensor_got(run, exact_weights, tmp_path):
    manifest = merge(run.plan(), tmp_path / "out", MergeOptions())
    assert manifest == json.loads((tmp_path / "out" / "merge_manifest.json").read_text())
    name = "model.layers.1.mlp.up_proj.weight"
    old = load_file(run.base / "model.safetensors")[name].to(torch.float64).numpy()
    new = load_file(tmp_path / "out/model.safetensors")[name].to(torch.float64).numpy()
    delta = exact_weights(run)[name] - old
    report = manifest["tensors"][name]
    assert report["delta_norm"] == pytest.approx(np.linalg.norm(delta), rel=1e-5)
    assert report["relative_norm"] == pytest.approx(np.linalg.norm(delta) / np.linalg.norm(old), rel=1e-5)
    assert report["changed"] == pytest.approx((new != old).mean(), abs=1e-12)
    assert report["survival"] == pytest.approx(1 - np.linalg.norm(new - old - delta) / np.linalg.norm(delta), rel=1e-3)
    assert set(manifest["tensors"]) == {t.tensor for t in run.plan().targets} | {"model.embed_tokens.weight"}


@pytest.mark.parametrize(("recipe", "named"), [({"format": "gemma3-python"}, "gemma3-python"), ({}, None)])
def test_manifest_names_the_tool_format_of_the_recipe(make_run, base, tmp_path, recipe, named):
    def trained(tree, metadata):
        metadata["recipe"] = recipe

    assert merge(make_run(base, trained).plan(), tmp_path / "out", MergeOptions())["tool_format"] == named


def test_survival_shows_an_update_that_bfloat16_swallows(make_run, base, tmp_path, describe):
    def shrink(tree, metadata):
        for leaf in tree["lora"].values():
            leaf["b"] *= 1e-4
        metadata |= describe(base, tree)

    run = make_run(base, shrink)
    lossy = merge(run.plan(), tmp_path / "bf16", MergeOptions())
    exact = merge(run.plan(), tmp_path / "f32", MergeOptions(dtype="float32"))
    name = "model.layers.0.mlp.up_proj.weight"
    assert lossy["tensors"][name]["survival"] < 0.3
    assert exact["tensors"][name]["survival"] > 0.99


def test_scale_multiplies_the_whole_update(run, exact_weights, tmp_path):
    merge(run.plan(), tmp_path / "out", MergeOptions(dtype="float32", scale=0.5))
    old, new = (load_file(f / "model.safetensors") for f in (run.base, tmp_path / "out"))
    for name, exact in exact_weights(run).items():
        before = old[name].to(torch.float64).numpy()
        np.testing.assert_allclose(new[name].numpy(), (before + exact) / 2, atol=1e-5)


def test_config_names_the_dtype_that_was_written(run, tmp_path):
    merge(run.plan(), tmp_path / "out", MergeOptions(dtype="float32"))
    old, new = (json.loads((f / "config.json").read_text()) for f in (run.base, tmp_path / "out"))
    assert new == {**old, "dtype": "float32"}


def test_rslora_scales_by_the_root_of_the_rank(make_run, base, exact_weights, logits, tmp_path):
    run = make_run(base, use_rslora=True)
    merge(run.plan(), tmp_path / "out", MergeOptions(dtype="float32"))
    assert run.plan().targets[0].scaling == pytest.approx(8 / 4**0.5)
    expected = logits(run.base, exact_weights(run))
    np.testing.assert_allclose(logits(tmp_path / "out"), expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_multimodal_prefixes_are_found_and_kept(base, make_run, describe, tmp_path, prefix):
    from safetensors.torch import save_file

    folder = tmp_path / "renamed"
    shutil.copytree(base, folder)
    tensors = load_file(base / "model.safetensors")
    renamed = {prefix + name.removeprefix("model."): t for name, t in tensors.items()}
    save_file(renamed | {"vision_tower.x.weight": torch.ones(3)}, folder / "model.safetensors")
    run = make_run(folder, prefix=prefix)
    merge(run.plan(), tmp_path / "out", MergeOptions())
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert set(merged) == {*renamed, "vision_tower.x.weight"}
    changed = {name for name in renamed if not torch.equal(merged[name], renamed[name])}
    assert changed == {t.tensor for t in run.plan().targets} | {f"{prefix}embed_tokens.weight"}


def test_base_may_be_symlinks_into_a_cache(run, tmp_path):
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for file in run.base.iterdir():
        (linked / file.name).symlink_to(file)
    before = sha256_file(run.base / "model.safetensors")
    plan = type(run)(run.folder, linked, run.tree, run.metadata).plan()
    merge(plan, tmp_path / "out", MergeOptions())
    assert not (tmp_path / "out" / "model.safetensors").is_symlink()
    assert sha256_file(run.base / "model.safetensors") == before


def test_an_overflow_names_the_tensor_and_leaves_nothing(make_base, make_run, describe, tmp_path):
    folder = make_base("float16")

    def explode(tree, metadata):
        tree["lora"]["mlp.up_proj"]["b"][1] *= 1e6
        metadata |= describe(folder, tree)

    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is not finite after the update"):
        merge(make_run(folder, explode).plan(), tmp_path / "new" / "out", MergeOptions())
    assert list((tmp_path / "new").iterdir()) == []


def test_memory_does_not_grow_with_the_base(base, make_run, describe, tmp_path):
    folder = tmp_path / "large"
    shutil.copytree(base, folder)
    small = read_header(base / "model.safetensors")
    data = (base / "model.safetensors").read_bytes()[small.data_start :]
    tensors = lay_out(
        [(t.name, t.dtype, t.shape) for t in small.tensors] + [("vision_tower.w", "BF16", (128, 1 << 20))]
    )
    with (folder / "model.safetensors").open("wb") as file:
        file.write(encode_header(tensors, {"format": "pt"}) + data)
        file.truncate(file.tell() + (256 << 20))
    run = make_run(folder)
    code = (  # not ru_maxrss: that begins with what the parent had
        "import re, sys; from portlab_merge.cli import main; "
        "main(['merge', '--ckpt', sys.argv[1], '--out', sys.argv[2], '--json']); "
        "print(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1], file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, str(run.folder), str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    (tmp_path / "out" / "model.safetensors").unlink()
    assert int(result.stderr) < 200_000  # kB, for 256 MiB of weights
