"""Tiny random models of transformers: Gemmas, which together hold every kind of layer there is, and other families."""

# Annotations are not evaluated and torch is imported late: these names load what takes ten seconds, which the many
# processes that only look at the cases need not wait for.
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import transformers

VOCAB = 96
SLIDING, FULL = "sliding_attention", "full_attention"

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "attn_implementation": "eager",
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def gemma3(
    *,
    num_key_value_heads: int = 2,
    sliding_window: int = 6,
    rope_factor: float | None = None,
    layers: int = 4,
    **more: Any,
) -> transformers.Gemma3ForCausalLM:
    full_rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e6}
    if rope_factor:
        full_rope = {"rope_type": "linear", "factor": rope_factor, "rope_theta": 1e6}
    settings = {
        "num_hidden_layers": layers,
        "num_key_value_heads": num_key_value_heads,
        "head_dim": 16,
        "sliding_window": sliding_window,
        "query_pre_attn_scalar": 16,
        "layer_types": [SLIDING, FULL] * (layers // 2),
        "rope_parameters": {FULL: full_rope, SLIDING: {"rope_type": "default", "rope_theta": 1e4}},
    }
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**COMMON | settings | more))


def gemma4(layer_types: Sequence[str] = (SLIDING, SLIDING, FULL) * 2, **more: Any) -> transformers.Gemma4ForCausalLM:
    settings = {
        "num_hidden_layers": len(layer_types),
        "layer_types": list(layer_types),
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 6,
        "final_logit_softcapping": 30.0,
        "hidden_size_per_layer_input": 0,
    }
    return transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**COMMON | settings | more))


# Each case is small enough to differentiate in seconds.
CASES: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "gemma3, two kv heads": gemma3,
    "gemma3, one kv head, wide window": lambda: gemma3(num_key_value_heads=1, sliding_window=64),
    "gemma3, scaled global rope": lambda: gemma3(num_key_value_heads=1, sliding_window=8, rope_factor=8.0),
    # As 12B and 31B: keys are values in full layers, which have heads of their own shape.
    "gemma4, keys are values": lambda: gemma4(attention_k_eq_v=True, num_global_key_value_heads=1),
    # As E2B: per-layer inputs, the last layers share keys and values and have a double-wide MLP.
    "gemma4, shared keys and values": lambda: gemma4(
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB,
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
    ),
    # As 26B-A4B.
    "gemma4, experts": lambda: gemma4(
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        enable_moe_block=True,
        num_experts=6,
        top_k_experts=2,
        moe_intermediate_size=24,
    ),
    "gemma4, no pattern": lambda: gemma4(
        (SLIDING, FULL, SLIDING, SLIDING, FULL), hidden_size_per_layer_input=8, num_kv_shared_layers=2
    ),
}


def other(config: str, **more: Any) -> transformers.PreTrainedModel:
    settings = {"num_hidden_layers": 2, "num_key_value_heads": 2}
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**COMMON | settings | more))


# Families that differ in little: a head of its own or the embedding's, a window, biases, norms of queries and keys.
OTHERS: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "llama": lambda: other("LlamaConfig", tie_word_embeddings=False),
    "mistral": lambda: other("MistralConfig", sliding_window=6, head_dim=16, tie_word_embeddings=False),
    "qwen2": lambda: other(
        "Qwen2Config", use_sliding_window=True, sliding_window=6, max_window_layers=1, tie_word_embeddings=True
    ),
    "qwen3": lambda: other("Qwen3Config", num_key_value_heads=1, head_dim=16, tie_word_embeddings=True),
}


def randomize[M: transformers.PreTrainedModel](model: M, seed: int = 0) -> M:
    """Weights larger than the default, so that attention is far from uniform and errors show."""
    import torch

    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    return model.eval()
