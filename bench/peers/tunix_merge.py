"""Save a merged model with Tunix's save_lora_merged_model_as_safetensors.

    python tunix_merge.py BASE ADAPTER OUT RANK ALPHA

It wants a live model with LoRA layers, which at the end of a training is there. Making it is not Tunix's merge, so
OUT.json has the seconds of the call alone, from a cold base until the output is on disk; memory is the process's.
"""

import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import qwix
from disk import forget, put_on_disk
from flax import nnx
from safetensors.flax import load_file
from tunix.models.gemma3 import model as gemma3
from tunix.models.gemma3 import params, params_safetensors

# PEFT's module -> Tunix's module and its weight; keys and values are one module.
MODULES = {
    "self_attn.q_proj": ("attn", "q_einsum", "w"),
    "self_attn.o_proj": ("attn", "attn_vec_einsum", "w"),
    "mlp.gate_proj": ("mlp", "gate_proj", "kernel"),
    "mlp.up_proj": ("mlp", "up_proj", "kernel"),
    "mlp.down_proj": ("mlp", "down_proj", "kernel"),
}


def model_config(base: Path) -> gemma3.ModelConfig:
    """Tunix's configuration from Hugging Face's."""
    raw = json.loads((base / "config.json").read_text())
    return gemma3.ModelConfig(
        num_layers=raw["num_hidden_layers"],
        num_embed=raw["vocab_size"],
        embed_dim=raw["hidden_size"],
        hidden_dim=raw["intermediate_size"],
        num_heads=raw["num_attention_heads"],
        head_dim=raw["head_dim"],
        num_kv_heads=raw["num_key_value_heads"],
        sliding_window_size=raw["sliding_window"],
        local_base_frequency=int(raw["rope_local_base_freq"]),
        global_base_frequency=int(raw["rope_theta"]),
        param_dtype=jnp.bfloat16,
    )


def adapted_model(base: Path, adapter: Path, rank: int, alpha: float) -> nnx.Module:
    """The base with LoRA layers that hold the adapter's values."""
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with mesh:  # not jax.set_mesh: Tunix asks the context that this sets
        model = params_safetensors.create_model_from_safe_tensors(
            str(base), model_config(base), mesh, dtype=jnp.bfloat16
        )
        modules = ".*(q_einsum|kv_einsum|attn_vec_einsum|gate_proj|up_proj|down_proj)"
        provider = qwix.LoraProvider(module_path=modules, rank=rank, alpha=alpha)
        model = qwix.apply_lora_to_model(model, provider, rngs=nnx.Rngs(0), **model.get_model_input())
    values = load_file(adapter / "adapter_model.safetensors")

    def value(layer: int, module: str, side: str) -> jax.Array:
        return values[f"base_model.model.model.layers.{layer}.{module}.lora_{side}.weight"].T

    for number, layer in enumerate(model.layers):
        for module, (block, name, weight) in MODULES.items():
            for side in "ab":
                leaf = getattr(getattr(getattr(layer, block), name), f"{weight}_lora_{side}")
                set_value(leaf, value(number, module, side.upper()))
        keys_and_values = layer.attn.kv_einsum
        set_value(keys_and_values.w_lora_a, value(number, "self_attn.k_proj", "A"))
        both = [value(number, f"self_attn.{which}_proj", "B") for which in "kv"]
        set_value(keys_and_values.w_lora_b, jnp.stack(both, axis=1))  # (r, 2, kv heads * head_dim)
    return model


def set_value(leaf: nnx.Param, value: jax.Array) -> None:
    """Put a matrix into a leaf, whose axes may be split further and whose type is the model's."""
    held = leaf.get_value()
    leaf.set_value(jnp.asarray(value.reshape(held.shape), held.dtype))


def main(base: Path, adapter: Path, out: Path, rank: int, alpha: float) -> None:
    """Merge and leave OUT.json."""
    model = adapted_model(base, adapter, rank, alpha)
    forget(base)
    started = time.perf_counter()
    params.save_lora_merged_model_as_safetensors(str(base), str(out), model, rank, alpha)
    put_on_disk(out)
    Path(f"{out}.json").write_text(json.dumps({"call_seconds": time.perf_counter() - started}))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), int(sys.argv[4]), float(sys.argv[5]))
