"""Bases of a real model's shape with random weights, and one LoRA for each, as Orbax and as PEFT store it.

Made block by block, so that a base of any size needs no memory. The factors are bfloat16 values: trainers that keep
their adapter in that type hold the same adapter as those that keep it in float32. Keys and values of a layer share
their A, since Tunix has one for both.
"""

import hashlib
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from portlab_spec.files import sha256_file, write_json
from portlab_spec.safetensors_file import INDEX_FILE, SINGLE_FILE, Writer, open_file

SAVER = Path(__file__).parent / "peers/orbax_saver.py"
RANK, ALPHA = 16, 32.0
# Updates of a hundredth of the weights, as fine-tuning leaves them.
WEIGHT_SIZE, UPDATE_SIZE = 0.02, 2e-4
TARGETS = tuple(f"self_attn.{p}_proj" for p in "qkvo") + tuple(f"mlp.{p}_proj" for p in ("gate", "up", "down"))
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
BLOCK_ELEMENTS = 1 << 22

Layout = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Shape:
    """A Gemma 3 as its config names it; `vision_layers` of SigLIP make it the multimodal one, with its prefix."""

    layers: int
    width: int
    mlp: int
    heads: int
    kv_heads: int
    vocabulary: int
    head_dim: int = 256
    vision_layers: int = 0
    shard_bytes: int = 1 << 62

    @property
    def prefix(self) -> str:
        """Of the text model's tensors."""
        return "language_model.model." if self.vision_layers else "model."

    def scaled(self, scale: float) -> "Shape":
        """With fewer layers and tokens, of the same widths."""
        return replace(
            self,
            layers=max(2, round(self.layers * scale)),
            vocabulary=8 * max(64, round(self.vocabulary * scale / 8)),
            vision_layers=math.ceil(self.vision_layers * scale),
            shard_bytes=max(1, round(self.shard_bytes * scale)),
        )


SHAPES = {
    # Gemma 3 1B, one file.
    "1b": Shape(layers=26, width=1152, mlp=6912, heads=4, kv_heads=1, vocabulary=262144),
    # The first 16 of the 34 layers of Gemma 3 4B with its whole vision tower, in three shards.
    "4b-cut": Shape(16, 2560, 10240, 8, 4, 262208, vision_layers=27, shard_bytes=2 * 10**9),
}


class Fixture(NamedTuple):
    """A base folder, a run folder with one step, and the same adapter as a PEFT folder."""

    base: Path
    run: Path
    peft: Path

    def factors(self) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """Tensor name in the base, A (r, in) and B (out, r) of every update, from the PEFT folder."""
        tensors = open_file(self.peft / "adapter_model.safetensors")
        ours = {"model.language_model.": "language_model.model."}
        for name, view in tensors.items():
            if name.endswith(".lora_A.weight"):
                module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                for theirs, base in ours.items():
                    module = module.replace(theirs, base)
                yield f"{module}.weight", view.numpy(), tensors[name.replace("lora_A", "lora_B")].numpy()


def make_fixture(folder: Path, shape: Shape) -> Fixture:
    """Make the fixture, or take the one of this very shape that is there."""
    fixture, done = Fixture(folder / "base", folder / "run", folder / "peft"), folder / "shape.json"
    wanted = {**asdict(shape), "rank": RANK, "alpha": ALPHA}
    if done.is_file() and done.read_text() == _line(wanted):
        return fixture
    if folder.exists():
        raise SystemExit(f"{folder} holds another or an unfinished fixture; remove it")
    for path in (fixture.base, fixture.peft):
        path.mkdir(parents=True)
    _write_base(fixture.base, shape)
    leaves = _leaves(shape)
    _write_peft(fixture.peft, shape, leaves)
    _write_run(fixture, shape, leaves)
    done.write_text(_line(wanted))
    return fixture


def tensor_shapes(shape: Shape) -> Layout:
    """Every tensor by its published name, in the order of the layers."""
    d, n, k = shape.width, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    projections = {
        **dict(
            zip(TARGETS, ((n, d), (k, d), (k, d), (d, n), (shape.mlp, d), (shape.mlp, d), (d, shape.mlp)), strict=True)
        ),
        "self_attn.q_norm": (shape.head_dim,),
        "self_attn.k_norm": (shape.head_dim,),
        **{f"{which}_layernorm": (d,) for which in ("input", "post_attention", "pre_feedforward", "post_feedforward")},
    }
    tensors: Layout = {"embed_tokens.weight": (shape.vocabulary, d), "norm.weight": (d,)}
    tensors |= {f"layers.{i}.{name}.weight": size for i in range(shape.layers) for name, size in projections.items()}
    named = {shape.prefix + name: size for name, size in tensors.items()}
    return named | _vision_shapes(shape) if shape.vision_layers else named


def _vision_shapes(shape: Shape) -> Layout:
    d, mlp, patch, image = (VISION[key] for key in ("hidden_size", "intermediate_size", "patch_size", "image_size"))
    linears = {
        **{f"self_attn.{which}": (d, d) for which in ("q_proj", "k_proj", "v_proj", "out_proj")},
        "mlp.fc1": (mlp, d),
        "mlp.fc2": (d, mlp),
    }
    tensors: Layout = {
        "embeddings.patch_embedding.weight": (d, 3, patch, patch),
        "embeddings.patch_embedding.bias": (d,),
        "embeddings.position_embedding.weight": ((image // patch) ** 2, d),
        "post_layernorm.weight": (d,),
        "post_layernorm.bias": (d,),
    }
    for i in range(shape.vision_layers):
        for name, size in (linears | {"layer_norm1": (d,), "layer_norm2": (d,)}).items():
            tensors[f"encoder.layers.{i}.{name}.weight"] = size
            tensors[f"encoder.layers.{i}.{name}.bias"] = size[:1]
    return {f"vision_tower.vision_model.{name}": size for name, size in tensors.items()} | {
        "multi_modal_projector.mm_input_projection_weight": (d, shape.width),
        "multi_modal_projector.mm_soft_emb_norm.weight": (d,),
    }


# SigLIP-so400m, the tower of Gemma 3.
VISION: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "patch_size": 14,
    "image_size": 896,
    "vision_use_head": False,
}


def _config(shape: Shape) -> dict[str, Any]:
    text = {
        "model_type": "gemma3_text",
        "hidden_size": shape.width,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "query_pre_attn_scalar": shape.head_dim,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    if not shape.vision_layers:
        return {"architectures": ["Gemma3ForCausalLM"], **text}
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {**VISION, "num_hidden_layers": shape.vision_layers},
        "mm_tokens_per_image": 256,
        "torch_dtype": "bfloat16",
    }


def _write_base(folder: Path, shape: Shape) -> None:
    shards: list[Layout] = [{}]
    size = 0
    for name, dims in tensor_shapes(shape).items():
        nbytes = 2 * math.prod(dims)
        if size and size + nbytes > shape.shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = dims
        size += nbytes
    count = len(shards)
    names = [SINGLE_FILE] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    random = np.random.default_rng(0)
    for file, layout in zip(names, shards, strict=True):
        with Writer(folder / file, {name: (BFLOAT16, dims) for name, dims in layout.items()}) as writer:
            for name, dims in layout.items():
                for start in range(0, math.prod(dims), BLOCK_ELEMENTS):
                    values = random.standard_normal(min(BLOCK_ELEMENTS, math.prod(dims) - start), np.float32)
                    writer.write(name, (WEIGHT_SIZE * values).astype(BFLOAT16))
    if count > 1:
        total = sum(2 * math.prod(dims) for layout in shards for dims in layout.values())
        weight_map = {name: file for file, layout in zip(names, shards, strict=True) for name in layout}
        write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
    write_json(folder / "config.json", _config(shape))


def _leaves(shape: Shape) -> dict[str, np.ndarray]:
    """The adapter as our trainer holds it: `<target>/a` (L, in, r) and `<target>/b` (L, r, out), f32."""
    random, sizes = np.random.default_rng(1), tensor_shapes(shape)
    leaves: dict[str, np.ndarray] = {}
    for target in TARGETS:
        out, inner = sizes[f"{shape.prefix}layers.0.{target}.weight"]
        a_size = inner**-0.5
        b_size = UPDATE_SIZE / (ALPHA / RANK * RANK**0.5 * a_size)
        for side, dims, size in (("a", (inner, RANK), a_size), ("b", (RANK, out), b_size)):
            values = size * random.standard_normal((shape.layers, *dims), np.float32)
            leaves[f"{target}/{side}"] = values.astype(BFLOAT16).astype(np.float32)
    leaves["self_attn.v_proj/a"] = leaves["self_attn.k_proj/a"]
    return leaves


def _write_peft(folder: Path, shape: Shape, leaves: dict[str, np.ndarray]) -> None:
    text_model = "model.language_model." if shape.vision_layers else "model."
    factors = {
        f"base_model.model.{text_model}layers.{i}.{target}.lora_{side.upper()}.weight": leaves[f"{target}/{side}"][i].T
        for target in TARGETS
        for i in range(shape.layers)
        for side in "ab"
    }
    with Writer(
        folder / "adapter_model.safetensors", {name: (value.dtype, value.shape) for name, value in factors.items()}
    ) as writer:
        for name, value in factors.items():
            writer.write(name, value)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str((folder.parent / "base").resolve()),
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        # A list of names would match the vision tower's projections as well.
        "target_modules": rf"{text_model.replace('.', chr(92) + '.')}layers\.\d+\.({'|'.join(TARGETS)})",
    }
    write_json(folder / "adapter_config.json", config)


def _write_run(fixture: Fixture, shape: Shape, leaves: dict[str, np.ndarray]) -> None:
    """The step is saved by another process, whose eight devices each hold a part of every leaf."""
    text_model = "model.language_model." if shape.vision_layers else "model."
    lora = {
        "rank": RANK,
        "alpha": ALPHA,
        "use_rslora": False,
        "scaling": ALPHA / RANK,
        "targets": [target.rpartition(".")[2] for target in TARGETS],
        "leaves": [
            {"target": target, "modules": [f"{text_model}layers.{i}.{target}" for i in range(shape.layers)]}
            for target in TARGETS
        ],
    }
    metadata = {
        "format": "portlab-lora/1",
        "lora": lora,
        "base": {"id": "random/gemma-3", "files_sha256": {p.name: sha256_file(p) for p in _weights(fixture.base)}},
        "model": {"family": "gemma3", "config_sha256": sha256_file(fixture.base / "config.json")},
        "leaf_sha256": {f"lora/{name}": hashlib.sha256(value).hexdigest() for name, value in leaves.items()},
    }
    fixture.run.mkdir()
    write_json(fixture.run / "metadata.json", metadata)
    np.savez(fixture.run / "leaves.npz", **leaves)
    subprocess.run([sys.executable, SAVER, fixture.run], check=True)
    (fixture.run / "leaves.npz").unlink()


def _weights(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _line(value: dict[str, Any]) -> str:
    return repr(sorted(value.items())) + "\n"
