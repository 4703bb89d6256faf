"""Tiny random models of MaxText with LoRA, saved as its trainers save them, and their bases for Hugging Face.

    python make_maxtext.py OUT [CASE ...]

Needs maxtext 0.2.5 with google-tunix 0.1.7 and what they import. The bases are converted by MaxText's own mapping.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import maxtext
import numpy as np
import optax
from case_folder import TOKENS, write_base, write_case
from flax import nnx
from flax.core.spmd import logical_axis_rules
from maxtext.checkpoint_conversion import to_huggingface
from maxtext.checkpoint_conversion.utils.utils import process_maxtext_param, validate_and_filter_param_map_keys
from maxtext.common import checkpointing
from maxtext.common.train_state_nnx import TrainStateNNX
from maxtext.configs import pyconfig
from maxtext.trainers.post_train.sft import train_sft
from maxtext.utils import lora_utils, maxtext_utils, model_creation_utils

PACKAGES = ("maxtext", "google-tunix", "qwix", "flax", "jax", "jaxlib", "orbax-checkpoint", "tensorstore")
RANK, ALPHA, STEP = 3, 4.5, 7
# The width is a square, so that the root that MaxText multiplies into its embedding is exact in bf16.
VOCAB, WIDTH, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WINDOW = 128, 36, 56, 4, 2, 16, 5
GLOBAL_HEAD_DIM, EXPERTS, EXPERT_WIDTH, PER_LAYER = 24, 4, 12, 6
# MaxText's default patterns (configs/post_train/lora_module_path.yml) miss Gemma 3 unscanned and Gemma 4 scanned.
DENSE = "decoder/.*(self_attention/(query|key|value|out)|mlp/.*(wi_0|wi_1|wo))"
LOCAL = "decoder/.*local_layers/.*(self_attention/(query|key|value|out)|mlp/(wi_0|wi_1|wo))"


@dataclass(frozen=True)
class Case:
    """A model and how it is saved.

    Attributes:
        model: MaxText's name of the family.
        layers: how many.
        scan: layers are stacked.
        settings: further settings of MaxText.
        hf: settings of config.json that only this case has.
        modules: LoRA's pattern; MaxText's default if empty.
        saves: ways of saving: "pretrain" MaxText's own checkpoints, of adapter and optimiser; "whole" the same of all
            weights; "sft" the trainer of Tunix that MaxText's fine-tuning uses.
    """

    model: str
    layers: int
    scan: bool
    settings: tuple[str, ...] = ()
    hf: tuple[tuple[str, Any], ...] = ()
    modules: str = ""
    saves: tuple[str, ...] = ("pretrain",)


GLOBAL = (f"global_head_dim={GLOBAL_HEAD_DIM}", "global_num_kv_heads=1")
GLOBAL_HF = (("global_head_dim", GLOBAL_HEAD_DIM), ("num_global_key_value_heads", 1))
SPARSE = (
    f"num_experts={EXPERTS}",
    "num_experts_per_tok=2",
    f"base_moe_mlp_dim={EXPERT_WIDTH}",
    "sparse_matmul=False",
    "megablox=False",
)
SPARSE_HF = (
    ("enable_moe_block", True),
    ("num_experts", EXPERTS),
    ("top_k_experts", 2),
    ("moe_intermediate_size", EXPERT_WIDTH),
)
SMALL = (
    "num_kv_shared_layers=3",
    f"hidden_size_per_layer_input={PER_LAYER}",
    f"vocab_size_per_layer_input={VOCAB}",
)
SMALL_HF = (
    ("num_kv_shared_layers", 3),
    ("use_double_wide_mlp", True),
    ("hidden_size_per_layer_input", PER_LAYER),
    ("vocab_size_per_layer_input", VOCAB),
)
KEY_IS_VALUE = (("attention_k_eq_v", True),)
CASES = {
    "maxtext-gemma3-scanned": Case("gemma3-4b", 13, True, saves=("pretrain", "sft")),
    "maxtext-gemma3": Case("gemma3-4b", 7, False, modules=DENSE, saves=("whole",)),
    # Whole blocks only: in Hugging Face's model the last layer is a global one.
    "maxtext-gemma4-scanned": Case(
        "gemma4-31b", 12, True, GLOBAL, GLOBAL_HF + KEY_IS_VALUE, DENSE, saves=("pretrain", "sft")
    ),
    "maxtext-gemma4-e": Case(
        "gemma4-e2b",
        10,
        False,
        GLOBAL[:1] + SMALL,
        GLOBAL_HF[:1] + SMALL_HF,
        f"{DENSE}|decoder/.*(per_layer_input_gate|per_layer_projection|per_layer_model_projection)",
        saves=("sft",),
    ),
    "maxtext-gemma4-moe": Case(
        "gemma4-26b",
        6,
        False,
        GLOBAL + SPARSE,
        GLOBAL_HF + SPARSE_HF + KEY_IS_VALUE,
        f"{DENSE}|decoder/.*MoeBlock_0/gate",
        saves=("pretrain",),
    ),
}


def maxtext_config(case: Case, out: Path) -> Any:
    """MaxText's config, LoRA included."""
    base = Path(maxtext.__file__).parent / "configs/base.yml"
    settings = [
        f"model_name={case.model}",
        "override_model_config=True",
        "run_name=case",
        f"base_output_directory={out}",
        f"base_num_decoder_layers={case.layers}",
        f"base_emb_dim={WIDTH}",
        f"base_num_query_heads={HEADS}",
        f"base_num_kv_heads={KV_HEADS}",
        f"base_mlp_dim={HIDDEN}",
        f"head_dim={HEAD_DIM}",
        f"vocab_size={VOCAB}",
        f"sliding_window_size={WINDOW}",
        "rope_linear_scaling_factor=1.0",
        f"scan_layers={case.scan}",
        "dtype=float32",
        "weight_dtype=float32",
        "matmul_precision=highest",
        "attention=dot_product",
        f"per_device_batch_size={len(TOKENS)}",
        f"max_target_length={len(TOKENS[0])}",
        "remat_policy=none",
        "dataset_type=synthetic",
        "async_checkpointing=False",
        "skip_jax_distributed_system=True",
        "lora.enable_lora=True",
        f"lora.lora_rank={RANK}",
        f"lora.lora_alpha={ALPHA}",
    ]
    if case.modules:
        settings.append(f"lora.lora_module_path={case.modules}")
    return pyconfig.initialize_pydantic(["make_maxtext", str(base), *settings, *case.settings])


def hf_config(case: Case) -> dict[str, Any]:
    """config.json of the same architecture."""
    common = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": case.layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "sliding_window": WINDOW,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 1,
    }
    if case.model.startswith("gemma3"):
        rope = {"rope_theta": 1_000_000, "rope_local_base_freq": 10_000, "sliding_window_pattern": 6}
        text = {"model_type": "gemma3_text", "query_pre_attn_scalar": HEAD_DIM, **rope}
        return {"architectures": ["Gemma3ForCausalLM"], **text, **common, **dict(case.hf)}
    period = 5 if case.model == "gemma4-e2b" else 6
    return {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "attention_k_eq_v": False,
        "layer_types": [
            "full_attention" if i % period == period - 1 else "sliding_attention" for i in range(case.layers)
        ],
        "final_logit_softcapping": 30.0,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        **common,
        **dict(case.hf),
    }


def hf_tensors(model: nnx.Module, case: Case, config: Any) -> dict[str, np.ndarray]:
    """The base's weights by MaxText's own conversion, under the prefix of a text model."""
    text = {**hf_config(case), "moe_intermediate_size": EXPERT_WIDTH}
    vision = dict.fromkeys(("num_hidden_layers", "hidden_size", "intermediate_size", "num_channels"), 0)
    wrapper = {"text_config": text}
    if case.model.startswith("gemma3"):
        wrapper["vision_config"] = {**vision, "patch_size": 1, "image_size": 1}
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    state = {"params-" + "-".join(map(str, path)): leaf[...] for path, leaf in flat}
    mappings = to_huggingface._get_model_mappings(case.model, case.scan, wrapper, config)
    names, hooks = mappings["param_mapping"], mappings["hook_fn_mapping"]
    names = {key: value for key, value in names.items() if "vision" not in str(key)}
    keys = validate_and_filter_param_map_keys(names, set(state))
    tensors: dict[str, Any] = {}
    for key in keys:
        weight = [state.pop(part) for part in key] if isinstance(key, tuple) else state.pop(key)
        tensors |= process_maxtext_param(key, weight, names, hooks, mappings["shape_mapping"], config)
    assert not state, f"not converted: {sorted(state)}"
    return {name.replace("model.language_model.", "model."): np.asarray(value) for name, value in tensors.items()}


def adapt(model: nnx.Module, mesh: Any, config: Any) -> nnx.Module:
    """Add LoRA by MaxText's function; in scanned global layers of Gemma 4 it needs to find the leaves there.

    Those layers run in a loop of one turn that carries their state, and MaxText 0.2.5 fails where a carry grows. (Once
    the leaves are there, it computes with them.) They get the axes of every other scanned layer.
    """
    if not hasattr(model.decoder, "scanned_blocks"):
        return lora_utils.apply_lora_to_model(model, mesh, config)
    pattern, config.lora.lora_module_path = config.lora.lora_module_path, LOCAL
    model = lora_utils.apply_lora_to_model(model, mesh, config)
    blocks = model.decoder.scanned_blocks
    for path, module in list(nnx.iter_modules(blocks.global_layer)):
        if "kernel" in vars(module):
            kernel = module.kernel[...]
            count, inputs = kernel.shape[1], kernel.shape[0] * (kernel.shape[2] if path[-1] == "out" else 1)
            outputs = kernel.size // count // inputs
            module.kernel_lora_a = nnx.LoRAParam(jnp.zeros((inputs, count, RANK)), param_scan_axis=1)
            module.kernel_lora_b = nnx.LoRAParam(jnp.zeros((RANK, count, outputs)), param_scan_axis=1)
    config.lora.lora_module_path = pattern
    return lora_utils.apply_lora_to_model(model, mesh, config)


def randomise(model: nnx.Module, kind: type, seed: int) -> None:
    """Draw new values, small enough for logits of a few units; scales around one, embeddings times the root."""
    random = np.random.default_rng(seed)
    for path, leaf in nnx.to_flat_state(nnx.state(model, kind)):
        name, shape = ".".join(map(str, path)), leaf[...].shape
        around = 1.0 if "scal" in name.rpartition(".")[2] else 0.0
        value = jnp.asarray(around + random.normal(0, 0.15, shape), leaf[...].dtype)
        if name == "token_embedder.embedding":  # MaxText rounds it to bf16 as the output matrix, whatever its dtype
            value = (value * WIDTH**0.5).astype(jnp.bfloat16).astype(value.dtype)
        leaf.set_value(value)


def logits(model: nnx.Module) -> np.ndarray:
    """f32 [B, T, V]."""
    tokens = jnp.asarray(TOKENS)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return np.asarray(model(tokens, positions, jnp.ones_like(tokens), enable_dropout=False, model_mode="train"))


def save_pretrain(model: nnx.Module, config: Any, folder: Path, *, whole: bool) -> Path:
    """As MaxText's own training loop: item `items`, LoRA settings in the metadata."""
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.LoRAParam)
    config = config.model_copy(update={"lora": config.lora.model_copy(update={"enable_lora": not whole})})
    manager = checkpointing.create_orbax_checkpoint_manager(str(folder), True, use_async=False, save_interval_steps=1)
    checkpointing.save_checkpoint(manager, STEP, TrainStateNNX(model, optimizer), config, force=True)
    manager.close()
    return folder / str(STEP) / "items"


def save_sft(model: nnx.Module, config: Any, folder: Path) -> Path:
    """As MaxText's fine-tuning, which leaves it to Tunix: item `model_params`, no metadata."""
    settings = train_sft.get_tunix_config(config)
    settings.checkpoint_root_directory = str(folder)
    trainer = train_sft.MaxTextPeftTrainer(model, optax.adam(1e-3), settings)
    trainer.close()  # saves the step that it is at
    return folder / "0" / "model_params"


def make(name: str, case: Case, out: Path) -> Iterator[Path]:
    """Build, convert, adapt, save; yields the folder of each way of saving."""
    config = maxtext_config(case, out / "maxtext")
    mesh = maxtext_utils.get_mesh_from_config(config)
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        model = model_creation_utils.from_config(config, mesh=mesh, rngs=nnx.Rngs(params=0, dropout=1))
        randomise(model, nnx.Param, seed=1)
        tensors = hf_tensors(model, case, config)
        plain = logits(model)
        model = adapt(model, mesh, config)
        randomise(model, nnx.LoRAParam, seed=2)
        nnx.pop(model, nnx.Intermediate)
        adapted = logits(model)
        assert np.abs(adapted - plain).max() > 0.1, "the adapter does nothing"
        nnx.pop(model, nnx.Intermediate)
        for way in case.saves:
            folder = out / (name if len(case.saves) == 1 else f"{name}-{way}")
            write_base(folder / "base", hf_config(case), tensors)
            run = (folder / "run").resolve()
            item = (
                save_sft(model, config, run)
                if way == "sft"
                else save_pretrain(model, config, run, whole=way == "whole")
            )
            write_case(
                folder,
                origin="maxtext",
                rank=RANK,
                alpha=ALPHA,
                pass_alpha=way == "sft",
                logits=adapted,
                packages=PACKAGES,
                item=item,
            )
            np.save(folder / "base_logits.npy", plain)
            yield folder


def main(out: Path, names: Mapping[str, Case]) -> None:
    """Make the cases, or none of a name that exists."""
    jax.config.update("jax_default_matmul_precision", "highest")
    out.mkdir(parents=True, exist_ok=True)
    for name, case in names.items():
        with tempfile.TemporaryDirectory(dir=out) as scratch:
            for folder in make(name, case, Path(scratch)):
                shutil.move(folder, out / folder.name)
                print(f"{folder.name}: made")


if __name__ == "__main__":
    main(Path(sys.argv[1]), {name: CASES[name] for name in sys.argv[2:] or CASES})
