"""Gemma 3 from GGUF to a Hugging Face model folder.

Weights are dequantised block by block and rounded once to bfloat16; no tensor is ever held whole.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from portlab_spec import safetensors_file
from portlab_spec.errors import UserError
from portlab_spec.files import write_json, write_text
from portlab_spec.gguf_file import GgufFile
from portlab_spec.gguf_tokenizer import tokenizer_config, tokenizer_json
from portlab_spec.tokenizer import FUNCTION_TOKENS, TOKENIZER_FILE, Tokenizer

BF16 = np.dtype(ml_dtypes.bfloat16)
EMBEDDING = "model.embed_tokens.weight"
GENERATION_STOPS = [1, 106, 50]  # <eos>, <end_of_turn>, <start_function_response>

_TOP_LEVEL = {"token_embd": EMBEDDING, "output_norm": "model.norm.weight"}
_PER_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Facts of the Gemma 3 family that llama.cpp knows by heart and GGUF does not store.
_LOCAL_ROPE_BASE = 10_000.0
_GLOBAL_LAYER_EVERY = 6
_BLOCK_ROWS = 8192

# Words whose mean embedding starts each control token's row. The rows that Gemma 3 has there are untrained and
# point the same way (cosines 0.90 to 0.98 among the seven, 0.19 between ordinary words): a frozen base could
# hardly tell the tokens apart.
CONTROL_WORDS: dict[str, str] = {
    "<start_function_declaration>": "start function declaration",
    "<end_function_declaration>": "end function declaration",
    "<start_function_call>": "start function call",
    "<end_function_call>": "end function call",
    "<start_function_response>": "start function response",
    "<end_function_response>": "end function response",
    "<escape>": "escape quote",
}


@dataclass(frozen=True)
class ControlRow:
    """How one control token's embedding row was made."""

    token: str
    id: int
    words: str
    word_ids: list[int]


def convert(gguf: GgufFile, folder: Path, progress: Callable[[float], None]) -> list[ControlRow]:
    """Write config, tokenizer and weights of a Gemma 3 GGUF file into an existing folder.

    Args:
        gguf: the source.
        folder: receives `config.json`, `generation_config.json`, `tokenizer.json`, `tokenizer_config.json`
            and `model.safetensors`.
        progress: told the fraction of weight bytes written, 0 to 1.

    Raises:
        UserError: not a Gemma 3 text model, or a tensor is missing or unknown.
    """
    config = hf_config(gguf.metadata)
    names = _hf_names(gguf)
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", _generation_config())
    write_json(folder / "tokenizer_config.json", tokenizer_config())
    write_text(folder / TOKENIZER_FILE, json.dumps(tokenizer_json(gguf.metadata), ensure_ascii=False))

    rows = _control_rows(Tokenizer.load(folder))
    replaced = _control_embeddings(gguf, rows)
    layout = {names[name]: (BF16, tensor.shape) for name, tensor in gguf.tensors.items()}
    total = sum(tensor.rows.size for tensor in gguf.tensors.values())
    done = 0
    with safetensors_file.Writer(folder / safetensors_file.SINGLE_FILE, layout, {"format": "pt"}) as writer:
        for name, tensor in gguf.tensors.items():
            first = 0
            for block in tensor.dequantise(_BLOCK_ROWS):
                if names[name] == EMBEDDING:
                    block = _with_rows(block, first, replaced)
                elif name.endswith("_norm.weight"):
                    block = block - 1.0  # GGUF stores 1 + w, Hugging Face stores w
                writer.write(names[name], block.astype(BF16))
                first += len(block)
            done += tensor.rows.size
            progress(done / total)
    return rows


def hf_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The `config.json` of a Gemma 3 text model, from GGUF metadata.

    Raises:
        UserError: another architecture.
    """
    architecture = metadata.get("general.architecture")
    if architecture != "gemma3":
        raise UserError(f"the GGUF file holds {architecture}, not gemma3", fix="Use a Gemma 3 text model")

    def of(key: str) -> Any:
        return metadata[f"gemma3.{key}"]

    n_layers = of("block_count")
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": of("embedding_length"),
        "intermediate_size": of("feed_forward_length"),
        "num_hidden_layers": n_layers,
        "num_attention_heads": of("attention.head_count"),
        "num_key_value_heads": of("attention.head_count_kv"),
        "head_dim": of("attention.key_length"),
        "query_pre_attn_scalar": of("attention.key_length"),
        "max_position_embeddings": of("context_length"),
        "sliding_window": of("attention.sliding_window"),
        "layer_types": [
            "full_attention" if (i + 1) % _GLOBAL_LAYER_EVERY == 0 else "sliding_attention" for i in range(n_layers)
        ],
        "rope_theta": of("rope.freq_base"),
        "rope_local_base_freq": _LOCAL_ROPE_BASE,
        "rope_scaling": None,
        "rms_norm_eps": float(str(np.float32(of("attention.layer_norm_rms_epsilon")))),  # 1e-06, not 9.99e-07
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "dtype": "bfloat16",
    }


def _generation_config() -> dict[str, Any]:
    return {"bos_token_id": 2, "eos_token_id": GENERATION_STOPS, "pad_token_id": 0}


def _hf_names(gguf: GgufFile) -> dict[str, str]:
    """Hugging Face name by GGUF name; every tensor is accounted for."""
    names = {f"{stored}.weight": name for stored, name in _TOP_LEVEL.items()}
    for i in range(gguf.metadata.get("gemma3.block_count", 0)):
        for stored, name in _PER_LAYER.items():
            names[f"blk.{i}.{stored}.weight"] = f"model.layers.{i}.{name}.weight"
    odd = sorted(names.keys() ^ gguf.tensors.keys())
    if odd:
        what = f"the GGUF file is not a Gemma 3 text model: {odd[0]} is missing or unknown"
        raise UserError(what, fix="Use a Gemma 3 text model")
    return names


def _control_rows(tokenizer: Tokenizer) -> list[ControlRow]:
    return [
        ControlRow(token, FUNCTION_TOKENS[token], words, tokenizer.encode(words))
        for token, words in CONTROL_WORDS.items()
    ]


def _control_embeddings(gguf: GgufFile, rows: list[ControlRow]) -> dict[int, np.ndarray]:
    """New float32 embedding rows by id: mean of the words' rows, scaled to the median norm of all rows."""
    wanted = {i for row in rows for i in row.word_ids}
    found: dict[int, np.ndarray] = {}
    norms = []
    first = 0
    for block in gguf.tensors["token_embd.weight"].dequantise(_BLOCK_ROWS):
        norms.append(np.linalg.norm(block, axis=1))
        found |= {i: block[i - first].copy() for i in wanted if first <= i < first + len(block)}
        first += len(block)
    common = np.median(np.concatenate(norms))
    means = {row.id: np.mean([found[i] for i in row.word_ids], axis=0) for row in rows}
    return {i: mean * (common / np.linalg.norm(mean)) for i, mean in means.items()}


def _with_rows(block: np.ndarray, first: int, replaced: Mapping[int, np.ndarray]) -> np.ndarray:
    block = block.copy()
    for i, row in replaced.items():
        if first <= i < first + len(block):
            block[i - first] = row
    return block
