"""What train-torchax exports: an adapter for plain PEFT, or all weights in the form in which the base has them."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_run import GEMMA3, VOCAB, report, save_tokenizer
from torchax_runs import Lab
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration

from portlab_hf.export import TOP_K
from portlab_hf.model import load_base
from portlab_spec.assets import ModelFolder
from portlab_spec.recipe import load_recipe
from portlab_torchax import main_job
from portlab_torchax.export import probe
from portlab_torchax.setup import set_up

FULL = {"method": "full", "optimizer": {"learning_rate": 1e-3}, "steps": 3, "save_every": 3}


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture(scope="module", autouse=True)
def no_compilation_cache():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("portlab_torchax.main_job.use_compilation_cache", lambda: None)
        yield


def run(lab, name, **changes):
    """The main job; its folder."""
    recipe = load_recipe(str(lab.recipe_file(**changes)))
    main_job.run(recipe, lab.folder / name, lambda line: None)
    return lab.folder / name


def logits(model):
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, VOCAB, (2, 40)))
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits.float()


def golden_difference(model, golden):
    """Largest difference between a model's logits and golden ones."""
    with torch.no_grad():
        whole = model.eval()(input_ids=torch.tensor([golden["token_ids"]])).logits[0].float()
    again = whole[torch.tensor(golden["positions"])].gather(-1, torch.tensor(golden["topk_ids"]))
    return float((again - torch.tensor(golden["topk_logits"])).abs().max())


# An adapter


@pytest.fixture(scope="module")
def adapted(lab):
    return run(lab, "adapted", lora={"rank": 4, "alpha": 6, "targets": ["q_proj", "down_proj"]}, steps=3)


def test_plain_peft_and_the_merged_model_compute_the_trained_models_logits(lab, adapted):
    golden = json.loads((adapted / "adapter/portlab.json").read_text())["probe"]
    with_adapter = PeftModel.from_pretrained(load_base(lab.model, torch.float32), adapted / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(adapted / "merged", dtype=torch.float32)
    assert np.shape(golden["topk_ids"]) == (len(golden["positions"]), TOP_K)
    assert golden_difference(with_adapter, golden) < 1e-4
    assert golden_difference(merged, golden) < 1e-4
    torch.testing.assert_close(logits(merged), logits(with_adapter), rtol=0, atol=1e-4)


def test_the_exported_adapter_is_the_last_checkpoints(adapted):
    ours, saved = (adapted / name / "adapter_model.safetensors" for name in ("adapter", "checkpoints/3"))
    assert ours.read_bytes() == saved.read_bytes()


def test_the_record_holds_the_run(adapted):
    record = json.loads((adapted / "adapter/portlab.json").read_text())
    assert record["recipe"]["steps"] == 3
    assert set(record["base"]["files_sha256"]) >= {"model.safetensors"}
    assert "torchax" in record["versions"]
    assert set(report(adapted)["paths"]) >= {"adapter", "merged"}


def test_an_adapter_that_plain_peft_saved_is_gone_on_from(lab, tmp_path):
    torch.manual_seed(0)
    config = LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=4, target_modules=["q_proj", "up_proj"])
    theirs = get_peft_model(load_base(lab.model, torch.float32), config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1)
    theirs.save_pretrained(tmp_path)
    lora = {"rank": 2, "alpha": 4, "targets": ["q_proj", "up_proj"], "train_control_rows": False}
    recipe = load_recipe(str(lab.recipe_file(lora=lora | {"start_from": str(tmp_path)})))
    setup = set_up(recipe, ModelFolder(lab.model, str(lab.model), None), ())
    golden = probe(setup, setup.start, lab.rows(recipe)[0])
    assert golden_difference(theirs, golden) < 1e-4


# All weights


def save_sharded(base, folder, dtype):
    """A copy of a model in two files with an index, in another type."""
    shutil.copytree(base, folder)
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, held in shards.items() for name in held}
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture(scope="module")
def full(lab):
    """A run on a sharded base in bfloat16: its folder, and the base's."""
    base = save_sharded(lab.model, lab.folder / "sharded", torch.bfloat16)
    return run(lab, "full", model=str(base), **FULL), base


def tensors_of(folder):
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found |= {name: (file.name, opened.get_tensor(name)) for name in opened.keys()}  # noqa: SIM118
    return found


def test_full_fine_tuning_leaves_a_model_and_no_adapter(full):
    out, _ = full
    assert not (out / "adapter").exists()
    assert report(out)["paths"]["merged"] == str(out / "merged")
    assert report(out)["after"]["loss"] < report(out)["before"]["loss"]


def test_it_has_the_bases_files_names_and_types_and_other_values(full):
    out, base = full
    ours, theirs = tensors_of(out / "merged"), tensors_of(base)
    assert {name: file for name, (file, _) in ours.items()} == {name: file for name, (file, _) in theirs.items()}
    for name, (_, tensor) in ours.items():
        assert tensor.dtype == torch.bfloat16
        assert not torch.equal(tensor, theirs[name][1]), name
    for file in base.iterdir():
        if file.suffix != ".safetensors":
            assert (out / "merged" / file.name).read_bytes() == file.read_bytes()


def test_it_holds_the_checkpoint_rounded_to_the_bases_type(full):
    out, _ = full
    saved, written = load_file(out / "checkpoints/3/weights.safetensors"), tensors_of(out / "merged")
    assert saved.keys() == written.keys()
    for name, tensor in saved.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor.bfloat16(), written[name][1]), name


def test_plain_transformers_computes_its_logits(full):
    out, _ = full
    golden = json.loads((out / "probe.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(out / "merged", dtype=torch.float32)
    assert golden_difference(model, golden) < 1e-4


@pytest.fixture(scope="module")
def multimodal(lab):
    """A run on a Gemma 3 with a vision tower: its folder, and the base's."""
    base = lab.folder / "multimodal"
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    settings = {"image_token_index": 300, "boi_token_index": 301, "eoi_token_index": 302, "mm_tokens_per_image": 4}
    text = {key: value for key, value in GEMMA3.items() if key != "architectures"}
    config = Gemma3Config(text_config=text, vision_config=vision | {"image_size": 28, "patch_size": 14}, **settings)
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    model.save_pretrained(base)
    save_tokenizer(base)
    return run(lab, "seeing", model=str(base), **FULL), base


def test_of_a_multimodal_model_the_text_model_alone_is_trained(multimodal):
    out, base = multimodal
    ours, theirs = tensors_of(out / "merged"), tensors_of(base)
    assert ours.keys() == theirs.keys()
    changed = {name for name, (_, tensor) in ours.items() if not torch.equal(tensor, theirs[name][1])}
    assert changed == {name for name in ours if "language_model" in name}
    assert len(changed) < len(ours)


def test_a_trained_multimodal_model_loads(multimodal):
    out, _ = multimodal
    golden = json.loads((out / "probe.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(out / "merged", dtype=torch.float32)
    assert golden_difference(model, golden) < 1e-4


def test_what_verifies_is_what_was_written(lab, full):
    """Golden logits are those of the rounded weights, which the float32 ones differ from."""
    out, base = full
    recipe = load_recipe(str(lab.recipe_file(model=str(base), **FULL)))
    setup = set_up(recipe, ModelFolder(base, str(base), None), ())
    saved = load_file(out / "checkpoints/3/weights.safetensors")
    golden = probe(setup, {name: jnp.asarray(tensor.numpy()) for name, tensor in saved.items()}, lab.rows(recipe)[0])
    model = AutoModelForCausalLM.from_pretrained(out / "merged", dtype=torch.float32)
    assert golden_difference(model, golden) > 1e-2
