"""Diff recovers what a merge did from the two folders alone, and contradicts a manifest that is not true."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from portlab_merge.base_model import open_base
from portlab_merge.diff import Claim, contradictions, diff_models, read_claim, side_file_differences
from portlab_merge.overlay import MergeOptions, merge

FORMAT = {"format": "pt"}
EMBEDDING = "model.embed_tokens.weight"


def matrix(folder, value):
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"w": value}, folder / "model.safetensors", FORMAT)
    return open_base(folder)


@pytest.fixture
def merged(make_run, base, tmp_path):
    run = make_run(base)
    merge(run.plan(), tmp_path / "merged", MergeOptions())
    return run


def change(folder, name, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors[name])
    save_file(tensors, folder / "model.safetensors", FORMAT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rank", [1, 5, 16])
def test_rank_is_recovered_through_rounding(tmp_path, dtype, rank):
    random = torch.Generator().manual_seed(rank)
    base = (torch.randn(200, 300, generator=random) * 0.05).to(dtype)
    delta = torch.randn(200, rank, generator=random) @ torch.randn(rank, 300, generator=random) * 0.02
    a, b = matrix(tmp_path / "a", base), matrix(tmp_path / "b", (base.float() + delta).to(dtype))
    [found] = diff_models(a, b, limit=32)
    assert (found.state, found.rank) == ("changed", rank)
    new = (base.float() + delta).to(dtype).double()
    assert found.relative_norm == pytest.approx(float((new - base.double()).norm() / base.double().norm()), rel=1e-6)
    assert found.changed == pytest.approx(float((new != base.double()).double().mean()), abs=1e-12)


def test_full_rank_is_told_from_any_rank(tmp_path):
    base = torch.randn(200, 300).bfloat16()
    a, b = matrix(tmp_path / "a", base), matrix(tmp_path / "b", base + torch.randn(200, 300).bfloat16() * 0.1)
    [found] = diff_models(a, b, limit=32)
    assert found.rank is None
    assert contradictions([found], Claim(16, frozenset({"w"}))) == ["w differs by more than rank 16"]


def test_an_update_below_the_rounding_has_rank_zero(tmp_path):
    base = torch.randn(200, 300).bfloat16()
    tiny = base.float() + torch.randn(200, 1) @ torch.randn(1, 300) * 1e-4
    [found] = diff_models(matrix(tmp_path / "a", base), matrix(tmp_path / "b", tiny.bfloat16()), limit=32)
    assert found.rank == 0


def test_another_dtype_alone_is_no_change(tmp_path):
    base = torch.randn(20, 30)
    for name, (old, new) in {"up": (base.bfloat16(), base.bfloat16().float()), "down": (base, base.half())}.items():
        [found] = diff_models(matrix(tmp_path / f"{name}a", old), matrix(tmp_path / f"{name}b", new), limit=8)
        assert found.state == "converted"


def test_a_merge_differs_by_its_adapter(merged, tmp_path):
    differences = diff_models(open_base(merged.base), open_base(tmp_path / "merged"), limit=16)
    changed = {d.tensor: d for d in differences if d.state == "changed"}
    assert set(changed) == {t.tensor for t in merged.plan().targets} | {EMBEDDING}
    assert {d.rank for name, d in changed.items() if name != EMBEDDING} == {4}
    assert (changed[EMBEDDING].rank, changed[EMBEDDING].rows) == (None, 3)
    assert contradictions(differences, read_claim(tmp_path / "merged")) == []


def test_the_command_prints_a_line_per_target(merged, command, tmp_path):
    result = command("diff", merged.base, tmp_path / "merged")
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    assert {line[0]: line[-1] for line in lines if line[0].startswith("mlp.")} == {
        "mlp.gate_proj.weight": "4",
        "mlp.up_proj.weight": "4",
        "mlp.down_proj.weight": "4",
    }
    assert result.stdout.splitlines()[-1] == "Tensors: 22 changed, 19 same."
    machine = json.loads(command("diff", merged.base, tmp_path / "merged", "--json").stdout)
    assert (machine["same"], len(machine["tensors"]), machine["faults"]) == (19, 22, [])


@pytest.mark.parametrize(
    ("name", "edit", "fault"),
    [
        ("model.norm.weight", lambda t: t.add_(1), "model.norm.weight differs and no update touches it"),
        (
            "model.layers.1.mlp.up_proj.weight",
            lambda t: t.add_(torch.randn(t.shape)),
            "model.layers.1.mlp.up_proj.weight differs by more than rank 4",
        ),
    ],
)
def test_a_manifest_that_is_not_true_fails_the_check(merged, command, tmp_path, name, edit, fault):
    change(tmp_path / "merged", name, edit)
    result = command("diff", merged.base, tmp_path / "merged")
    assert result.returncode == 1
    assert fault in result.stderr


def test_files_beside_the_weights_are_compared(merged, tmp_path):
    shutil.copytree(merged.base, tmp_path / "copy")
    (tmp_path / "copy" / "tokenizer.json").write_text("{}")
    (tmp_path / "copy" / "generation_config.json").unlink()
    lines = side_file_differences(open_base(merged.base), open_base(tmp_path / "copy"))
    assert lines == ["generation_config.json is only in A", "tokenizer.json differs"]


def test_tensors_of_one_side_and_other_shapes_are_named(tmp_path):
    a, b = matrix(tmp_path / "a", torch.ones(2, 3)), matrix(tmp_path / "b", torch.ones(3, 2))
    assert [d.state for d in diff_models(a, b, limit=4)] == ["another shape"]
    save_file({"x": torch.ones(1)}, tmp_path / "b" / "model.safetensors", FORMAT)
    states = {d.tensor: d.state for d in diff_models(a, open_base(tmp_path / "b"), limit=4)}
    assert states == {"w": "only in A", "x": "only in B"}


def test_integers_are_compared_by_their_bytes(tmp_path):
    a = matrix(tmp_path / "a", torch.arange(6).reshape(2, 3))
    b = matrix(tmp_path / "b", torch.arange(6).reshape(2, 3) + 1)
    assert [d.state for d in diff_models(a, b, limit=4)] == ["changed"]
    assert [d.state for d in diff_models(a, a, limit=4)] == ["same"]
    assert np.isfinite(diff_models(a, b, limit=4)[0].relative_norm)
