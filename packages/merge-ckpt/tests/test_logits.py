"""verify --logits: three models and the trainer agree, and each way of disagreeing is told."""

import json
import sys

import numpy as np
import pytest
import torch
from transformers import Gemma3ForCausalLM

from portlab_merge.cli import main
from portlab_merge.logits import compare_logits
from portlab_merge.overlay import MergeOptions, merge
from portlab_spec.errors import UserError


@pytest.fixture
def with_probe(make_run, base, exact_weights):
    """A run whose metadata holds golden logits as the trainer stores them, times `factor`."""

    def make(factor=1.0):
        def add(tree, metadata):
            run = type("Run", (), {"base": base, "tree": tree, "metadata": metadata})
            model = Gemma3ForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
            model.load_state_dict({k: torch.from_numpy(v).float() for k, v in exact_weights(run).items()}, strict=False)
            ids = [2, 46, 7, 9, 90, 11, 30, 31, 5, 60]
            with torch.no_grad():
                values, top = model.eval()(input_ids=torch.tensor([ids])).logits[0, 6:].topk(8)
            metadata["probe"] = {
                "token_ids": ids,
                "positions": [6, 7, 8, 9],
                "topk_ids": top.tolist(),
                "topk_logits": (factor * values).tolist(),
            }

        return make_run(base, add)

    return make


def test_a_merge_in_f32_computes_what_was_trained(with_probe, tmp_path):
    run = with_probe()
    merge(run.plan(), tmp_path / "m", MergeOptions(dtype="float32"))
    report = compare_logits(run.plan(), tmp_path / "m")
    assert report.faults() == []
    assert report.base.kl > 0.1
    assert report.merged.largest < 1e-3
    assert report.golden.largest < 1e-3
    assert (report.golden.positions, report.merged.first_choice) == (4, 1.0)
    assert report.greedy[0] == report.greedy[1] > 0


def test_a_merge_in_bfloat16_differs_by_its_rounding(with_probe, tmp_path):
    run = with_probe()
    merge(run.plan(), tmp_path / "m", MergeOptions())
    report = compare_logits(run.plan(), tmp_path / "m")
    assert 1e-9 < report.merged.kl < report.base.kl / 10


def test_a_checkpoint_without_a_probe_is_compared_on_random_tokens(run, tmp_path):
    merge(run.plan(), tmp_path / "m", MergeOptions(dtype="float32"))
    report = compare_logits(run.plan(), tmp_path / "m")
    assert (report.golden, report.greedy) == (None, None)
    assert report.merged.positions == 64
    assert report.faults() == []


def test_a_trainer_that_computed_something_else_is_told(with_probe, tmp_path):
    run = with_probe(factor=3.0)
    merge(run.plan(), tmp_path / "m", MergeOptions(dtype="float32"))
    [fault] = compare_logits(run.plan(), tmp_path / "m").faults()
    assert "base + adapter is not what was trained" in fault


def test_a_merge_that_did_nothing_is_told(with_probe, tmp_path):
    run = with_probe()
    merge(run.plan(), tmp_path / "m", MergeOptions(scale=1e-9))
    faults = compare_logits(run.plan(), tmp_path / "m").faults()
    assert any("no nearer to base + adapter than the base" in fault for fault in faults)


def test_the_command_prints_a_line_per_model(with_probe, tmp_path, capsys):
    run = with_probe()
    merge(run.plan(), tmp_path / "m", MergeOptions(dtype="float32"))
    arguments = ["verify", "--ckpt", str(run.folder), "--merged", str(tmp_path / "m"), "--logits"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["base", "merged", "trainer"]
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["logits"]["merged"]["kl"] < 1e-6


def test_logits_are_of_a_merged_model(run):
    with pytest.raises(UserError, match="Pass --merged DIR too"):
        main(["verify", "--ckpt", str(run.folder), "--adapter", str(run.folder), "--logits"])


def test_without_torch_the_extra_is_named(run, tmp_path, monkeypatch):
    merge(run.plan(), tmp_path / "m", MergeOptions())
    monkeypatch.setitem(sys.modules, "portlab_merge.logits", None)
    with pytest.raises(UserError, match=r"Install portlab-merge-ckpt\[logits\]"):
        main(["verify", "--ckpt", str(run.folder), "--merged", str(tmp_path / "m"), "--logits"])


def test_figures_are_plain_numbers(with_probe, tmp_path):
    run = with_probe()
    merge(run.plan(), tmp_path / "m", MergeOptions())
    report = compare_logits(run.plan(), tmp_path / "m")
    assert all(np.isfinite([report.base.kl, report.merged.kl, report.golden.kl]))
