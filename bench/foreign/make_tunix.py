"""Tiny random models of Tunix with LoRA, saved by its checkpoint manager, and their bases for Hugging Face.

    python make_tunix.py OUT

Needs google-tunix (0.1.7) and what it installs. Tunix's own safetensors loader reads every base back and has to give
the same logits, bit for bit; so the base is the model's, whatever we think of names and axes.
"""

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from case_folder import TOKENS, write_base, write_case
from flax import nnx
from orbax import checkpoint as ocp
from tunix.models.gemma3 import model as gemma3
from tunix.models.gemma3 import params_safetensors as gemma3_files
from tunix.models.gemma4 import model as gemma4
from tunix.models.gemma4 import params_safetensors as gemma4_files
from tunix.sft import checkpoint_manager

PACKAGES = ("google-tunix", "qwix", "flax", "jax", "jaxlib", "orbax-checkpoint", "tensorstore")
RANK, ALPHA = 4, 6.0
VOCAB, WIDTH, HIDDEN, HEADS, HEAD_DIM, WINDOW = 128, 40, 72, 4, 16, 5
GLOBAL_HEAD_DIM, EXPERTS, EXPERT_WIDTH, PER_LAYER = 24, 4, 12, 6
# As in Tunix's notebooks, and the modules that only Gemma 4 has.
DENSE = ".*(q_einsum|kv_einsum|k_einsum|attn_vec_einsum|gate_proj|up_proj|down_proj)"
PER_LAYER_INPUTS = ".*(per_layer_input_gate|per_layer_projection|per_layer_model_projection)"
LOCAL, GLOBAL = gemma4.AttentionType.LOCAL_SLIDING, gemma4.AttentionType.GLOBAL


@dataclass(frozen=True)
class Case:
    """A model, what LoRA adapts in it, and how it is saved.

    Attributes:
        config: of Tunix.
        hf: the settings of the text model's config.json that are not the same in all cases.
        modules: regular expression of qwix.
        only_lora: save the adapter alone, as Tunix's trainer does, or the whole model.
        fixed: parameters that keep their initial value.
    """

    config: Any
    hf: Mapping[str, Any]
    modules: str = DENSE
    only_lora: bool = True
    fixed: tuple[str, ...] = ()
    loader: Any = field(default=gemma4_files)


def cases() -> dict[str, Case]:
    """All cases by name."""
    grouped, fused = gemma3_config(kv_heads=2), gemma3_config(kv_heads=HEADS)
    dense = gemma4_config(num_global_kv_heads=1, k_eq_v_global=True, attention_pattern=(LOCAL, LOCAL, GLOBAL))
    small = gemma4_config(
        num_layers=8,
        per_layer_input_dim=PER_LAYER,
        frac_shared_layers=0.5,
        override_kv_shared_ffw_hidden=2 * HIDDEN,
        attention_pattern=(LOCAL, GLOBAL),
    )
    sparse = gemma4_config(
        num_global_kv_heads=1,
        k_eq_v_global=True,
        attention_pattern=(LOCAL, LOCAL, GLOBAL),
        enable_moe=True,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        expert_dim=EXPERT_WIDTH,
        moe_dense_hidden_dim=HIDDEN,
    )
    moe = {"enable_moe_block": True, "num_experts": EXPERTS, "top_k_experts": 2, "moe_intermediate_size": EXPERT_WIDTH}
    shared = {
        "num_kv_shared_layers": 4,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": PER_LAYER,
        "vocab_size_per_layer_input": VOCAB,
    }
    key_is_value = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    return {
        "tunix-gemma3": Case(grouped, {}, loader=gemma3_files),
        "tunix-gemma3-whole": Case(grouped, {}, loader=gemma3_files, only_lora=False),
        "tunix-gemma3-qkv": Case(fused, {}, ".*(qkv_einsum|attn_vec_einsum|gate_proj)", loader=gemma3_files),
        "tunix-gemma4-dense": Case(dense, key_is_value),
        "tunix-gemma4-e": Case(small, shared, f"{DENSE}|{PER_LAYER_INPUTS}", only_lora=False),
        # Tunix routes by the normed input, Hugging Face by the residual: the same only where the norm has no weight.
        "tunix-gemma4-moe": Case(sparse, {**key_is_value, **moe}, fixed=("moe_pre_ffw_norm",)),
    }


def gemma3_config(kv_heads: int) -> gemma3.ModelConfig:
    """Seven layers: a whole pattern of five sliding and one global, and one more."""
    return gemma3.ModelConfig(
        num_layers=7,
        num_embed=VOCAB,
        embed_dim=WIDTH,
        hidden_dim=HIDDEN,
        num_heads=HEADS,
        head_dim=HEAD_DIM,
        num_kv_heads=kv_heads,
        sliding_window_size=WINDOW,
        local_base_frequency=10_000,
        global_base_frequency=1_000_000,
        param_dtype=jnp.float32,
    )


def gemma4_config(**settings: Any) -> gemma4.ModelConfig:
    """Six layers unless told otherwise."""
    common = {
        "num_layers": 6,
        "num_embed": VOCAB,
        "embed_dim": WIDTH,
        "hidden_dim": HIDDEN,
        "num_heads": HEADS,
        "head_dim": HEAD_DIM,
        "num_kv_heads": 2,
        "global_key_size": GLOBAL_HEAD_DIM,
        "sliding_window_size": WINDOW,
    }
    return gemma4.ModelConfig(**common | settings)


def hf_config(case: Case) -> dict[str, Any]:
    """config.json of the same architecture."""
    config = case.config
    common = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": config.num_kv_heads,
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
    if isinstance(config, gemma3.ModelConfig):
        rope = {"rope_theta": 1_000_000, "rope_local_base_freq": 10_000, "sliding_window_pattern": 6}
        text = {"model_type": "gemma3_text", "query_pre_attn_scalar": HEAD_DIM, **rope}
        return {"architectures": ["Gemma3ForCausalLM"], **text, **common, **case.hf}
    pattern = config.attention_pattern
    kinds = ["full_attention" if kind is GLOBAL else "sliding_attention" for kind in pattern]
    text = {
        "model_type": "gemma4_text",
        "global_head_dim": GLOBAL_HEAD_DIM,
        "num_global_key_value_heads": None,
        "attention_k_eq_v": False,
        "layer_types": [kinds[i % len(kinds)] for i in range(config.num_layers)],
        "final_logit_softcapping": 30.0,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        **common,
        **case.hf,
    }
    wrapper = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "tie_word_embeddings": True}
    return {**wrapper, "text_config": text, "vision_config": None, "audio_config": None}


def hf_tensors(model: nnx.Module, config: Any) -> dict[str, np.ndarray]:
    """The base's weights under the names and in the layout that Tunix's loader expects."""
    prefix = "model." if isinstance(config, gemma3.ModelConfig) else "model.language_model."
    flat = {path: np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    return {prefix + name: value for path, leaf in flat.items() for name, value in hf_tensors_of(path, leaf)}


def hf_tensors_of(path: tuple[Any, ...], leaf: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors that one parameter of Tunix becomes."""
    layer = f"layers.{path[1]}." if path[0] == "layers" else ""
    name = ".".join(map(str, path[2:] if layer else path))
    if name in QKV:
        slots = leaf[None] if leaf.ndim == 3 else leaf
        for slot, slot_NDH in zip(QKV[name], slots, strict=True):
            matrix = slot_NDH.transpose(0, 2, 1).reshape(-1, slot_NDH.shape[1])
            yield f"{layer}self_attn.{slot}_proj.weight", matrix
    else:
        target, convert = OTHERS[name]
        yield layer + target, convert(leaf)


def transposed(leaf: np.ndarray) -> np.ndarray:
    """(in, out) -> (out, in)."""
    return leaf.T


def as_is(leaf: np.ndarray) -> np.ndarray:
    """The same array."""
    return leaf


QKV = {
    "attn.q_einsum.w": "q",
    "attn.k_einsum.w": "k",
    "attn.kv_einsum.w": "kv",
    "attn.qkv_einsum.w": "qkv",
}
OTHERS: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
    "embedder.input_embedding": ("embed_tokens.weight", as_is),
    "embedder.per_layer_input_embedding": ("embed_tokens_per_layer.weight", lambda v: v.reshape(len(v), -1)),
    "embedder.per_layer_model_projection.w": ("per_layer_model_projection.weight", lambda v: v.reshape(len(v), -1).T),
    "embedder.per_layer_projection_norm.scale": ("per_layer_projection_norm.weight", as_is),
    "final_norm.scale": ("norm.weight", as_is),
    "attn.attn_vec_einsum.w": ("self_attn.o_proj.weight", lambda v: v.reshape(-1, v.shape[2]).T),
    "attn._query_norm.scale": ("self_attn.q_norm.weight", as_is),
    "attn._key_norm.scale": ("self_attn.k_norm.weight", as_is),
    "mlp.gate_proj.kernel": ("mlp.gate_proj.weight", transposed),
    "mlp.up_proj.kernel": ("mlp.up_proj.weight", transposed),
    "mlp.down_proj.kernel": ("mlp.down_proj.weight", transposed),
    "pre_attention_norm.scale": ("input_layernorm.weight", as_is),
    "post_attention_norm.scale": ("post_attention_layernorm.weight", as_is),
    "pre_ffw_norm.scale": ("pre_feedforward_layernorm.weight", as_is),
    "post_ffw_norm.scale": ("post_feedforward_layernorm.weight", as_is),
    "per_layer_input_gate.w": ("per_layer_input_gate.weight", transposed),
    "per_layer_projection.w": ("per_layer_projection.weight", transposed),
    "post_per_layer_input_norm.scale": ("post_per_layer_input_norm.weight", as_is),
    "skip_scale": ("layer_scalar", as_is),
    "moe_pre_ffw_norm.scale": ("pre_feedforward_layernorm_2.weight", as_is),
    "moe_post_ffw_norm.scale": ("post_feedforward_layernorm_2.weight", as_is),
    "dense_post_ffw_norm.scale": ("post_feedforward_layernorm_1.weight", as_is),
    "moe.router_logits": ("router.proj.weight", transposed),
    "moe.router_scale": ("router.scale", as_is),
    "moe.per_expert_scale": ("router.per_expert_scale", as_is),
    "moe.gating_einsum": ("experts.gate_up_proj", lambda v: v.reshape(len(v), -1, v.shape[3])),
    "moe.linear": ("experts.down_proj", lambda v: v.transpose(0, 2, 1)),
}


def randomise(model: nnx.Module, kind: type, fixed: tuple[str, ...], seed: int) -> None:
    """Draw new values, small enough for logits of a few units."""
    random = np.random.default_rng(seed)
    for path, leaf in nnx.to_flat_state(nnx.state(model, kind)):
        name = ".".join(map(str, path))
        if not any(part in name for part in fixed):
            value, shape = leaf[...], leaf[...].shape
            around = 1.0 if name.endswith("scale") and "gemma4" in type(model).__module__ else 0.0
            leaf.set_value(jnp.asarray(around + random.normal(0, 0.15, shape), value.dtype))
            assert leaf[...].shape == shape


def logits(model: nnx.Module) -> np.ndarray:
    """f32 [B, T, V]."""
    tokens = jnp.asarray(TOKENS)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool)), (len(TOKENS), *(tokens.shape[1],) * 2))
    return np.asarray(model(tokens, positions, None, causal)[0])


def make(folder: Path, case: Case) -> None:
    """Build, check, adapt, save."""
    model_class = gemma3.Gemma3 if isinstance(case.config, gemma3.ModelConfig) else gemma4.Gemma4
    model = model_class(case.config, rngs=nnx.Rngs(0))
    randomise(model, nnx.Param, case.fixed, seed=1)
    tensors = hf_tensors(model, case.config)
    write_base(folder / "base", hf_config(case), tensors)
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with mesh:
        loaded = case.loader.create_model_from_safe_tensors(str(folder / "base"), case.config, mesh, jnp.float32)
        np.testing.assert_array_equal(logits(loaded), logits(model), err_msg=f"{folder.name}: not the same base")
        provider = qwix.LoraProvider(module_path=case.modules, rank=RANK, alpha=ALPHA)
        adapted = qwix.apply_lora_to_model(model, provider, rngs=nnx.Rngs(0), **model.get_model_input())
        randomise(adapted, nnx.LoRAParam, (), seed=2)
        options = ocp.CheckpointManagerOptions(max_to_keep=None)
        manager = checkpoint_manager.CheckpointManager(str((folder / "run").resolve()), options)
        manager.save(3, adapted, save_only_lora_params=case.only_lora, force=True)
        manager.close()
        write_case(
            folder,
            origin="tunix",
            rank=RANK,
            alpha=ALPHA,
            pass_alpha=True,
            logits=logits(adapted),
            packages=PACKAGES,
            item=folder / "run/3/model_params",
        )


def main(out: Path) -> None:
    """Make all cases, or none of a name that exists."""
    jax.config.update("jax_default_matmul_precision", "highest")
    out.mkdir(parents=True, exist_ok=True)
    for name, case in cases().items():
        with tempfile.TemporaryDirectory(dir=out) as scratch:
            make(Path(scratch) / name, case)
            shutil.move(Path(scratch) / name, out / name)
        print(f"{name}: made")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
