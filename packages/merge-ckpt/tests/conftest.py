"""Tiny Gemma 3 bases written by transformers, and runs written by Orbax as our trainer writes them."""

import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
import torch
from safetensors.torch import load_file
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from portlab_merge.base_model import open_base
from portlab_merge.checkpoint import read_checkpoint
from portlab_merge.plan import Plan, make_plan
from portlab_spec.files import sha256_file

os.environ["HF_HUB_OFFLINE"] = "1"  # PEFT would look the base up
LAYERS, WIDTH, VOCAB, RANK, ALPHA = 3, 48, 96, 4, 8.0
TOKEN_IDS = (46, 5, 90)
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@dataclass(frozen=True)
class Run:
    """A run folder with one step, and what is in it."""

    folder: Path
    base: Path
    tree: dict[str, Any]
    metadata: dict[str, Any]

    @property
    def step(self) -> Path:
        return self.folder / "checkpoints" / "7"

    def plan(self) -> Plan:
        return make_plan(open_base(self.base), read_checkpoint(self.folder))


@pytest.fixture(scope="session")
def make_base(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make a base folder: make_base(dtype="bfloat16", kv_heads=2, max_shard_size=None)."""

    def make(dtype: str = "bfloat16", kv_heads: int = 2, max_shard_size: str | None = None) -> Path:
        folder = tmp_path_factory.mktemp("models") / "base"
        torch.manual_seed(0)
        config = Gemma3TextConfig(
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            intermediate_size=80,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=kv_heads,
            head_dim=16,
            sliding_window=8,
            sliding_window_pattern=3,
            max_position_embeddings=64,
            initializer_range=0.1,
        )
        model = Gemma3ForCausalLM(config).to(getattr(torch, dtype))
        model.save_pretrained(folder, **({"max_shard_size": max_shard_size} if max_shard_size else {}))
        (folder / "tokenizer.json").write_text('{"version": "1.0"}\n')
        return folder

    return make


@pytest.fixture(scope="session")
def base(make_base: Callable[..., Path]) -> Path:
    return make_base()


@pytest.fixture(scope="session")
def make_tree() -> Callable[..., dict[str, Any]]:
    """The adapter as our trainer holds it: make_tree(base, rank=4, token_rows=True, prefix="model.")."""

    def make(base: Path, rank: int = RANK, token_rows: bool = True, prefix: str = "model.") -> dict[str, Any]:
        random = np.random.default_rng(1)
        header = open_base(base).tensors
        lora = {}
        for target in (*ATTENTION, *MLP):
            out, inner = header[f"{prefix}layers.0.{target}.weight"][1].shape
            lora[target] = {
                "a": random.normal(0, 0.3, (LAYERS, inner, rank)).astype(np.float32),
                "b": random.normal(0, 0.3, (LAYERS, rank, out)).astype(np.float32),
            }
        tree: dict[str, Any] = {"lora": lora}
        if token_rows:
            tree["token_rows"] = random.normal(0, 0.2, (len(TOKEN_IDS), WIDTH)).astype(np.float32)
        return tree

    return make


@pytest.fixture(scope="session")
def describe() -> Callable[..., dict[str, Any]]:
    """The metadata our trainer stores: describe(base, tree, use_rslora=False)."""

    def make(base: Path, tree: dict[str, Any], use_rslora: bool = False) -> dict[str, Any]:
        rank = next(iter(tree["lora"].values()))["a"].shape[2]
        leaves = {f"lora/{t}/{s}": tree["lora"][t][s] for t in tree["lora"] for s in "ab"}
        if "token_rows" in tree:
            leaves["token_rows"] = tree["token_rows"]
        return {
            "format": "portlab-lora/1",
            "lora": {
                "rank": rank,
                "alpha": ALPHA,
                "use_rslora": use_rslora,
                "scaling": ALPHA / math.sqrt(rank) if use_rslora else ALPHA / rank,
                "dropout": 0.0,
                "targets": [t.rpartition(".")[2] for t in tree["lora"]],
                "rank_pattern": {},
                "alpha_pattern": {},
                "leaves": [
                    {"target": t, "modules": [f"model.layers.{i}.{t}" for i in range(LAYERS)]} for t in tree["lora"]
                ],
                "token_rows": {"parameter": "model.embed_tokens.weight", "ids": list(TOKEN_IDS)}
                if "token_rows" in tree
                else None,
            },
            "base": {
                "id": "tiny/gemma-3",
                "revision": "abc",
                "path": str(base),
                "files_sha256": {p.name: sha256_file(p) for p in sorted(base.glob("*.safetensors"))},
            },
            "model": {"family": "gemma3", "config_sha256": sha256_file(base / "config.json")},
            "recipe": {},
            "versions": {},
            "leaf_sha256": {k: hashlib.sha256(np.ascontiguousarray(v)).hexdigest() for k, v in leaves.items()},
            "probe": None,
        }

    return make


@pytest.fixture(scope="session")
def save() -> Callable[..., None]:
    """Save a step with an Orbax v0 CheckpointManager: save(folder, tree, metadata, step=7, ocdbt=True, zarr3=False)."""

    def make(
        folder: Path,
        tree: dict[str, Any],
        metadata: dict[str, Any] | None,
        step: int = 7,
        ocdbt: bool = True,
        zarr3: bool = False,
    ) -> None:
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)
        options = ocp.CheckpointManagerOptions(max_to_keep=None, enable_async_checkpointing=False)
        registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
        registry.add("adapter", ocp.args.PyTreeSave, handler)
        with ocp.CheckpointManager(folder, options=options, handler_registry=registry) as manager:
            args = ocp.args.Composite(adapter=ocp.args.PyTreeSave(tree))
            manager.save(step, args=args, custom_metadata=metadata)

    return make


@pytest.fixture
def make_run(tmp_path: Path, make_tree, describe, save) -> Callable[..., Run]:
    """Make a run: make_run(base, edit=lambda tree, metadata: None, **tree options)."""

    def make(base: Path, edit: Callable[[dict, dict], None] | None = None, use_rslora: bool = False, **options) -> Run:
        tree = make_tree(base, **options)
        metadata = describe(base, tree, use_rslora)
        if edit is not None:
            edit(tree, metadata)
        folder = tmp_path / "run"
        save(folder / "checkpoints", tree, metadata)
        return Run(folder, base, tree, metadata)

    return make


@pytest.fixture
def run(make_run: Callable[..., Run], base: Path) -> Run:
    return make_run(base)


@pytest.fixture(scope="session")
def exact_weights() -> Callable[[Run], dict[str, np.ndarray]]:
    """The merged weights in float64, from the contract's formula and nothing of ours."""

    def make(run: Run) -> dict[str, np.ndarray]:
        weights: dict[str, np.ndarray] = {}
        for file in sorted(run.base.glob("*.safetensors")):
            weights |= {name: t.to(torch.float64).numpy() for name, t in load_file(file).items()}
        lora = run.metadata["lora"]
        for leaf in lora["leaves"]:
            a, b = (run.tree["lora"][leaf["target"]][side].astype(np.float64) for side in "ab")
            for i, module in enumerate(leaf["modules"]):
                weights[f"{module}.weight"] += lora["scaling"] * (a[i] @ b[i]).T
        if lora["token_rows"]:
            weights["model.embed_tokens.weight"][lora["token_rows"]["ids"]] = run.tree["token_rows"]
        return weights

    return make


@pytest.fixture(scope="session")
def logits() -> Callable[..., np.ndarray]:
    """Logits in f32 of a folder, or of a folder's architecture with given weights: (2, 20, V)."""

    def compute(folder: Path, weights: dict[str, np.ndarray] | None = None, wrap: Callable[[Any], Any] | None = None):
        model = Gemma3ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        if weights is not None:
            state = {name: torch.from_numpy(value).to(torch.float32) for name, value in weights.items()}
            missing = model.load_state_dict(state, strict=False)
            assert not missing.unexpected_keys
        if wrap is not None:
            model = wrap(model)
        tokens = torch.arange(40).reshape(2, 20) * 7 % VOCAB
        tokens[:, 3], tokens[:, 9] = TOKEN_IDS[0], TOKEN_IDS[2]
        with torch.no_grad():
            return model.eval()(input_ids=tokens).logits.numpy()

    return compute


@pytest.fixture(scope="session")
def command() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run merge-ckpt in a process of its own."""

    def call(*args: Any) -> subprocess.CompletedProcess[str]:
        code = "from portlab_merge.cli import entry; entry()"
        return subprocess.run([sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True)

    return call


@pytest.fixture(scope="session")
def recorded() -> Callable[[str], dict[tuple[str, ...], np.ndarray]]:
    """The leaves of a tree that another trainer saved (`trees/<name>.json`, by bench/foreign), random anew."""

    def make(name: str) -> dict[tuple[str, ...], np.ndarray]:
        random = np.random.default_rng(7)
        tree = json.loads((Path(__file__).parent / "trees" / f"{name}.json").read_text())
        return {tuple(path): random.normal(size=shape).astype(dtype) for path, shape, dtype in tree}

    return make


@pytest.fixture(scope="session")
def save_alone() -> Callable[[Path, dict[tuple[str, ...], np.ndarray]], None]:
    """Save leaves with a checkpointer of Orbax v0 and no manager: the arrays lie in the folder itself."""

    def save(folder: Path, leaves: dict[tuple[str, ...], np.ndarray]) -> None:
        tree: dict[str, Any] = {}
        for path, array in leaves.items():
            node = tree
            for key in path[:-1]:
                node = node.setdefault(key, {})
            node[path[-1]] = array
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder.resolve(), tree)

    return save


@pytest.fixture(scope="module")
def inputs(make_base, make_tree, describe, save, tmp_path_factory) -> tuple[Path, Path]:
    """A base of several files, one of them in a folder, and a run."""
    base = make_base(max_shard_size="40KB")
    (base / "extra").mkdir()
    (base / "extra" / "notes.txt").write_text("of the base\n")
    tree = make_tree(base)
    run = tmp_path_factory.mktemp("inputs") / "run"
    save(run / "checkpoints", tree, describe(base, tree))
    return base, run
