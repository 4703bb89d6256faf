"""Tiny random Gemma models of transformers beside the same weights in our layout."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from toy_gemmas import CASES, randomize
from toy_rows import branching_rows

from portlab_jax.mesh import MeshPlan
from portlab_jax.weights import load_params
from portlab_spec.models import GemmaConfig, param_table
from portlab_spec.packing import Batch, Blocks, Packing, Rows, pack_batch, plan
from portlab_spec.recipe import Mesh


class Tiny:
    """One random model in both frameworks."""

    def __init__(self, folder, make):
        self.folder = folder
        self.torch = randomize(make())
        self.torch.save_pretrained(folder)
        self.config = GemmaConfig.load(folder)
        self.mesh = MeshPlan.create(Mesh(data=1, fsdp=1, tp=1), jax.devices()[:1])
        self.params, self.report = load_params(folder, self.config, jnp.float32, self.mesh)
        self.raw_config = json.loads((folder / "config.json").read_text())


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Makes (once) the tiny model of a case."""
    made = {}

    def get(case):
        if case not in made:
            made[case] = Tiny(tmp_path_factory.mktemp("tiny"), CASES[case])
        return made[case]

    return get


@pytest.fixture(params=list(CASES))
def tiny(request, tiny_model):
    return tiny_model(request.param)


@pytest.fixture
def tiny_one(tiny_model):
    return tiny_model("gemma3, two kv heads")


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture(scope="session")
def default_folder():
    """The default model's folder."""
    from portlab_spec.assets import default_model

    return default_model().path


@pytest.fixture(scope="session")
def tiny_chat_folder(tmp_path_factory, default_folder):
    """A tiny random Gemma with the real tokenizer: the whole command line runs on it in seconds."""
    folder = tmp_path_factory.mktemp("tiny-chat")
    config = json.loads((default_folder / "config.json").read_text()) | {
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
        (folder / name).write_bytes((default_folder / name).read_bytes())
    rng = np.random.default_rng(0)
    table = param_table(GemmaConfig.load(folder))
    layout = {name: param.shape for param in table for name in param.tensor_names("model.")}
    tensors = {name: rng.normal(0, 0.3, shape).astype(ml_dtypes.bfloat16) for name, shape in layout.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def make_rows():
    """Makes rows of uneven lengths behind a common start."""
    return branching_rows


@pytest.fixture(scope="session")
def one_row_each():
    """Packs by hand, without sharing anything: every example a packed row of its own. Returns (batch, chunk)."""

    def pack(rows, groups=1):
        length = -(-max(len(row.ids) for row in rows) // 8) * 8
        per_group = len(rows) // groups
        assert len(rows) == per_group * groups
        shape = (1, groups, per_group, length)
        tokens, positions, ends = (np.zeros(shape, np.int32) for _ in range(3))
        slots, targets, weights = ([[] for _ in range(groups)] for _ in range(3))
        for i, row in enumerate(rows):
            g, r, n = i % groups, i // groups, len(row.ids)
            tokens[0, g, r, :n], positions[0, g, r, :n], ends[0, g, r, :n] = row.ids, range(n), n
            at = np.flatnonzero(row.loss)
            slots[g] += [*(r * length + at - 1)]
            targets[g] += [row.ids[j] for j in at]
            weights[g] += [1.0] * len(at)
        most = -(-max(map(len, slots)) // 8) * 8

        def filled(lists, dtype):
            return np.array([[line + [0] * (most - len(line)) for line in lists]], dtype)

        block = np.zeros((1, groups, per_group, 1, 1), np.int32)
        batch = Batch(
            Rows(tokens, positions, ends),
            Blocks(block, block),
            filled(slots, np.int32),
            filled(targets, np.int32),
            filled(weights, np.float32),
        )
        return batch, 8

    return pack


@pytest.fixture(scope="session")
def packed():
    """Packs rows as the trainer does. Returns (batch, chunk)."""

    def pack(rows, config, groups=1, share_prefix=True):
        packing = Packing(groups=groups, window=config.window, share_prefix=share_prefix, min_shared=1)
        planned = plan([rows], packing, min_saving=0.0)
        return pack_batch(rows, planned.layouts[0]), planned.layouts[0].chunk

    return pack
