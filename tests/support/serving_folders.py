"""Model and adapter folders as they are published, made tiny: real files, read by the same code."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from portlab_spec.files import write_json
from portlab_spec.formats import find_format
from portlab_spec.models.config import GemmaConfig
from portlab_spec.models.published import published_json
from portlab_spec.models.table import param_table
from portlab_spec.safetensors_file import Writer
from portlab_spec.tokenizer import FUNCTION_TOKENS, GEMMA4_TOKENS

F32 = np.dtype(np.float32)
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "head_dim": 8, "vocab_size": 128}
# What a published config has of these gets this value.
TINY = {
    "num_key_value_heads": 1, "global_head_dim": 16, "num_global_key_value_heads": 1, "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 128,
    "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8,
}  # fmt: skip
GEMMA3_TOKENS = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "<start_of_turn>": 105, "<end_of_turn>": 106}
STOPS = {"functiongemma": [1, 106, 50], "gemma3-json": [1, 106], "gemma4": [1, 106, 50]}


def tiny_config(published: str, architecture: str) -> dict[str, Any]:
    """A published config with small dimensions and few layers; every kind of layer stays."""
    raw = published_json(published)
    assert raw
    raw = json.loads(json.dumps(raw)) | {"architectures": [architecture]}
    text = raw.get("text_config", raw)
    text |= SMALL | {"num_hidden_layers": 6}
    for key, value in TINY.items():
        if text.get(key):
            text[key] = value
    if "layer_types" in text:
        text["layer_types"] = ["sliding_attention"] * 2 + ["full_attention"] + text["layer_types"][-3:]
    return raw


def write_weights(path: Path, tensors: dict[str, np.ndarray]) -> None:
    with Writer(path, {name: (array.dtype, array.shape) for name, array in tensors.items()}) as writer:
        for name, array in tensors.items():
            writer.write(name, array)


def tensors_of(raw: dict[str, Any], prefix: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    config = GemmaConfig.from_dict(raw)
    shapes = {name: param.shape for param in param_table(config) for name in param.tensor_names(prefix)}
    # Published checkpoints hold these for layers that share keys too, which need none.
    shapes |= {
        f"{prefix}layers.{i}.self_attn.k_norm.weight": (kind.head_dim,)
        for i, kind in enumerate(config.layers)
        if kind.shares_kv
    }
    return {name: rng.standard_normal(shape).astype(F32) for name, shape in shapes.items()}


def adapter_tensors(
    raw: dict[str, Any], prefix: str, rank: int, only: Callable[[str], bool] = lambda module: True, scale: float = 1.0
) -> dict[str, np.ndarray]:
    """Random factors, as PEFT names them, of the linear layers of the model with this config.json."""
    rng = np.random.default_rng(1)
    tensors = {}
    for param in param_table(GemmaConfig.from_dict(raw)):
        for module in param.modules(prefix):
            if param.target and len(param.shape) == 2 and only(module):
                key = f"base_model.model.{module}"
                tensors[f"{key}.lora_A.weight"] = (scale * rng.standard_normal((rank, param.shape[1]))).astype(F32)
                tensors[f"{key}.lora_B.weight"] = (scale * rng.standard_normal((param.shape[0], rank))).astype(F32)
    return tensors


def tokens_of(tool_format: str) -> dict[str, int]:
    named = {"functiongemma": FUNCTION_TOKENS, "gemma4": GEMMA4_TOKENS}.get(tool_format, {})
    base = {k: v for k, v in GEMMA3_TOKENS.items() if v not in named.values()}
    tokens = base | named
    assert set(find_format(tool_format).control_tokens) <= set(tokens)
    return tokens


class Model:
    """A model folder that can be spoilt, one thing at a time."""

    def __init__(self, folder: Path, published: str, architecture: str, prefix: str, tool_format: str) -> None:
        self.path, self.prefix = folder, prefix
        self.raw = tiny_config(published, architecture)
        folder.mkdir()
        self.write_config()
        self.tensors = tensors_of(self.raw, prefix)
        self.write_tensors()
        write_json(folder / "generation_config.json", {"eos_token_id": STOPS[tool_format]})
        self.write_tokens(tokens_of(tool_format))
        if "ConditionalGeneration" in architecture:
            write_json(folder / "processor_config.json", {})

    def write_config(self, **changed: Any) -> None:
        self.raw |= changed
        write_json(self.path / "config.json", self.raw)

    def write_tensors(self, **changed: np.ndarray) -> None:
        self.tensors |= changed
        write_weights(self.path / "model.safetensors", self.tensors)

    def rename(self, prefix: str) -> None:
        self.tensors = {prefix + name.removeprefix(self.prefix): array for name, array in self.tensors.items()}
        self.prefix = prefix
        self.write_tensors()

    def write_tokens(self, tokens: dict[str, int]) -> None:
        write_json(self.path / "tokenizer.json", {"added_tokens": [{"content": t, "id": i} for t, i in tokens.items()]})

    def adapter(
        self,
        folder: Path,
        *,
        rank: int = 4,
        only: Callable[[str], bool] = lambda module: True,
        prefix: str = "",
        **config: Any,
    ) -> str:
        """A PEFT adapter of its linear layers; `prefix` names modules otherwise than the model does."""
        folder.mkdir(exist_ok=True)
        tensors = adapter_tensors(self.raw, prefix or self.prefix, rank, only)
        write_weights(folder / "adapter_model.safetensors", tensors)
        settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": "all-linear"}
        settings |= {"base_model_name_or_path": self.path.name}
        write_json(folder / "adapter_config.json", settings | config)
        return str(folder)
