"""Which adapters a server would apply, over the published configurations; no weight is needed to say."""

import json
import shlex
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from portlab_merge.adapter import Adapter, LoraSettings, ModuleUpdate, TokenRows
from portlab_merge.base_model import BaseModel
from portlab_merge.checkpoint import Checkpoint
from portlab_merge.location import LocalPath
from portlab_merge.plan import LoraTarget, Plan, RowsTarget
from portlab_merge.server_check import MAX_RANKS, check_server
from portlab_spec.models import published
from portlab_spec.models.config import GemmaConfig
from portlab_spec.models.table import param_table
from portlab_spec.safetensors_header import TensorInfo

TEXT, AS_PUBLISHED, NESTED = "model.", "language_model.model.", "model.language_model."
QV, ALL = ("q_proj", "v_proj"), ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def model_config(name, architecture):
    """A published model's config.json, of a text model or of the multimodal one around it."""
    raw = json.loads((resources.files(published) / f"{name}.json").read_text())
    text = raw.get("text_config", raw)
    if architecture.endswith("ForCausalLM"):
        return text | {"architectures": [architecture]}
    return {
        "model_type": text["model_type"].removesuffix("_text"),
        "architectures": [architecture],
        "text_config": text,
    }


def plan_for(name, architecture, prefix, targets=ALL, rank=4, rows=(), common_rank=None, **patterns):
    """A plan whose matrices are views of one number."""
    config = model_config(name, architecture)
    table = param_table(GemmaConfig.from_dict(config))
    tensors = {
        tensor: ("model.safetensors", TensorInfo(tensor, "BF16", param.shape, 0, 0))
        for param in table
        for tensor in param.tensor_names(prefix)
    }
    base = BaseModel(Path("base"), {}, tensors, None, config, "")

    def target(param, tensor):
        *experts, out, into = param.shape
        a, b = (np.broadcast_to(np.float32(1), (*experts, *shape)) for shape in ((into, rank), (rank, out)))
        update = ModuleUpdate(tensor.removesuffix(".weight"), "leaf", a, b, 2.0)
        return LoraTarget(tensor, param.shape, "BF16", update)

    chosen = tuple(
        target(param, tensor)
        for param in table
        for tensor in param.tensor_names(prefix)
        if tensor.removesuffix(".weight").endswith(tuple(f".{name}" for name in targets))
        and ("experts" in tensor) == any("experts" in name for name in targets if tensor.endswith(name))
    )
    embedding = f"{prefix}embed_tokens.weight"
    trained = TokenRows(embedding, rows, np.zeros((len(rows), 1), np.float32)) if rows else None
    lora = LoraSettings(common_rank or rank, 8.0, **patterns)
    adapter = Adapter("test", lora, tuple(t.update for t in chosen), trained)
    rows_target = RowsTarget(embedding, rows, tensors[embedding][1].shape, "BF16") if rows else None
    return Plan(base, Checkpoint(LocalPath(Path("run")), 1, (), adapter), chosen, rows_target)


GEMMA3 = ("gemma-3-1b", "Gemma3ForCausalLM", TEXT)
GEMMA3_MULTIMODAL = ("gemma-3-4b", "Gemma3ForConditionalGeneration", AS_PUBLISHED)
GEMMA4 = ("gemma-4-31B", "Gemma4ForConditionalGeneration", NESTED)
GEMMA4_SHARED = ("gemma-4-E2B", "Gemma4ForConditionalGeneration", NESTED)
GEMMA4_EXPERTS = ("gemma-4-26B-A4B", "Gemma4ForConditionalGeneration", NESTED)


@pytest.mark.parametrize("key_style", ["new", "old"])
@pytest.mark.parametrize(
    ("model", "prefix"),
    [
        (GEMMA3, "model."),
        (GEMMA3_MULTIMODAL, "language_model.model."),
        (("gemma-3-4b", "Gemma3ForConditionalGeneration", NESTED), "language_model.model."),
        (GEMMA4, "language_model.model."),
        (GEMMA4_SHARED, "language_model.model."),
        (("gemma-4-E2B", "Gemma4ForCausalLM", TEXT), "model."),
        (("gemma-4-12B", "Gemma4UnifiedForConditionalGeneration", NESTED), "language_model.model."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_every_module_is_found_under_the_servers_name(model, prefix, key_style):
    plan = plan_for(*model, targets=QV)
    report = check_server(plan, "vllm", key_style)
    assert report.reasons == ()
    assert report.works
    assert len(report.modules) == len(plan.targets) > 0
    assert all(name.startswith(f"{prefix}layers.") for name in report.modules.values())


@pytest.mark.parametrize(
    ("model", "key_style"),
    [
        # vllm-project/vllm#48019, and a text model's adapter on a multimodal one
        (("gemma-3-1b", "Gemma3ForCausalLM", NESTED), "new"),
        (("gemma-3-4b", "Gemma3ForConditionalGeneration", TEXT), "new"),
        (("gemma-4-E2B", "Gemma4ForCausalLM", NESTED), "old"),
    ],
)
def test_modules_that_the_server_would_drop_in_silence(model, key_style):
    plan = plan_for(*model)
    (reason,) = check_server(plan, "vllm", key_style).reasons
    assert reason.startswith(f"{len(plan.targets)} of {len(plan.targets)} modules are not in the server's model")
    assert reason.endswith("it would serve the base there, in silence")


def test_nested_names_reach_the_text_class_of_gemma4():
    """vllm-project/vllm#38844."""
    report = check_server(plan_for("gemma-4-E2B", "Gemma4ForCausalLM", NESTED), "vllm")
    assert report.works
    assert report.modules["model.language_model.layers.0.mlp.up_proj"] == "model.layers.0.mlp.up_proj"


def test_keys_of_layers_that_share_them_are_missed():
    """Google's files hold matrices there that no layer uses."""
    plan = plan_for(*GEMMA4_SHARED, targets=("q_proj",))
    stray = plan.targets[-1].tensor.replace("q_proj", "k_proj")
    last = plan.targets[-1]
    plan = Plan(plan.base, plan.checkpoint, (*plan.targets, LoraTarget(stray, last.shape, "BF16", last.update)), None)
    (reason,) = check_server(plan, "vllm").reasons
    assert reason.startswith("1 of 36 modules are not in the server's model, first language_model.model.layers.34")


@pytest.mark.parametrize(("rank", "flag"), [(1, 1), (4, 8), (16, 16), (20, 32), (257, 320), (512, 512)])
def test_rank_is_rounded_to_what_the_flag_takes(rank, flag):
    report = check_server(plan_for(*GEMMA3, targets=["q_proj"], rank=rank), "vllm")
    assert report.max_rank == flag
    assert shlex.split(report.command("base", "out/adapter"))[:6] == [
        *("vllm", "serve", "base", "--enable-lora", "--max-lora-rank", str(flag))
    ]


def test_common_rank_counts_though_no_module_has_it():
    report = check_server(plan_for(*GEMMA3, rank=4, common_rank=64, rank_pattern={".*": 4}), "vllm")
    assert report.max_rank == 64
    assert any("differ between modules" in note for note in report.notes)


def test_rank_beyond_the_largest_is_refused():
    report = check_server(plan_for(*GEMMA3, targets=["q_proj"], rank=513), "vllm")
    assert report.reasons == (f"rank 513 is beyond {MAX_RANKS[-1]}, the largest that --max-lora-rank takes",)


@pytest.mark.parametrize("server", ["vllm", "vllm-tpu"])
def test_token_rows_are_refused(server):
    (reason,) = check_server(plan_for(*GEMMA3, rows=(46, 47)), server).reasons
    assert reason.startswith("2 trained rows of model.embed_tokens.weight are nothing that the server applies")


def test_embeddings_are_refused():
    (reason,) = check_server(plan_for(*GEMMA3, targets=("embed_tokens", "q_proj")), "vllm").reasons
    assert reason.startswith("model.embed_tokens.weight is adapted")


def test_keys_that_are_values_are_refused():
    """The server's fused projection gets no update for the values (the same in sgl-project/sglang#28199)."""
    (reason,) = check_server(plan_for(*GEMMA4, targets=ALL), "vllm").reasons
    assert reason.startswith("k_proj of layers 5, 11, 17,")


def test_fused_experts_need_their_flags():
    report = check_server(
        plan_for(*GEMMA4_EXPERTS, targets=("q_proj", "experts.gate_up_proj", "experts.down_proj")), "vllm"
    )
    assert report.reasons == ()
    arguments = shlex.split(report.command("base", "out/adapter", "mine"))
    assert "--enable-mixed-moe-lora-format" in arguments
    assert json.loads(arguments[-1]) == {"name": "mine", "path": "out/adapter", "is_3d_lora_weight": True}
    assert any("Triton" in note for note in report.notes)


def test_one_matrix_of_the_experts_is_refused():
    (reason,) = check_server(plan_for(*GEMMA4_EXPERTS, targets=("experts.down_proj",)), "vllm").reasons
    assert "experts is adapted in down_proj alone" in reason


def test_experts_take_no_adapter_on_tpu():
    (reason,) = check_server(plan_for(*GEMMA4_EXPERTS, targets=QV), "vllm-tpu").reasons
    assert reason.startswith("a model with experts takes no adapter on TPU")


@pytest.mark.parametrize("model", [GEMMA3, GEMMA3_MULTIMODAL])
def test_gemma3_on_tpu_falls_back_to_the_path_with_adapters(model):
    report = check_server(plan_for(*model), "vllm-tpu")
    assert report.works
    assert (report.path, report.environment) == ("torchax", {})
    assert report.command("base", "out").startswith("vllm serve base --enable-lora")


def test_gemma4_on_tpu_has_to_be_told():
    report = check_server(plan_for(*GEMMA4_SHARED), "vllm-tpu")
    assert report.works
    assert report.command("base", "out").startswith("MODEL_IMPL_TYPE=vllm vllm serve base --enable-lora")
    assert "takes no adapter" in report.notes[0]
    assert "merged model" in report.notes[0]


def test_unknown_models_are_not_vouched_for():
    plan = plan_for(*GEMMA3)
    plan.base.config["architectures"] = ["Gemma9ForCausalLM"]
    assert check_server(plan, "vllm").reasons == (
        "the names of its modules are not known for architecture Gemma9ForCausalLM",
    )


@pytest.mark.parametrize("folder", ["a,b", "it's here"])
def test_odd_paths_survive_shell_and_server(folder):
    argument = shlex.split(check_server(plan_for(*GEMMA3), "vllm").command("base", folder))[-1]
    # vLLM takes what holds a comma for JSON
    assert (json.loads(argument)["path"] if "," in argument else argument.partition("=")[2]) == folder
