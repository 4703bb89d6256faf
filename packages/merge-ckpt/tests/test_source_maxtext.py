"""Checkpoints of MaxText: trees recorded from MaxText 0.2.5 (bench/foreign/make_maxtext.py) and filled anew."""

import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from portlab_merge.location import open_location
from portlab_merge.orbax_store import open_item, read_arrays
from portlab_merge.sources import Given, Tree
from portlab_merge.sources.maxtext import MaxTextSource
from portlab_merge.sources.tunix import TunixSource
from portlab_merge.steps import pick_step
from portlab_spec.errors import UserError

TREES = {path.stem: json.loads(path.read_text()) for path in sorted(Path(__file__).parent.glob("trees/maxtext_*.json"))}
SOURCE = MaxTextSource()
RANK, ALPHA = 3, 4.5
LORA = {
    "enable_lora": True,
    "lora_rank": RANK,
    "lora_alpha": ALPHA,
    "lora_module_path": "decoder/.*(self_attention/(query|key|value|out)|mlp/(wi_0|wi_1|wo))",
    "lora_weight_qtype": None,
    "lora_tile_size": None,
    "lora_restore_path": "",
}
SCANNED, REST = ("decoder", "layers", "layers_2"), ("decoder", "layers_remainder", "layers_0")
QUERY = ("self_attention", "query", "kernel")
# Of each place in the tree, the layers (of 13, or 12) in the order in which they are stacked.
PLACES = {
    r"layers_(\d+)": lambda i: np.int64(i),
    r"layers\.layers_(\d)": lambda k: np.array([k, 6 + k]),
    r"layers_remainder\.layers_(\d)": lambda k: np.int64(12 + k),
    r"scanned_blocks\.local_layers": lambda: np.array([[0, 1, 2, 3, 4], [6, 7, 8, 9, 10]]),
    r"scanned_blocks\.global_layer": lambda: np.array([5, 11]),
}
MODULES = {
    "self_attention.query": "self_attn.q_proj",
    "self_attention.key": "self_attn.k_proj",
    "self_attention.value": "self_attn.v_proj",
    "self_attention.out": "self_attn.o_proj",
    "mlp.wi_0": "mlp.gate_proj",
    "mlp.wi_1": "mlp.up_proj",
    "mlp.wo": "mlp.down_proj",
    "mlp.moe_block.shared_experts.wi_0": "mlp.gate_proj",
    "mlp.moe_block.shared_experts.wi_1": "mlp.up_proj",
    "mlp.moe_block.shared_experts.wo": "mlp.down_proj",
    "mlp.moe_block.MoeBlock_0.gate": "router.proj",
    "per_layer_input_gate": "per_layer_input_gate",
    "per_layer_projection": "per_layer_projection",
}
# What MaxText computes on x (t, in): d in, o out, r rank; l layers of a stack; b blocks of a stack of stacks.
EINSUM = {0: "td,dr,ro->to", 1: "td,dlr,rlo->lto", 2: "td,dblr,rblo->blto"}


def read(leaves, *, metadata=None, alpha=ALPHA, faults=None, use_rslora=False):
    tree = Tree(leaves, faults or {}, metadata or {})
    return SOURCE.read(tree, Given(alpha=alpha, use_rslora=use_rslora, where="RUN/7"))


def pair(place, *stack, module=QUERY, inputs=8, rank=RANK, outputs=6):
    random = np.random.default_rng(len(place) + len(stack))
    a, b = (random.normal(size=shape).astype(np.float32) for shape in ((inputs, *stack, rank), (rank, *stack, outputs)))
    stem = (*place, *module[:-1])
    return {(*stem, f"{module[-1]}_lora_a"): a, (*stem, f"{module[-1]}_lora_b"): b}


def fill(tree):
    random = np.random.default_rng(5)
    return {
        tuple(path): random.normal(size=shape).astype(dtype) if dtype == "float32" else np.zeros(shape, dtype)
        for path, shape, dtype in tree
    }


def nested(leaves):
    root = {}
    for path, array in leaves.items():
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = array
    return root


def expected(leaves, x):
    """What each module of Hugging Face's model adds to its output for x[:, :in], in float64."""
    outputs = {}
    for path, a in leaves.items():
        model = [key for key in path if key != "params"][: -1 if path[-1] == "value" else None]
        if not model[-1].endswith("_lora_a") or model[0] == "opt_state":
            continue
        b = leaves[tuple(key.replace("_lora_a", "_lora_b") for key in path)]
        y = ALPHA / RANK * np.einsum(EINSUM[a.ndim - 2], x[:, : len(a)], *(f.astype(np.float64) for f in (a, b)))
        name = ".".join(model[1:-1])
        if name == "per_layer_embedder.per_layer_model_projection":
            outputs["model.per_layer_model_projection"] = y
            continue
        for place, layers_of in PLACES.items():
            if match := re.fullmatch(rf"{place}\.(\D.+)", name):
                layers, module = layers_of(*map(int, match.groups()[:-1])), MODULES[match.groups()[-1]]
                for index in np.ndindex(layers.shape):
                    outputs[f"model.layers.{layers[index]}.{module}"] = y[index]
    return outputs


@pytest.mark.parametrize("name", TREES)
def test_every_projection_of_a_recorded_tree_adds_what_maxtext_computes(name, tmp_path):
    leaves = fill(TREES[name])
    item = "items" if ("params", "params") in {path[:2] for path in leaves} else "model_params"
    metadata = {"lora": LORA, "scan_layers": "scanned" in name} if item == "items" else {}
    manager = ocp.CheckpointManager(tmp_path)
    args = ocp.args.Composite(**{item: ocp.args.PyTreeSave(nested(leaves))})
    manager.save(7, args=args, custom_metadata=metadata)
    manager.close()

    step = pick_step(open_location(str(tmp_path)))
    stored = open_item(step.item)
    assert SOURCE.recognises(tuple(stored.stored), step.metadata)
    arrays, faults = read_arrays(stored, SOURCE.wants)
    adapter = SOURCE.read(Tree(arrays, faults, step.metadata), Given(alpha=None if metadata else ALPHA))

    assert adapter.problems == ()
    assert (adapter.lora.rank, adapter.lora.alpha) == (RANK, ALPHA)
    x = np.random.default_rng(6).normal(size=(4, 128))
    wanted = expected(leaves, x)
    assert sorted(update.module for update in adapter.updates) == sorted(wanted)
    for update in adapter.updates:
        delta = update.scaling * update.a.astype(np.float64) @ update.b.astype(np.float64)
        np.testing.assert_allclose(x[:, : len(delta)] @ delta, wanted[update.module], rtol=1e-6, atol=1e-6)


def test_trees_of_every_kind_are_recorded():
    assert set(TREES) == {
        "maxtext_gemma3",
        "maxtext_gemma3_scanned_pretrain",
        "maxtext_gemma3_scanned_sft",
        "maxtext_gemma4_e",
        "maxtext_gemma4_moe",
        "maxtext_gemma4_scanned_pretrain",
        "maxtext_gemma4_scanned_sft",
    }


def test_the_axis_of_layers_is_the_second_even_where_all_axes_are_of_one_size():
    leaves = pair(SCANNED, 4, inputs=4, rank=4, outputs=4)
    a, b = leaves.values()
    updates = {update.module: update for update in read(leaves).updates}
    for block in range(4):
        update = updates[f"model.layers.{6 * block + 2}.self_attn.q_proj"]
        np.testing.assert_array_equal(update.a, a[:, block])
        np.testing.assert_array_equal(update.b, b[:, block])


def test_bfloat16_leaves_are_widened():
    leaves = {path: array.astype(ml_dtypes.bfloat16) for path, array in pair(("decoder", "layers_0")).items()}
    (update,) = read(leaves).updates
    assert update.a.dtype == update.b.dtype == np.float32


def test_moments_of_the_optimiser_and_base_weights_are_not_read():
    leaf = ("decoder", "layers_0", *QUERY[:-1])
    assert SOURCE.wants(("params", "params", *leaf, "kernel_lora_a"))
    assert not SOURCE.wants(("params", "params", *leaf, "kernel"))
    assert not SOURCE.wants(("opt_state", "0", "mu", "params", *leaf, "kernel_lora_a"))


def test_a_tree_of_tunix_is_not_maxtexts_and_the_other_way_round():
    tunix = [("layers", "0", "attn", "q_einsum", "w_lora_a"), ("layers", "0", "attn", "q_einsum", "w_lora_b")]
    assert not SOURCE.recognises(tunix, {})
    assert not TunixSource().recognises(list(pair(SCANNED, 2)), {})


def test_the_model_beside_a_reference_model_is_read():
    leaves = {("base", *path): array for path, array in pair(("decoder", "layers_3")).items()}
    assert [update.module for update in read(leaves).updates] == ["model.layers.3.self_attn.q_proj"]


class TestAlpha:
    def test_comes_from_the_metadata(self):
        adapter = read(pair(SCANNED, 2), metadata={"lora": LORA}, alpha=None)
        assert {update.scaling for update in adapter.updates} == {ALPHA / RANK}

    def test_has_to_be_given_where_there_is_no_metadata(self):
        with pytest.raises(UserError, match="Pass --alpha"):
            read(pair(SCANNED, 2), alpha=None)

    def test_may_not_be_given_otherwise_than_recorded(self):
        with pytest.raises(UserError, match=r"alpha is 4.5 in the checkpoint, not 16"):
            read(pair(SCANNED, 2), metadata={"lora": LORA}, alpha=16.0)

    def test_of_zero_is_broken_metadata(self):
        with pytest.raises(UserError, match=r"metadata is broken: lora_alpha"):
            read(pair(SCANNED, 2), metadata={"lora": {**LORA, "lora_alpha": 0.0}}, alpha=None)

    def test_is_never_rank_stabilised(self):
        with pytest.raises(UserError, match="alpha / rank"):
            read(pair(SCANNED, 2), use_rslora=True)


def zero_b(leaves):
    return {path: array * (not path[-1].endswith("b")) for path, array in leaves.items()}


def nan_a(leaves):
    return {path: array * (np.nan if path[-1].endswith("a") else 1) for path, array in leaves.items()}


def on_first_axis(leaves):
    return {path: np.moveaxis(array, 1, 0) for path, array in leaves.items()}


EXPERTS = ("mlp", "moe_block", "MoeBlock_0", "wi_0")
LOCAL = ("decoder", "scanned_blocks", "local_layers")


@pytest.mark.parametrize(
    ("leaves", "metadata", "problem"),
    [
        pytest.param(dict([*pair(SCANNED, 2).items()][:1]), {}, "lacks its lora_b", id="A alone"),
        pytest.param(dict([*pair(SCANNED, 2).items()][1:]), {}, "lacks its lora_a", id="B alone"),
        pytest.param(pair(SCANNED, 2, module=EXPERTS), {}, "adapt routed experts", id="experts"),
        pytest.param(
            pair((), module=("vision_encoder", "query", "kernel")), {}, "no module that can be merged", id="vision"
        ),
        pytest.param(
            pair((), module=("token_embedder", "embedding")), {}, "no module that can be merged", id="embedding"
        ),
        pytest.param(
            pair(("decoder", "layers"), 2), {}, "no module that can be merged", id="stacked without the pattern"
        ),
        pytest.param(on_first_axis(pair(SCANNED, 2)), {}, "from axis 1 on", id="another axis"),
        pytest.param(pair(SCANNED), {}, "expected (in, blocks, r) and (r, blocks, out)", id="not stacked"),
        pytest.param(pair(("decoder", "layers_1"), 2), {}, "expected (in, r) and (r, out)", id="stacked for one layer"),
        pytest.param(pair(LOCAL, 2), {}, "expected (in, blocks, layers, r)", id="stacked once for twice"),
        pytest.param(pair(LOCAL, 2, 4), {}, "stacks 4 sliding layers a block, expected 5", id="short block"),
        pytest.param(
            pair(SCANNED, 2) | pair((*SCANNED[:2], "layers_3"), 3),
            {},
            "disagree on the number of blocks: 2 in decoder.layers.layers_2",
            id="blocks",
        ),
        pytest.param(pair(REST), {}, "come after whole blocks, of which the checkpoint holds no leaf", id="remainder"),
        pytest.param(pair(SCANNED, 2, rank=2), {"lora": LORA}, "has rank 2, the metadata says 3", id="rank"),
        pytest.param(pair(SCANNED, 2), {"scan_layers": False}, "the metadata says scan_layers=False", id="scanned"),
        pytest.param(
            pair(("decoder", "layers_0")), {"scan_layers": True}, "the metadata says scan_layers=True", id="not scanned"
        ),
        pytest.param(zero_b(pair(SCANNED, 2)), {}, "lora_b of self_attn.q_proj is all zero", id="untrained"),
        pytest.param(nan_a(pair(SCANNED, 2)), {}, "values that are not finite", id="not finite"),
        pytest.param({("decoder", "layers_0", "x_lora_c"): np.ones(2)}, {}, "neither lora_a nor lora_b", id="neither"),
    ],
)
def test_a_leaf_that_cannot_be_used_is_a_problem(leaves, metadata, problem):
    (line,) = read(leaves, metadata=metadata).problems
    assert problem in line


def test_a_leaf_that_cannot_be_read_is_one_problem_and_its_partner_none():
    (path_a, a), (path_b, _) = pair(SCANNED, 2).items()
    adapter = read({path_a: a}, faults={path_b: "DATA_LOSS"})
    assert adapter.problems == (f"leaf {'.'.join(path_b)} cannot be read (DATA_LOSS)",)
    assert adapter.updates == ()
