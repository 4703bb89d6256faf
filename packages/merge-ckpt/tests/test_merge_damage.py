"""Damage that random bytes seldom make, each kind met by one line instead of a traceback, a crash or a wrong guess."""

import json
import shutil
import subprocess
import sys

import numpy as np
import orbax.checkpoint as ocp
import pytest

from portlab_merge.base_model import open_base
from portlab_merge.checkpoint import read_checkpoint
from portlab_merge.diff import contradictions, diff_models, read_claim
from portlab_merge.location import open_location
from portlab_merge.overlay import MergeOptions, merge
from portlab_merge.plan import make_plan
from portlab_merge.sources import Given, Tree
from portlab_merge.sources.tunix import TunixSource
from portlab_merge.steps import pick_step
from portlab_merge.verify import verify_merged
from portlab_spec.errors import CheckFailed, UserError
from portlab_spec.safetensors_header import read_header


@pytest.fixture
def own_base(base, tmp_path):
    """A base that may be damaged."""
    shutil.copytree(base, tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def edit():
    """Change the JSON in a file: edit(path, lambda value: ...)."""

    def change(path, how):
        value = json.loads(path.read_text())
        how(value)
        path.write_text(json.dumps(value))

    return change


@pytest.fixture
def merged(run, tmp_path):
    merge(run.plan(), tmp_path / "merged", MergeOptions())
    return tmp_path / "merged"


READ = """
import sys
from portlab_merge.checkpoint import read_checkpoint
print(*read_checkpoint(sys.argv[1]).adapter.problems, sep="\\n")
"""


@pytest.mark.parametrize("zarr3", [False, True])
@pytest.mark.parametrize("what", ["array", "chunk"])
def test_an_array_of_an_impossible_size_does_not_end_the_process(
    base, make_tree, describe, save, edit, tmp_path, zarr3, what
):
    """TensorStore 0.1.86 dies of std::bad_alloc, which no Python code can catch."""
    tree = make_tree(base)
    save(tmp_path, tree, describe(base, tree), ocdbt=False, zarr3=zarr3)
    array = tmp_path / "7" / "adapter" / "lora.mlp.up_proj.a"

    def enlarge(metadata):
        sizes = [metadata["shape"]]
        if what == "chunk":  # zarr 3 puts chunks into chunks
            parts = (metadata["chunk_grid"], metadata["codecs"][0]) if zarr3 else ()
            sizes = [part["configuration"]["chunk_shape"] for part in parts] or [metadata["chunks"]]
        for size in sizes:
            size[0] = 10**12

    edit(array / ("zarr.json" if zarr3 else ".zarray"), enlarge)
    result = subprocess.run([sys.executable, "-c", READ, str(tmp_path)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "leaf lora/mlp.up_proj/a cannot be read" in result.stdout
    assert "more than this machine's memory" in result.stdout


def test_an_array_without_a_tree_is_no_adapter(tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "one", np.ones(3, np.float32))
    with pytest.raises(UserError, match="none of its 1 leaves are LoRA matrices"):
        read_checkpoint(tmp_path / "one")


@pytest.mark.parametrize("number", [10**400, -(10**400)])
def test_metrics_may_be_any_number(run, edit, number):
    metadata = run.step / "_CHECKPOINT_METADATA"
    edit(metadata, lambda value: value.update(metrics={"loss": number}))
    assert pick_step(open_location(str(run.folder)), "best:loss").metrics == {"loss": number}


@pytest.mark.parametrize("order", [(float("nan"), 2.0), (2.0, float("nan"))])
def test_a_metric_that_is_not_a_number_is_never_the_best(run, edit, order):
    shutil.copytree(run.step, run.step.with_name("8"))
    for step, loss in zip(("7", "8"), order, strict=True):
        edit(run.step.with_name(step) / "_CHECKPOINT_METADATA", lambda value, m=loss: value.update(metrics={"loss": m}))
    assert pick_step(open_location(str(run.folder)), "best:loss").metrics == {"loss": 2.0}


def test_metrics_that_are_no_table_are_passed_over(run):
    (run.step / "metrics").mkdir()
    (run.step / "metrics" / "metrics").write_text("[1]")
    assert pick_step(open_location(str(run.folder))).metrics == {}


@pytest.mark.parametrize("metadata", [[], None, "", 0])
def test_an_index_may_lack_metadata(make_base, make_run, edit, tmp_path, metadata):
    run = make_run(make_base(max_shard_size="40KB"))
    index = run.base / "model.safetensors.index.json"
    edit(index, lambda value: value.update(metadata=metadata))
    merge(run.plan(), tmp_path / "out", MergeOptions())
    assert verify_merged(run.plan(), tmp_path / "out") == []


def test_an_index_with_metadata_of_another_kind_is_refused(make_base, edit):
    base = make_base(max_shard_size="40KB")
    edit(base / "model.safetensors.index.json", lambda value: value.update(metadata=["total_size"]))
    with pytest.raises(UserError, match="metadata is not a JSON object"):
        open_base(base)


def test_a_card_of_the_base_in_another_encoding_is_no_hindrance(own_base, make_run, tmp_path):
    (own_base / "README.md").write_bytes(b"---\nlicense: gemma\nauthor: \xe9\n---\n")
    merge(make_run(own_base).plan(), tmp_path / "out", MergeOptions())
    assert "\nlicense: gemma\n" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    "report",
    ["[]", "{", '{"exported_step": 7, "before": [], "after": []}', "[" * 100_000]
    + [
        json.dumps({"exported_step": 7, "before": {}, "after": {"metrics": metrics}})
        for metrics in ([1], {"a": {}}, {"a": {"value": "x", "hits": 1, "count": 2}}, {"a": 1})
    ],
    ids=lambda report: report[:40],
)
def test_a_report_of_the_run_that_cannot_be_read_only_costs_the_figures(run, tmp_path, report):
    (run.folder / "report.json").write_text(report)
    merge(run.plan(), tmp_path / "out", MergeOptions())
    assert verify_merged(run.plan(), tmp_path / "out") == []


def test_a_config_with_infinity_is_written_as_it_was(own_base, edit, make_run, tmp_path):
    """As transformers writes it, though strict JSON has no such number."""
    edit(own_base / "config.json", lambda value: value.update(limit=float("inf")))
    merge(make_run(own_base).plan(), tmp_path / "out", MergeOptions(dtype="float32"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["limit"] == float("inf")


@pytest.mark.parametrize("size", [1e25, 1e38])
def test_finite_values_whose_squares_are_not_are_reported(make_base, make_run, describe, tmp_path, size):
    folder = make_base("float32")

    def enlarge(tree, metadata):
        tree["lora"]["mlp.up_proj"]["b"][0] *= np.float32(size) / np.abs(tree["lora"]["mlp.up_proj"]["b"][0]).max() / 8
        metadata |= describe(folder, tree)

    plan = make_run(folder, enlarge).plan()
    manifest = merge(plan, tmp_path / "out", MergeOptions())
    norm = manifest["tensors"]["model.layers.0.mlp.up_proj.weight"]["delta_norm"]
    target = next(t for t in plan.targets if t.tensor == "model.layers.0.mlp.up_proj.weight")
    assert norm == pytest.approx(plan.delta_norm(target), rel=1e-5)
    assert verify_merged(plan, tmp_path / "out") == []


@pytest.mark.parametrize("side", ["a", "b"])
def test_factors_without_elements_are_named(side):
    shapes = {"a": (8, 0), "b": (0, 2, 3)} if side == "a" else {"a": (8, 4), "b": (4, 0, 3)}
    leaves = {("layers", "0", "attn", "q_einsum", f"w_lora_{s}"): np.ones(shapes[s], np.float32) for s in "ab"}
    problems = TunixSource().read(Tree(leaves, {}, {}), Given(alpha=4.0)).problems
    assert any("expected A (D, r) and B (r, N, H)" in problem for problem in problems)


def test_weights_that_are_not_finite_have_no_rank(run, merged):
    weights = merged / "model.safetensors"
    header = read_header(weights)
    tensor = next(t for t in header.tensors if t.name == "model.layers.1.mlp.up_proj.weight")
    data = bytearray(weights.read_bytes())
    data[header.data_start + tensor.start : header.data_start + tensor.end : 2] = b"\x80" * (tensor.nbytes // 2)
    data[header.data_start + tensor.start + 1 : header.data_start + tensor.end : 2] = b"\x7f" * (tensor.nbytes // 2)
    weights.write_bytes(data)
    differences = diff_models(open_base(run.base), open_base(merged), 8)
    assert contradictions(differences, read_claim(merged)) == [f"{tensor.name} differs by more than rank 4"]


@pytest.mark.parametrize("rank", ["4", 4.5, float("nan"), -1, True, None])
def test_a_claim_of_a_rank_that_is_none_is_refused(merged, edit, rank):
    edit(merged / "merge_manifest.json", lambda value: value["lora"].update(rank=rank))
    with pytest.raises(UserError, match="is not a manifest"):
        read_claim(merged)


@pytest.mark.parametrize("key", ["scale", "dtype", "files_sha256", "checkpoint"])
@pytest.mark.parametrize("value", [10**400, "x", [], None, float("nan")], ids=["huge", "x", "[]", "null", "nan"])
def test_a_manifest_that_says_something_else_never_passes(run, merged, edit, key, value):
    edit(merged / "merge_manifest.json", lambda manifest: manifest.update({key: value}))
    try:
        faults = verify_merged(run.plan(), merged)
    except CheckFailed as error:
        faults = [str(error)]
    assert faults


def test_rows_of_no_token_are_named(run, base, edit, tmp_path):
    from safetensors.numpy import load_file, save_file

    from portlab_merge.peft_adapter import export_adapter

    export_adapter(run.plan(), tmp_path / "adapter")
    edit(tmp_path / "adapter" / "adapter_config.json", lambda c: c.update(trainable_token_indices={"embed_tokens": []}))
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    rows = next(name for name in tensors if "trainable_tokens_delta" in name)
    save_file({**tensors, rows: np.zeros((0, 48), np.float32)}, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(UserError, match="0 token ids"):
        make_plan(open_base(base), read_checkpoint(tmp_path / "adapter"))
