"""PEFT folders as input: what real PEFT saves is read as what real PEFT computes, and nothing else is let in."""

import json
import math
import shutil
import warnings

import ml_dtypes
import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch
from transformers import AutoModelForCausalLM, Gemma4ForCausalLM, Gemma4TextConfig

from portlab_merge.base_model import open_base
from portlab_merge.checkpoint import Checkpoint
from portlab_merge.location import LocalPath
from portlab_merge.overlay import MergeOptions, merge
from portlab_merge.peft_adapter import export_adapter
from portlab_merge.plan import make_plan
from portlab_merge.sources.peft import base_copy_problems, is_peft, read_peft
from portlab_spec.errors import UserError

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
STEM = "base_model.model.model.layers.0.self_attn.q_proj"


def exact(adapter, base):
    """The merged weights in float64, from the normal form's formula."""
    weights = {name: t.double().numpy() for f in base.glob("*.safetensors") for name, t in load_torch(f).items()}
    opened = open_base(base)
    for update in adapter.updates:
        delta = update.scaling * (update.a.astype(np.float64) @ update.b.astype(np.float64)).mT
        weights[opened.resolve(update.module)] += delta
    if adapter.rows:
        weights[opened.resolve(adapter.rows.parameter.removesuffix(".weight"))][list(adapter.rows.ids)] = (
            adapter.rows.values
        )
    return weights


def plan_of(folder, adapter, base):
    return make_plan(open_base(base), Checkpoint(LocalPath(folder), None, (), adapter))


def load(base):
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")


@pytest.fixture(scope="module")
def base(make_base):
    return make_base("float32")


@pytest.fixture(scope="module")
def moe_base(tmp_path_factory):
    """As Gemma 4 26B-A4B: two layers of three experts."""
    torch.manual_seed(0)
    config = Gemma4TextConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        global_head_dim=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=3,
        top_k_experts=2,
        moe_intermediate_size=24,
    )
    model = Gemma4ForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.3)
    folder = tmp_path_factory.mktemp("models") / "moe"
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def train(tmp_path):
    """Make an adapter with PEFT, give it random values, save it: train(base, **config) -> (folder, PEFT model)."""

    def make(base, **settings):
        model = get_peft_model(load(base), LoraConfig(task_type="CAUSAL_LM", **settings))
        torch.manual_seed(3)
        for name, parameter in model.named_parameters():
            if "lora_" in name or "trainable_tokens_delta" in name:
                parameter.data.normal_(0, 0.3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it saves the embedding as well
            model.save_pretrained(tmp_path / "adapter")
        return tmp_path / "adapter", model

    return make


@pytest.fixture
def folder(train, base):
    """An adapter of two projections, rank 4."""
    return train(base, r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])[0]


def rewrite(folder, edit_tensors=None, **config):
    """Change tensors and config keys of a saved adapter."""
    if edit_tensors:
        tensors = load_file(folder / WEIGHTS)
        (folder / WEIGHTS).unlink()
        save_file(edit_tensors(tensors), folder / WEIGHTS)
    path = folder / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


PATTERNS = {
    "rank_pattern": {"k_proj": 2, r"layers\.1\.mlp\.up_proj": 6},
    "alpha_pattern": {"layers.0.self_attn.q_proj": 3},
}
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": LINEARS},
        {"target_modules": LINEARS, "use_rslora": True},
        {"target_modules": LINEARS, **PATTERNS},
        {"target_modules": LINEARS, "use_rslora": True, **PATTERNS},
        {"target_modules": r".*layers\.[02]\..*o_proj", "lora_dropout": 0.1},
        {"target_modules": ["q_proj"], "trainable_token_indices": [46, 5, 90]},
        {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [7]}},
        {"target_modules": ["k_proj"], "target_parameters": ["q_proj.weight"], "rank_pattern": {"q_proj.weight": 3}},
    ],
    ids=["plain", "rslora", "patterns", "patterns+rslora", "regex", "token rows", "named token rows", "parameter"],
)
def test_reads_what_peft_merges(train, base, settings):
    folder, model = train(base, r=4, lora_alpha=8, **settings)
    adapter = read_peft(folder)
    assert adapter.problems == ()
    assert_merges_alike(exact(adapter, base), model.merge_and_unload())


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_merges_to_the_weights_that_peft_merges(train, base, moe_base, tmp_path, kind):
    settings = {"target_modules": LINEARS, "use_rslora": True, **PATTERNS}
    if kind == "experts":
        base = moe_base
        names = ["experts.gate_up_proj", "experts.down_proj"]
        settings = {"target_modules": ["o_proj"], "target_parameters": names, "trainable_token_indices": [46, 5]}
    folder, model = train(base, r=4, lora_alpha=8, **settings)
    merge(plan_of(folder, read_peft(folder), base), tmp_path / "merged", MergeOptions())
    assert_merges_alike(load_file(tmp_path / "merged/model.safetensors"), model.merge_and_unload())


def assert_merges_alike(weights, merged):
    for name, tensor in merged.state_dict().items():
        if name in weights:
            np.testing.assert_allclose(tensor.numpy(), weights.pop(name), rtol=1e-5, atol=1e-5)
    assert not weights


@pytest.mark.parametrize(
    ("names", "settings"),
    [
        (["experts.gate_up_proj", "experts.down_proj"], {}),
        (["experts.gate_up_proj", "experts.down_proj"], {"rank_pattern": {"experts.down_proj": 2}}),
        (["layers.0.experts.gate_up_proj", "layers.1.experts.down_proj"], {"use_rslora": True}),
        (["down_proj"], {"alpha_pattern": {r"layers\.1\.experts\.down_proj": 3}}),
    ],
    ids=["both", "another rank", "one of each", "bare name"],
)
def test_reads_experts(train, moe_base, names, settings):
    folder, model = train(moe_base, r=3, lora_alpha=8, target_modules=["q_proj"], target_parameters=names, **settings)
    adapter = read_peft(folder)
    assert adapter.problems == ()
    assert {len(u.shape) for u in adapter.updates} == {2, 3}
    assert_merges_alike(exact(adapter, moe_base), model.merge_and_unload())


def test_our_export_is_read_as_the_same_updates(make_run, base, tmp_path):
    run = make_run(base, use_rslora=True)
    plan = run.plan()
    export_adapter(plan, tmp_path / "adapter")
    adapter = read_peft(tmp_path / "adapter")
    assert adapter.problems == ()
    assert adapter.lora.rank == 4
    found = {f"{update.module}.weight": update for update in adapter.updates}
    assert set(found) == {target.tensor for target in plan.targets}
    for target in plan.targets:
        a, b = plan.factors(target)
        update = found[target.tensor]
        assert np.array_equal(update.a, a)
        assert np.array_equal(update.b, b)
        assert update.scaling == pytest.approx(8 / math.sqrt(4))
    assert adapter.rows.ids == (46, 5, 90)
    assert np.array_equal(adapter.rows.values, run.tree["token_rows"])


def test_embedding_that_is_tied(train, base, logits):
    """PEFT stores it twice, for both ends of the model; its own merge adds it twice to the one matrix."""
    folder, _ = train(base, r=4, lora_alpha=8, target_modules=["embed_tokens", "q_proj"], ensure_weight_tying=True)
    adapter = read_peft(folder)
    assert adapter.problems == ()
    assert [u.module for u in adapter.updates if u.shape == (96, 48)] == ["model.embed_tokens"]
    adapted = logits(base, wrap=lambda model: PeftModel.from_pretrained(model, folder))
    merged = logits(base, exact(adapter, base))
    np.testing.assert_allclose(merged, adapted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_one_end_of_a_tied_embedding_is_refused(train, base, target):
    folder, _ = train(base, r=4, lora_alpha=8, target_modules=[target, "q_proj"])
    (problem,) = read_peft(folder).problems
    assert f"{target} is adapted and" in problem


def test_embedding_of_an_untied_base(train, base, tmp_path):
    untied = tmp_path / "untied"
    shutil.copytree(base, untied)
    config = json.loads((untied / "config.json").read_text()) | {"tie_word_embeddings": False}
    (untied / "config.json").write_text(json.dumps(config))
    weights = load_file(untied / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"][::-1].copy()
    save_file(weights, untied / "model.safetensors", {"format": "pt"})
    folder, model = train(untied, r=4, lora_alpha=8, target_modules=["embed_tokens", "lm_head"])
    adapter = read_peft(folder, tied_embeddings=False)
    assert adapter.problems == ()
    assert_merges_alike(exact(adapter, untied), model.merge_and_unload())
    export_adapter(plan_of(folder, adapter, untied), tmp_path / "again")
    again = {u.module: u for u in read_peft(tmp_path / "again", tied_embeddings=False).updates}
    assert set(again) == {"model.embed_tokens", "lm_head"}
    assert all(
        np.array_equal(again[u.module].b, u.b) and np.array_equal(again[u.module].a, u.a) for u in adapter.updates
    )


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_copy_of_the_embedding_is_compared_with_the_base(train, make_base, dtype):
    base = make_base("bfloat16")
    folder, _ = train(base, r=4, lora_alpha=8, target_modules=["embed_tokens"], ensure_weight_tying=True)
    name = "base_model.model.model.embed_tokens.base_layer.weight"
    head = "base_model.model.lm_head.base_layer.weight"
    rewrite(folder, lambda tensors: {key: v.astype(dtype) if key in (name, head) else v for key, v in tensors.items()})
    assert base_copy_problems(read_peft(folder), open_base(base)) == []
    rewrite(folder, lambda tensors: tensors | {name: tensors[name] + tensors[name].dtype.type(1)})
    (problem,) = base_copy_problems(read_peft(folder), open_base(base))
    assert problem.startswith(f"leaf {name} differs from the embedding of the base")


@pytest.mark.parametrize(
    "rename",
    [
        lambda key: key.replace(".weight", ".default.weight"),
        lambda key: key.removeprefix("base_model.model."),
        lambda key: key.replace("base_model.model.model.", "base_model.model.model.language_model."),
        lambda key: key.replace("base_model.model.model.", "base_model.model.language_model.model."),
    ],
    ids=["adapter name kept", "no prefix", "multimodal", "multimodal before transformers 4.52"],
)
def test_other_spellings_of_the_keys(folder, base, rename):
    expected = exact(read_peft(folder), base)
    rewrite(folder, lambda tensors: {rename(key): value for key, value in tensors.items()})
    adapter = read_peft(folder)
    assert adapter.problems == ()
    found = exact(adapter, base)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_read_exactly(folder, dtype):
    rewrite(folder, lambda tensors: {key: value.astype(dtype) for key, value in tensors.items()})
    adapter = read_peft(folder)
    stored = load_file(folder / WEIGHTS)
    update = next(u for u in adapter.updates if u.module == "model.layers.0.self_attn.q_proj")
    assert update.a.dtype == np.float32
    assert np.array_equal(update.a, stored[f"{STEM}.lora_A.weight"].astype(np.float32).T)
    assert np.array_equal(update.b, stored[f"{STEM}.lora_B.weight"].astype(np.float32).T)


def test_says_what_it_was_trained_on(folder, base):
    adapter = read_peft(folder)
    assert is_peft(folder)
    assert not is_peft(folder.parent)
    assert adapter.origin == "peft"
    assert (adapter.base.id, adapter.base.path) == (str(base), str(base))
    assert len(adapter.leaf_sha256) == 2 * len(adapter.updates) == 12
    assert adapter.record["lora_alpha"] == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"lora_bias": True}, "lora_bias"),
        ({"bias": "lora_only"}, "bias=lora_only"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights=pissa_niter_4"),
        ({"use_qalora": True}, "QALoRA"),
        ({"peft_type": "LOHA"}, "PEFT type LOHA"),
        ({"r": 0}, "r: Input should be greater than 0"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"rank_pattern": {"(": 2}}, "not a regular expression"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_other_kinds_of_adapters_are_refused(folder, change, message):
    rewrite(folder, **change)
    with pytest.raises(UserError, match=message) as error:
        read_peft(folder)
    assert "\n" not in str(error.value)


def drop(key):
    return lambda tensors: {name: value for name, value in tensors.items() if name != key}


def with_nan(tensors):
    tensors[f"{STEM}.lora_A.weight"][0, 0] = np.nan
    return tensors


@pytest.mark.parametrize(
    ("edit", "change", "problem"),
    [
        (drop(f"{STEM}.lora_B.weight"), {}, f"leaf {STEM}.lora_A.weight lacks lora_B"),
        (with_nan, {}, f"leaf {STEM}.lora_A.weight holds 1 values that are not finite"),
        (
            lambda tensors: tensors | {f"{STEM}.lora_magnitude_vector": np.ones(64, np.float32)},
            {},
            f"leaf {STEM}.lora_magnitude_vector is nothing that LoRA adds to a linear layer or an embedding",
        ),
        (
            lambda tensors: tensors | {f"{STEM}.lora_A.other.weight": np.ones((4, 48), np.float32)},
            {},
            "is a second lora_A of model.layers.0.self_attn.q_proj",
        ),
        (
            lambda tensors: tensors | {f"{STEM}.lora_A.weight": np.ones((4, 48), np.int32)},
            {},
            "is int32, expected floating point",
        ),
        (
            lambda tensors: tensors | {f"{STEM}.lora_A.weight": np.ones((3, 48), np.float32)},
            {},
            "self_attn.q_proj has lora_A (3, 48) and lora_B (64, 4), expected (r, in), (out, r)",
        ),
        (None, {"rank_pattern": {"q_proj": 2}}, "self_attn.q_proj has rank 4, the config says 2"),
        (None, {"rank_pattern": {"v_proj": 4}}, "rank_pattern 'v_proj' matches no adapted module"),
        (None, {"alpha_pattern": {"proj": 4}}, "alpha_pattern 'proj' matches no adapted module"),
        (None, {"trainable_token_indices": [1]}, "0 embeddings have trained rows, trainable_token_indices is [1]"),
        (
            lambda tensors: {k: v * 0 if "lora_B" in k else v for k, v in tensors.items()},
            {},
            "every lora_B is all zero: the adapter is still at its initialisation",
        ),
        (
            lambda tensors: {k.replace("q_proj", "q_proj.base_layer"): v for k, v in tensors.items()},
            {},
            "q_proj.base_layer is nested and model.layers.0.self_attn.q_proj is in no target_parameters",
        ),
        (lambda tensors: {}, {}, "adapter_model.safetensors holds no LoRA matrices"),
    ],
    ids=[
        "half",
        "nan",
        "unknown key",
        "twice",
        "integers",
        "shapes",
        "rank",
        "rank pattern",
        "alpha pattern",
        "token ids",
        "zero",
        "nested",
        "empty",
    ],
)
def test_damage_is_named(folder, edit, change, problem):
    rewrite(folder, edit, **change)
    assert problem in "\n".join(read_peft(folder).problems)


def test_experts_without_their_partner_are_named(train, moe_base):
    names = ["experts.gate_up_proj", "experts.down_proj"]
    folder, _ = train(moe_base, r=3, target_modules=[], target_parameters=names)
    rewrite(folder, lambda tensors: {k: v for k, v in tensors.items() if "layers.0.experts.base_layer" not in k})
    problems = read_peft(folder).problems
    assert problems == ("model.layers.0.experts has 1 pairs of matrices for the parameters down_proj, gate_up_proj",)


def test_a_pickle_is_refused(folder):
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    with pytest.raises(UserError, match=r"holds adapter_model.bin, a pickle that could run code"):
        read_peft(folder)
