"""What train-xla exports: an adapter as PEFT itself would have saved it, whatever device trained it."""

import importlib.util
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tiny_run import VOCAB, Interrupted, report
from xla_runs import Lab

from portlab_hf.adapter_files import adapter_tensors, write_adapter
from portlab_hf.export import TOP_K, export_adapter, verify_adapter
from portlab_hf.model import load_base, trained_parameters
from portlab_spec.errors import CheckFailed
from portlab_xla.export import probe

LORA = {"rank": 4, "alpha": 6, "targets": ["q_proj", "v_proj", "down_proj"], "rank_pattern": {"v_proj": 2}}


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture(scope="module")
def trained(lab):
    """The parts of a run on this process's CPU, and what training gave."""
    return lab.train(lab.folder / "cpu", lora=LORA)


@pytest.fixture(scope="module")
def exported(lab, trained):
    """The folder of its adapter, and the golden logits."""
    setup, _ = trained
    found = probe(setup, lab.rows(setup.recipe)[0])
    export_adapter(
        setup.adapted,
        adapter_tensors(setup.adapted, setup.device.to_host),
        lab.folder / "adapter",
        {"format": "test"},
        found,
        "card",
    )
    return lab.folder / "adapter", found


def logits(base, adapter):
    model = PeftModel.from_pretrained(load_base(base, torch.float32), adapter).eval()
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, VOCAB, (2, 40)))
    with torch.no_grad():
        return model(input_ids=ids).logits


# As PEFT has it


def test_plain_peft_computes_the_logits_of_the_trained_model(lab, trained, exported):
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, VOCAB, (2, 40)))
    with torch.no_grad():
        expected = trained[0].adapted.eval()(input_ids=ids).logits
    torch.testing.assert_close(logits(lab.model, exported[0]), expected, rtol=0, atol=1e-5)


def test_the_tensors_are_those_that_peft_saves(trained, exported, tmp_path):
    trained[0].adapted.save_pretrained(tmp_path, save_embedding_layers=False)
    theirs, ours = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path, exported[0]))
    assert theirs.keys() == ours.keys()
    for name, tensor in theirs.items():
        assert torch.equal(tensor, ours[name]), name
        assert tensor.dtype == ours[name].dtype == torch.float32


def test_the_config_is_the_one_that_peft_saves(trained, exported, tmp_path):
    trained[0].adapted.save_pretrained(tmp_path, save_embedding_layers=False)
    theirs, ours = (json.loads((folder / "adapter_config.json").read_text()) for folder in (tmp_path, exported[0]))
    assert ours == theirs
    assert ours["inference_mode"] is True
    assert (ours["r"], ours["lora_alpha"], ours["rank_pattern"]) == (4, 6, {"v_proj": 2})


def test_the_untrained_half_changes_the_model_by_nothing(lab, tmp_path):
    """B starts at zero: what an adapter adds is what training added."""
    setup, _ = lab.train(tmp_path / "run", steps=3, optimizer={"learning_rate": 1e-30, "warmup_steps": 0})
    folder = tmp_path / "adapter"
    folder.mkdir()
    write_adapter(setup.adapted, adapter_tensors(setup.adapted), folder)
    base = load_base(lab.model, torch.float32).eval()
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, VOCAB, (2, 40)))
    with torch.no_grad():
        torch.testing.assert_close(logits(lab.model, folder), base(input_ids=ids).logits, rtol=0, atol=1e-5)


# Its proof


def test_the_golden_logits_are_those_of_the_supervised_positions(lab, trained, exported):
    setup, found = trained[0], exported[1]
    row = lab.rows(setup.recipe)[0]
    assert found["token_ids"] == list(row.ids)
    assert [i + 1 for i in found["positions"]] == [i for i, held in enumerate(row.loss) if held]
    with torch.no_grad():
        whole = setup.adapted.eval()(input_ids=torch.tensor([row.ids])).logits[0]
    values, top = whole[torch.tensor(found["positions"])].topk(TOP_K, -1)
    assert found["topk_ids"] == top.tolist()
    np.testing.assert_allclose(found["topk_logits"], values.numpy(), atol=1e-4)


def test_an_adapter_that_lost_a_matrix_does_not_verify(lab, exported, tmp_path):
    folder = shutil.copytree(exported[0], tmp_path / "adapter")
    tensors = load_file(folder / "adapter_model.safetensors")
    name = next(name for name in tensors if name.endswith("1.self_attn.v_proj.lora_B.weight"))
    save_file(tensors | {name: torch.zeros_like(tensors[name])}, folder / "adapter_model.safetensors")
    with pytest.raises(CheckFailed, match="logits of what was exported differ by"):
        verify_adapter(lab.model, folder, exported[1], torch.float32)
    assert verify_adapter(lab.model, exported[0], exported[1], torch.float32) < 1e-4


def test_an_older_export_is_replaced_whole(trained, exported, tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "left-over.txt").write_text("old")
    export_adapter(trained[0].adapted, adapter_tensors(trained[0].adapted), folder, {}, exported[1], "card")
    names = ["README.md", "adapter_config.json", "adapter_model.safetensors", "portlab.json"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


# Of a run that began on the CPU and went on on four devices of XLA


@pytest.fixture(scope="module")
def moved(lab):
    if importlib.util.find_spec("torch_xla") is None:
        pytest.skip("needs torch_xla")
    out = lab.folder / "moved"
    with pytest.raises(Interrupted):
        lab.train(out, stop_after=2, lora=LORA)
    done = lab.run(lab.arguments(out, device="xla", lora=LORA), devices=4)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def test_another_device_goes_on_with_the_same_curve(moved, trained):
    assert "trained 4 steps from step 2" in moved[1]
    assert report(moved[0])["device"]["count"] == 4
    assert report(moved[0])["loss"][:2] == trained[1].log.losses[:2]
    np.testing.assert_allclose(report(moved[0])["loss"], trained[1].log.losses, rtol=1e-4)


def test_nothing_compiles_once_the_shapes_are_warm(moved):
    assert report(moved[0])["device"]["graphs_after_warm_up"] == 0
    assert "warning" not in moved[1]


def test_names_are_the_same_whichever_device_trained(moved, trained, exported):
    ours, theirs = (load_file(f / "adapter_model.safetensors") for f in (moved[0] / "adapter", exported[0]))
    assert ours.keys() == theirs.keys()
    assert not [name for name in ours if "_orig_module" in name or "default" in name]
    assert len(ours) == len(trained_parameters(trained[0].adapted))


def test_the_adapter_of_four_devices_is_that_of_one(moved, exported, lab):
    ours, theirs = (logits(lab.model, folder) for folder in (moved[0] / "adapter", exported[0]))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-2)


def test_the_merged_model_is_merge_ckpts(moved, lab, tmp_path):
    command = ["merge", "--base", lab.model, "--ckpt", moved[0] / "adapter", "--out", tmp_path / "merged"]
    subprocess.run([sys.executable, "-m", "portlab_merge", *map(str, command)], check=True, capture_output=True)
    ours, theirs = (
        (folder / "model.safetensors").read_bytes() for folder in (moved[0] / "merged", tmp_path / "merged")
    )
    assert ours == theirs


def test_the_card_begins_with_what_model_hubs_read(moved, lab):
    _, front, text = (moved[0] / "adapter/README.md").read_text().split("---\n", 2)
    found = yaml.safe_load(front)
    assert found["base_model"] == report(moved[0])["paths"]["base"]
    assert found["library_name"] == "peft"
    assert "| call_exact | " in text
    assert "on 4 CPU device(s) (xla)" in " ".join(text.split())


def test_the_record_holds_the_run(moved):
    record = json.loads((moved[0] / "adapter/portlab.json").read_text())
    assert record["recipe"]["steps"] == 6
    assert record["lora"]["rank_pattern"] == {"v_proj": 2}
    assert set(record["base"]["files_sha256"]) >= {"model.safetensors"}
    assert len(record["probe"]["positions"]) == len(record["probe"]["topk_logits"])
    assert "torch-xla" in record["versions"]
