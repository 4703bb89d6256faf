"""Tiny random Gemma 3 models of transformers beside the same weights in our layout."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from portlab_jax.mesh import MeshPlan
from portlab_jax.weights import load_params
from portlab_spec.models import GemmaConfig, param_table
from portlab_spec.recipe import Mesh

VOCAB = 96

# Each case is small enough to differentiate in a second and large enough to hold both layer kinds.
CASES = {
    "two kv heads, window 6": {"num_key_value_heads": 2, "sliding_window": 6},
    "one kv head, window 6": {"num_key_value_heads": 1, "sliding_window": 6},
    "window longer than any row": {"num_key_value_heads": 2, "sliding_window": 64},
    "scaled global rope": {"num_key_value_heads": 1, "sliding_window": 8, "rope_factor": 8.0},
}


def tiny_model(folder, *, num_key_value_heads=2, sliding_window=6, rope_factor=None, layers=4, seed=0):
    full_rope = {"rope_type": "default", "rope_theta": 1e6}
    if rope_factor:
        full_rope = {"rope_type": "linear", "factor": rope_factor, "rope_theta": 1e6}
    config = Gemma3TextConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=num_key_value_heads,
        head_dim=16,
        sliding_window=sliding_window,
        query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2),
        rope_parameters={
            "full_attention": full_rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        max_position_embeddings=512,
        attn_implementation="eager",
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    model = Gemma3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Larger than the default, so that attention is far from uniform and errors show.
            parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    return model


class Tiny:
    """One random model in both frameworks."""

    def __init__(self, folder, **case):
        self.folder = folder
        self.torch = tiny_model(folder, **case)
        self.config = GemmaConfig.load(folder)
        self.mesh = MeshPlan.create(Mesh(), devices=None)
        self.params = load_params(folder, self.config, jnp.float32, self.mesh)
        self.raw_config = json.loads((folder / "config.json").read_text())


@pytest.fixture(scope="session", params=list(CASES))
def tiny(request, tmp_path_factory):
    return Tiny(tmp_path_factory.mktemp("tiny"), **CASES[request.param])


@pytest.fixture(scope="session")
def tiny_one(tmp_path_factory):
    return Tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture(scope="session")
def tiny_chat_folder(tmp_path_factory):
    """A tiny random Gemma with the real tokenizer: the whole command line runs on it in seconds."""
    from portlab_spec.assets import default_model

    folder = tmp_path_factory.mktemp("tiny-chat")
    real = default_model().path
    config = json.loads((real / "config.json").read_text()) | {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((real / name).read_bytes())
    rng = np.random.default_rng(0)
    layout = {}
    for param in param_table(GemmaConfig.load(folder)):
        for i in range(2 if param.per_layer else 1):
            layout[param.hf.format(i=i)] = param.shape
    tensors = {name: rng.normal(0, 0.3, shape).astype(ml_dtypes.bfloat16) for name, shape in layout.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
