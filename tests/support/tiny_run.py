"""A tiny model's folder, its data and its recipe: short whole runs of any trainer.

The model has the ids of Gemma's control tokens and one token for every other character, so that all of a command
line runs on it, in a step of milliseconds. Nothing here imports torch or jax: that is left until the device is known.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import save_file
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteFallback, Fuse
from tokenizers.decoders import Sequence as Decoders
from tokenizers.models import BPE

from portlab_spec.data.tokens import Row
from portlab_spec.formats.qwen3 import REFUSED_TOKENS
from portlab_spec.models import GemmaConfig, param_table
from portlab_spec.recipe import Recipe
from portlab_spec.run.data import load_run_data, tokenize_run
from portlab_spec.tokenizer import FUNCTION_TOKENS, Tokenizer

BYTES = 238  # id of the byte 0 in Gemma's vocabulary
VOCAB = 640
SPECIAL = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "<start_of_turn>": 105, "<end_of_turn>": 106}
CONTROLS = SPECIAL | FUNCTION_TOKENS
QWEN3_CONTROLS = dict(list(SPECIAL.items())[:4]) | {token: 10 + i for i, token in enumerate(REFUSED_TOKENS)}
SLIDING, FULL = "sliding_attention", "full_attention"

GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": 16,
    "layer_types": [SLIDING, FULL],
    "max_position_embeddings": 1024,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "dtype": "float32",
}

# A head of its own.
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "dtype": "float32",
}
QWEN3 = LLAMA | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 8,
    "tie_word_embeddings": True,
}

SETTINGS: dict[str, Any] = {
    "name": "tiny",
    "steps": 6,
    "batch_size": 4,
    "max_length": 512,
    "max_new_tokens": 4,
    "save_every": 2,
    "dtype": "float32",
    "lora": {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj", "down_proj"]},
    "optimizer": {"learning_rate": 1e-2},
}


def save_model(folder: Path, config: Mapping[str, Any] = GEMMA3, *, seed: int = 0) -> Path:
    """A model with random float32 weights, larger than a fresh one's: attention is far from uniform."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    generation = {"bos_token_id": 2, "eos_token_id": [1, 106, 50], "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    rng = np.random.default_rng(seed)
    shapes = {name: p.shape for p in param_table(GemmaConfig.load(folder)) for name in p.tensor_names("model.")}
    tensors = {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path, controls: Mapping[str, int] = CONTROLS) -> None:
    """A tokenizer of Gemma's kind whose every byte is a token, beside control tokens."""
    vocab = dict(controls) | {f"<0x{byte:02X}>": BYTES + byte for byte in range(256)}
    taken = set(vocab.values())
    vocab |= {f"<unused{i}>": i for i in range(VOCAB) if i not in taken}
    backend = Backend(BPE(vocab, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in controls])
    backend.decoder = Decoders([ByteFallback(), Fuse()])
    backend.save(str(folder / "tokenizer.json"))
    names = {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "pad", "unk")}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def save_data(path: Path) -> Path:
    """Twelve questions to train on, five of each held-out split, about two tools."""
    tools = [
        {"name": name, "description": about, "parameters": {"type": "object", "properties": {}}}
        for name, about in (("steps", "Steps."), ("sleep", "Sleep."))
    ]
    rows = []
    for split, count in (("train", 12), ("validation", 5), ("test", 5)):
        for i in range(count):
            name = tools[i % 2]["name"]
            question = {"role": "user", "content": f"My {name} on {split} day {i * i}?"}
            answer = {"role": "assistant", "tool_calls": [{"name": name, "arguments": {}}]}
            rows.append({"id": f"{split}-{i}", "split": split, "tools": tools, "messages": [question, answer]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Interrupted(Exception):
    """A run was interrupted on purpose."""


class TinyRuns:
    """A folder with the tiny model, its data and the runs on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = save_model(folder / "model")
        self.data = save_data(folder / "data.jsonl")

    def recipe_file(self, **changes: Any) -> Path:
        """A recipe: `SETTINGS` with changes, sections as a whole."""
        path = self.folder / f"recipe-{len(list(self.folder.glob('recipe-*')))}.yaml"
        path.write_text(yaml.safe_dump(SETTINGS | {"model": str(self.model), "data": str(self.data)} | changes))
        return path

    def rows(self, recipe: Recipe) -> list[Row]:
        """The rows that a run trains on."""
        return tokenize_run(recipe, load_run_data(recipe), Tokenizer.load(self.model)).train


def report(out: Path) -> dict[str, Any]:
    """report.json of a run."""
    found: dict[str, Any] = json.loads((out / "report.json").read_text())
    return found


def saved_steps(out: Path) -> list[int]:
    """Steps that a run has saved."""
    return sorted(int(path.name) for path in (out / "checkpoints").glob("[0-9]*") if path.name.isdecimal())
