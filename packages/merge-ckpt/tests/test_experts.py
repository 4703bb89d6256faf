"""Experts: updates of stacked matrices, merged and as PEFT's target_parameters, against transformers."""

import hashlib
import json

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from portlab_merge.overlay import MergeOptions, merge
from portlab_merge.peft_adapter import export_adapter
from portlab_merge.plan import PlanRefused
from portlab_merge.verify import verify_adapter, verify_merged
from portlab_spec.files import sha256_file

LAYERS, EXPERTS, WIDTH, HIDDEN, RANK = 2, 3, 32, 24, 4
SHAPES = {"experts.gate_up_proj": (2 * HIDDEN, WIDTH), "experts.down_proj": (WIDTH, HIDDEN)}


@pytest.fixture(scope="module")
def moe_base(tmp_path_factory):
    """As Gemma 4 26B-A4B."""
    torch.manual_seed(0)
    config = Gemma4TextConfig(
        vocab_size=96,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        global_head_dim=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=EXPERTS,
        top_k_experts=2,
        moe_intermediate_size=HIDDEN,
    )
    model = Gemma4ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    folder = tmp_path_factory.mktemp("models") / "moe"
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def make_moe_run(make_run, moe_base):
    """Makes a run that adapts experts, and what it is told to beside them."""

    def make(names=tuple(SHAPES), modules=(), dropout=0.0, experts=EXPERTS):
        random = np.random.default_rng(1)

        def pair(*lead, out, into):
            return {
                "a": random.normal(0, 0.3, (LAYERS, *lead, into, RANK)).astype(np.float32),
                "b": random.normal(0, 0.3, (LAYERS, *lead, RANK, out)).astype(np.float32),
            }

        def edit(tree, metadata):
            tree["lora"] = {f"full.{n}": pair(experts, out=SHAPES[n][0], into=SHAPES[n][1]) for n in names}
            tree["lora"] |= {f"full.{n}": pair(out=32, into=WIDTH) for n in modules}
            kept = {f"full.{n}": [f"model.layers.{i}.{n}" for i in range(LAYERS)] for n in (*names, *modules)}
            metadata["lora"] |= {
                "dropout": dropout,
                "targets": [n.rpartition(".")[2] for n in (*names, *modules)],
                "leaves": [{"target": key, "modules": paths} for key, paths in kept.items()],
            }
            metadata["leaf_sha256"] = {
                f"lora/{key}/{side}": hashlib.sha256(leaf[side]).hexdigest()
                for key, leaf in tree["lora"].items()
                for side in "ab"
            }

        return make_run(moe_base, edit=edit, token_rows=False)

    return make


def exact(run):
    """The merged weights in float64, from the contract's formula."""
    weights = {name: t.double().numpy() for name, t in load_file(run.base / "model.safetensors").items()}
    for leaf in run.metadata["lora"]["leaves"]:
        a, b = (run.tree["lora"][leaf["target"]][side].astype(np.float64) for side in "ab")
        for i, module in enumerate(leaf["modules"]):
            name = module if module in weights else f"{module}.weight"
            for at in np.ndindex(a.shape[1:-2]):
                weights[name][at] += run.metadata["lora"]["scaling"] * (a[i][at] @ b[i][at]).T
    return weights


def logits(folder, wrap=lambda model: model, weights=None):
    model = Gemma4ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    if weights is not None:
        state = {name: torch.from_numpy(value).float() for name, value in weights.items()}
        assert not model.load_state_dict(state, strict=False).unexpected_keys
    with torch.no_grad():
        return wrap(model).eval()(input_ids=torch.arange(40).reshape(2, 20)).logits.numpy()


def test_every_expert_gets_its_own_update(make_moe_run, tmp_path, monkeypatch):
    monkeypatch.setattr("portlab_merge.arithmetic.BLOCK_ELEMENTS", 5 * WIDTH)  # blocks end inside a matrix
    run = make_moe_run()
    merge(run.plan(), tmp_path / "merged", MergeOptions())
    merged = load_file(tmp_path / "merged/model.safetensors")
    for name, value in exact(run).items():
        np.testing.assert_allclose(merged[name].numpy(), value, rtol=1e-5, atol=1e-5)
    assert verify_merged(run.plan(), tmp_path / "merged") == []


def test_verification_names_the_expert(make_moe_run, tmp_path):
    run = make_moe_run()
    merge(run.plan(), tmp_path / "merged", MergeOptions())
    file, name = tmp_path / "merged/model.safetensors", "model.layers.1.experts.down_proj"
    _, info = run.plan().base.tensors[name]
    with file.open("r+b") as stream:
        header = int.from_bytes(stream.read(8), "little") + 8
        stream.seek(header + info.start + (2 * WIDTH * HIDDEN + 7 * HIDDEN) * 4)
        stream.write(np.float32(9).tobytes())
    manifest = json.loads((tmp_path / "merged/merge_manifest.json").read_text())
    manifest["files_sha256"]["model.safetensors"] = sha256_file(file)
    (tmp_path / "merged/merge_manifest.json").write_text(json.dumps(manifest))
    faults = verify_merged(run.plan(), tmp_path / "merged")
    assert faults == [f"tensor {name} is not base + update (expert 2, row 7)"]


@pytest.mark.parametrize(
    ("names", "modules"),
    [
        (["experts.gate_up_proj", "experts.down_proj"], ["self_attn.q_proj"]),
        (["experts.down_proj", "experts.gate_up_proj"], []),
        (["experts.gate_up_proj"], []),
        (["experts.down_proj"], ["self_attn.q_proj"]),
    ],
    ids=lambda names: "+".join(names) or "experts alone",
)
def test_peft_reproduces_experts(make_moe_run, tmp_path, names, modules):
    run = make_moe_run(names, modules)
    export_adapter(run.plan(), tmp_path / "adapter")
    found = logits(run.base, wrap=lambda model: PeftModel.from_pretrained(model, tmp_path / "adapter"))
    expected = logits(run.base, weights=exact(run))
    assert np.abs(expected - logits(run.base)).max() > 0.1
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert verify_adapter(run.plan(), tmp_path / "adapter") == []


def test_dropout_of_training_is_left_out_of_the_config(make_moe_run, tmp_path):
    """PEFT refuses it beside experts, and it acts in training only."""
    config = export_adapter(make_moe_run(dropout=0.1).plan(), tmp_path / "adapter")
    assert config["lora_dropout"] == 0


def test_experts_of_another_number_are_refused(make_moe_run):
    with pytest.raises(PlanRefused, match=r"down_proj is \(3, 32, 24\), the update is \(2, 32, 24\)"):
        make_moe_run(["experts.down_proj"], experts=2).plan()
