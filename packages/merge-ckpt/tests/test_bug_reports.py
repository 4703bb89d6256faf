"""Bugs that users of other converters met, each held off by a test; those not here are held by the tests beside it."""

import json
import os
import shutil

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from portlab_merge.base_model import open_base
from portlab_merge.checkpoint import read_checkpoint
from portlab_merge.overlay import MergeOptions, merge
from portlab_merge.peft_adapter import export_adapter
from portlab_merge.plan import make_plan
from portlab_merge.sources import Given
from portlab_spec.errors import UserError
from portlab_spec.files import sha256_file
from portlab_spec.safetensors_header import DTYPES, encode_header, lay_out, read_header


@pytest.fixture
def own_base(base, tmp_path):
    """A base that may be changed."""
    shutil.copytree(base, tmp_path / "base")
    return tmp_path / "base"


def snapshot(folder):
    """Everything about a folder that a write would change."""
    paths = [folder, *sorted(folder.rglob("*"))]
    return [(path, path.lstat().st_mtime_ns, path.is_file() and sha256_file(path)) for path in paths]


def convert(base, run, tmp_path):
    plan = make_plan(open_base(base), read_checkpoint(run))
    merge(plan, tmp_path / "out", MergeOptions())
    return plan, tmp_path / "out"


def test_the_output_has_the_dtypes_and_the_size_of_the_base(own_base, make_run, tmp_path):
    """huggingface/peft#890 and #906, modelscope/ms-swift#841: float32, twice as large. peft#2054: 40 kB.

    Bases of several dtypes are common: norms in float32.
    """
    header = read_header(own_base / "model.safetensors")
    layout = lay_out((t.name, "F32" if "norm" in t.name else t.dtype, t.shape) for t in header.tensors)
    random = np.random.default_rng(0)
    data = [random.normal(size=t.shape).astype(DTYPES[t.dtype]).tobytes() for t in layout]
    (own_base / "model.safetensors").write_bytes(encode_header(layout, {"format": "pt"}) + b"".join(data))
    _, out = convert(own_base, make_run(own_base).folder, tmp_path)
    merged = read_header(out / "model.safetensors")
    assert [(t.name, t.dtype, t.shape) for t in merged.tensors] == [(t.name, t.dtype, t.shape) for t in layout]
    assert (out / "model.safetensors").stat().st_size == (own_base / "model.safetensors").stat().st_size


def test_a_tied_model_gets_no_output_matrix(run, tmp_path):
    """vllm-project/vllm#3323, hiyouga/LlamaFactory#2789: loaders of Gemma fail on lm_head.weight."""
    _, out = convert(run.base, run.folder, tmp_path)
    with safe_open(out / "model.safetensors", "np") as file:
        assert set(file.keys()) == {tensor.name for tensor in read_header(run.base / "model.safetensors").tensors}
        assert not [name for name in file.keys() if "lm_head" in name]  # noqa: SIM118


@pytest.mark.parametrize("says", [True, None, False], ids=["tied", "silent", "untied"])
def test_an_output_matrix_that_loaders_would_tie_is_not_merged_into(own_base, run, tmp_path, says):
    """huggingface/peft#2777, transformers#45127: the merged head is on disk, the config says tied, and it is lost."""
    weights = load_file(own_base / "model.safetensors")
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}, own_base / "model.safetensors")
    config = json.loads((own_base / "config.json").read_text())
    del config["tie_word_embeddings"]
    if says is not None:
        config["tie_word_embeddings"] = says
    (own_base / "config.json").write_text(json.dumps(config))
    folder = tmp_path / "adapter"
    export_adapter(run.plan(), folder)
    settings = json.loads((folder / "adapter_config.json").read_text()) | {"trainable_token_indices": None}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    sides = {"A": np.ones((4, 48), np.float32), "B": np.ones((96, 4), np.float32)}
    head = {f"base_model.model.lm_head.lora_{side}.weight": value for side, value in sides.items()}
    save_file(head, folder / "adapter_model.safetensors")
    checkpoint = read_checkpoint(folder, given=Given(tied_embeddings=False))
    if says is False:
        assert [t.tensor for t in make_plan(open_base(own_base), checkpoint).targets] == ["lm_head.weight"]
    else:
        with pytest.raises(UserError, match=r"lm_head\.weight gets an update and the config ties it"):
            make_plan(open_base(own_base), checkpoint)


def test_every_file_beside_the_weights_comes_along(own_base, make_run, tmp_path):
    """2U1/Llama3.2-Vision-Finetune#5: no preprocessor. ymcui/Chinese-LLaMA-Alpaca#871: no config."""
    files = ["preprocessor_config.json", "processor_config.json", "tokenizer.model", "chat_template.jinja", "LICENSE"]
    for file in [*files, "assets/a/b.bin.txt", "special_tokens_map.json"]:
        (own_base / file).parent.mkdir(parents=True, exist_ok=True)
        (own_base / file).write_bytes(file.encode() + b"\r\n\x00\xff")
    _, out = convert(own_base, make_run(own_base).folder, tmp_path)
    names = {path.relative_to(own_base) for path in own_base.rglob("*") if path.is_file()}
    assert {path.relative_to(out) for path in out.rglob("*") if path.is_file()} - names == {
        (out / "README.md").relative_to(out),
        (out / "merge_manifest.json").relative_to(out),
    }
    assert all((out / n).read_bytes() == (own_base / n).read_bytes() for n in names if n.suffix != ".safetensors")


def test_a_chat_template_of_the_adapter_that_is_not_taken_is_mentioned(run, tmp_path):
    """gradients-ai/G.O.D PR#1295: the adapter's template is lost at the merge, without a word."""
    export_adapter(run.plan(), tmp_path / "adapter")
    assert not any("template" in line for line in convert(run.base, tmp_path / "adapter", tmp_path / "1")[0].warnings)
    (tmp_path / "adapter" / "chat_template.jinja").write_text("{{ messages }}")
    plan, out = convert(run.base, tmp_path / "adapter", tmp_path / "2")
    assert any("chat_template.jinja" in line and "the base's" in line for line in plan.warnings)
    assert not (out / "chat_template.jinja").exists()


def test_weights_name_their_framework_even_if_the_base_does_not(own_base, make_run, tmp_path):
    """transformers 4 refuses weights without it; tinker-cookbook's shards and Tunix's file had none."""
    save_file(load_file(own_base / "model.safetensors"), own_base / "model.safetensors")
    assert read_header(own_base / "model.safetensors").metadata == {}
    _, out = convert(own_base, make_run(own_base).folder, tmp_path)
    assert read_header(out / "model.safetensors").metadata == {"format": "pt"}


def test_nothing_is_ever_written_to_a_run(run, tmp_path):
    """google/orbax#394: a copied checkpoint was taken for an unfinished one, and deleted."""
    shutil.copytree(run.step, run.step.with_name("9.orbax-checkpoint-tmp-1"))
    (run.step.with_name("8")).mkdir()
    before = snapshot(run.folder)
    plan, _ = convert(run.base, run.folder, tmp_path)
    export_adapter(plan, tmp_path / "adapter")
    assert snapshot(run.folder) == before


@pytest.mark.parametrize("copy", ["moved", "linked", "read only", "one step", "without times"])
def test_a_copied_run_is_as_good_as_the_original(run, tmp_path, copy):
    """google/orbax#394 again: nothing depends on where a checkpoint lies, or when its files were written."""
    plan, out = convert(run.base, run.folder, tmp_path)
    copied = tmp_path / "copy of a run"
    if copy == "moved":
        shutil.move(run.folder, copied)
    elif copy == "linked":
        copied.symlink_to(run.folder)
    elif copy == "one step":
        shutil.copytree(run.step, copied / "7")
        copied = copied / "7"
    else:
        shutil.copytree(run.folder, copied)
        for path in copied.rglob("*"):
            os.utime(path, (0, 0)) if copy == "without times" else path.chmod(0o555 if path.is_dir() else 0o444)
    again, second = convert(run.base, copied, tmp_path / "again")
    assert again.checkpoint.adapter.digest == plan.checkpoint.adapter.digest
    assert sha256_file(second / "model.safetensors") == sha256_file(out / "model.safetensors")
