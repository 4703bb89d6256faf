"""A tiny random Gemma 3 of google-deepmind/gemma with its own LoRA, saved by it, and its base for Hugging Face.

    python make_gemma.py OUT

Needs gemma (4.0.1) and what it installs. Its LoRA wraps the layers of Gemma 2 and 3 alone: around its Gemma 4 it makes
no parameter, so there is no such case. That the base is the model's is shown by transformers, which the test loads.
"""

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from case_folder import TOKENS, write_base, write_case
from gemma import gm, peft
from gemma.gm.ckpts import _compat
from gemma.gm.nn import _config, _gemma, _transformer
from kauldron import kd

PACKAGES = ("gemma", "kauldron", "flax", "jax", "jaxlib", "orbax-checkpoint", "tensorstore")
RANK = 4
VOCAB, WIDTH, HIDDEN, HEADS, HEAD_DIM, WINDOW, LAYERS, PATTERN = 128, 40, 72, 4, 16, 5, 7, 6
Params = dict[str, Any]


def config(kv_heads: int) -> _config.TransformerConfig:
    """Gemma 3, seven layers: a whole pattern of five sliding and one global, and one more."""
    return _config.TransformerConfig(
        num_embed=VOCAB,
        embed_dim=WIDTH,
        hidden_dim=HIDDEN,
        num_heads=HEADS,
        head_dim=HEAD_DIM,
        num_kv_heads=kv_heads,
        final_logit_softcap=None,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        use_qk_norm=True,
        transpose_gating_einsum=True,
        sliding_window_size=WINDOW,
        local_base_frequency=10_000,
        global_base_frequency=1_000_000,
        attention_types=_config.make_attention_layers_types(_gemma.GEMMA3_ATTENTION_PATTERN, num_layers=LAYERS),
    )


def hf_config(kv_heads: int) -> dict[str, Any]:
    """config.json of the same architecture."""
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "query_pre_attn_scalar": HEAD_DIM,
        "sliding_window": WINDOW,
        "sliding_window_pattern": PATTERN,
        "rope_theta": 1_000_000,
        "rope_local_base_freq": 10_000,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 1,
    }


def hf_tensors(params: Params) -> Iterator[tuple[str, np.ndarray]]:
    """The base's weights in the layout of Hugging Face, by the model's einsum strings."""
    for path, leaf in flax.traverse_util.flatten_dict(params).items():
        layer = f"model.layers.{path[0].removeprefix('layer_')}." if path[0].startswith("layer_") else "model."
        name = "/".join(path[1:] if layer != "model." else path)
        if name in QKV:
            slots = leaf[None] if leaf.ndim == 3 else leaf
            for slot, slot_NDH in zip(QKV[name], slots, strict=True):
                yield f"{layer}self_attn.{slot}_proj.weight", slot_NDH.transpose(0, 2, 1).reshape(-1, WIDTH)
        elif name == "mlp/gating_einsum":  # (2, F, D)
            for slot, slot_FD in zip(("gate", "up"), leaf, strict=True):
                yield f"{layer}mlp.{slot}_proj.weight", slot_FD
        elif name == "mlp/linear":  # (F, D)
            yield f"{layer}mlp.down_proj.weight", leaf.T
        elif name == "attn/attn_vec_einsum/w":  # (N, H, D)
            yield f"{layer}self_attn.o_proj.weight", leaf.reshape(-1, WIDTH).T
        else:
            yield layer + OTHERS[name], leaf


QKV = {"attn/q_einsum/w": "q", "attn/kv_einsum/w": "kv", "attn/qkv_einsum/w": "qkv"}
OTHERS = {
    "embedder/input_embedding": "embed_tokens.weight",
    "final_norm/scale": "norm.weight",
    "attn/_query_norm/scale": "self_attn.q_norm.weight",
    "attn/_key_norm/scale": "self_attn.k_norm.weight",
    "pre_attention_norm/scale": "input_layernorm.weight",
    "post_attention_norm/scale": "post_attention_layernorm.weight",
    "pre_ffw_norm/scale": "pre_feedforward_layernorm.weight",
    "post_ffw_norm/scale": "post_feedforward_layernorm.weight",
}


def save_whole(params: Params, run: Path) -> Path:
    """The whole tree."""
    gm.ckpts.save_params(params, run, wait_until_finished=True)
    return run


def save_lora(params: Params, run: Path) -> Path:
    """The adapter alone, as its package splits it off."""
    return save_whole(peft.split_params(params).lora, run)


def save_stacked(params: Params, run: Path) -> Path:
    """The layout of released checkpoints, with the layers of a pattern stacked."""
    flat = {f"transformer/{name}": leaves for name, leaves in _compat.flatten_and_remap_params(params).items()}
    return save_whole(_compat.stack_params(flat, PATTERN), run)


def save_trainer(params: Params, run: Path) -> Path:
    """A step of its trainer: parameters and the state of an optimiser that trains the adapter alone."""
    state = kd.train.TrainState(
        step=jnp.asarray(5),
        params=params,
        opt_state=optax.adam(1e-3).init(peft.split_params(params).lora),
        collections={},
    )
    checkpointer = kd.ckpts.Checkpointer(workdir=run, save_interval_steps=1)
    checkpointer.save(state, step=5, force=True)
    checkpointer.wait_until_finished()
    return next(run.rglob("default"))


Save = Callable[[Params, Path], Path]
CASES: dict[str, tuple[int, Save]] = {
    "gemma3": (2, save_whole),
    "gemma3-lora": (2, save_lora),
    "gemma3-qkv": (HEADS, save_whole),
    "gemma3-stacked": (2, save_stacked),
    "gemma3-trainer": (2, save_trainer),
}


def make(folder: Path, kv_heads: int, save: Save) -> None:
    """Build, adapt, save."""
    transformer = _transformer.Transformer(config=config(kv_heads), dtype=jnp.float32, tokens="")
    model = gm.nn.LoRA(rank=RANK, dtype=jnp.float32, model=transformer)
    tokens = jnp.asarray(TOKENS)
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
    random = np.random.default_rng(1)
    params = jax.tree.map(lambda leaf: random.normal(0, 0.15, leaf.shape).astype(np.float32), shapes)
    base, _ = peft.split_params(params)
    write_base(folder / "base", hf_config(kv_heads), dict(hf_tensors(base)))
    run = (folder / "run").resolve()
    item = save(jax.tree.map(jnp.asarray, params), run)
    logits = model.apply({"params": params}, tokens).logits
    write_case(
        folder,
        origin="gemma",
        rank=RANK,
        alpha=float(RANK),
        pass_alpha=False,
        logits=np.asarray(logits),
        packages=PACKAGES,
        item=item,
    )


def main(out: Path) -> None:
    """Make all cases."""
    jax.config.update("jax_default_matmul_precision", "highest")
    out.mkdir(parents=True, exist_ok=True)
    for name, (kv_heads, save) in CASES.items():
        with tempfile.TemporaryDirectory(dir=out) as scratch:
            make(Path(scratch) / name, kv_heads, save)
            shutil.move(Path(scratch) / name, out / name)
        print(f"{name}: made")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
