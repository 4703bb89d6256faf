"""`--max-shard-size`: the same tensors, bit for bit, cut into other files."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from portlab_merge.overlay import MergeOptions, merge
from portlab_merge.shards import parse_size
from portlab_merge.verify import verify_merged
from portlab_spec.errors import UserError
from portlab_spec.safetensors_file import INDEX_FILE, SINGLE_FILE
from portlab_spec.safetensors_header import read_header

LIMIT = 20_000  # bytes; some tensors are smaller, none is larger
WHOLE = 10**9


@pytest.fixture(scope="module")
def sharded_base(make_base):
    folder = make_base(max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture(params=["one file", "shards"])
def any_run(request, base, sharded_base, make_run):
    return make_run(base if request.param == "one file" else sharded_base)


@pytest.fixture
def cut(any_run, tmp_path):
    merge(any_run.plan(), tmp_path / "cut", MergeOptions(max_shard_size=LIMIT))
    return tmp_path / "cut"


def headers(folder):
    return {path.name: read_header(path) for path in sorted(folder.glob("*.safetensors"))}


def tensors(folder):
    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


def order(folder):
    return [tensor.name for header in headers(folder).values() for tensor in header.tensors]


def test_shards_are_as_large_as_the_limit_allows(cut):
    sizes = [[t.nbytes for t in header.tensors] for header in headers(cut).values()]
    assert len(sizes) > 3
    assert max(sum(shard) for shard in sizes) <= LIMIT
    for shard, following in pairwise(sizes):
        assert sum(shard) + following[0] > LIMIT


def test_a_tensor_larger_than_the_limit_has_a_file_of_its_own(any_run, tmp_path):
    merge(any_run.plan(), tmp_path / "cut", MergeOptions(max_shard_size=1000))
    for header in headers(tmp_path / "cut").values():
        assert len(header.tensors) == 1 or header.data_bytes <= 1000
    assert max(header.data_bytes for header in headers(tmp_path / "cut").values()) > 1000


def test_tensors_stay_in_the_order_of_the_base(any_run, cut):
    assert order(cut) == order(any_run.base)


def test_the_index_names_every_tensor_once_and_counts_bytes(cut):
    index = json.loads((cut / INDEX_FILE).read_text())
    assert index["weight_map"] == {t.name: name for name, header in headers(cut).items() for t in header.tensors}
    assert index["metadata"]["total_size"] == sum(header.data_bytes for header in headers(cut).values())


def test_files_are_numbered_as_on_the_hubs(cut):
    count = len(headers(cut))
    assert list(headers(cut)) == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def test_one_file_has_no_index(any_run, tmp_path):
    merge(any_run.plan(), tmp_path / "whole", MergeOptions(max_shard_size=WHOLE))
    assert list(headers(tmp_path / "whole")) == [SINGLE_FILE]
    assert not (tmp_path / "whole" / INDEX_FILE).exists()


@pytest.mark.parametrize("limit", [3000, WHOLE])
@pytest.mark.parametrize("dtype", ["keep", "float32"])
def test_tensors_are_bit_for_bit_the_same(any_run, tmp_path, limit, dtype):
    plain = merge(any_run.plan(), tmp_path / "plain", MergeOptions(dtype))
    cut = merge(any_run.plan(), tmp_path / "cut", MergeOptions(dtype, max_shard_size=limit))
    here, there = tensors(tmp_path / "plain"), tensors(tmp_path / "cut")
    assert set(here) == set(there)
    assert all(torch.equal(here[name].view(torch.uint8), there[name].view(torch.uint8)) for name in here)
    assert cut["tensors"] == plain["tensors"]
    assert cut["base"] == plain["base"]


def test_the_limit_counts_the_bytes_that_are_written(any_run, tmp_path):
    merge(any_run.plan(), tmp_path / "cut", MergeOptions("float32", max_shard_size=LIMIT))
    assert max(h.data_bytes for h in headers(tmp_path / "cut").values() if len(h.tensors) > 1) <= LIMIT
    widest = max(h.data_bytes for h in headers(tmp_path / "cut").values())
    assert widest <= max(LIMIT, 2 * max(t.nbytes for h in headers(any_run.base).values() for t in h.tensors))
    assert all(t.dtype == "F32" for h in headers(tmp_path / "cut").values() for t in h.tensors)


@pytest.mark.parametrize("limit", [LIMIT, WHOLE])
def test_transformers_computes_the_same_logits(any_run, logits, tmp_path, limit):
    merge(any_run.plan(), tmp_path / "plain", MergeOptions())
    merge(any_run.plan(), tmp_path / "cut", MergeOptions(max_shard_size=limit))
    np.testing.assert_array_equal(logits(tmp_path / "cut"), logits(tmp_path / "plain"))


@pytest.mark.parametrize(("limit", "dtype"), [(1, "keep"), (LIMIT, "float32"), (WHOLE, "keep")])
def test_it_verifies(any_run, tmp_path, limit, dtype):
    merge(any_run.plan(), tmp_path / "cut", MergeOptions(dtype, max_shard_size=limit))
    assert verify_merged(any_run.plan(), tmp_path / "cut") == []


def test_a_renamed_shard_fails_verification(any_run, cut):
    first = next(iter(headers(cut)))
    (cut / first).rename(cut / "model.other.safetensors")
    index = (cut / INDEX_FILE).read_text().replace(first, "model.other.safetensors")
    (cut / INDEX_FILE).write_text(index)
    faults = verify_merged(any_run.plan(), cut)
    assert any("weights files are" in fault for fault in faults)
    assert "model.other.safetensors differs from its sha256 in the manifest" in faults


def test_another_cut_than_the_manifest_says_fails_verification(any_run, cut):
    manifest = json.loads((cut / "merge_manifest.json").read_text())
    (cut / "merge_manifest.json").write_text(json.dumps({**manifest, "max_shard_size": 3 * LIMIT}))
    assert any("weights files are" in fault for fault in verify_merged(any_run.plan(), cut))


def test_a_limit_of_no_bytes_is_refused(run, tmp_path):
    with pytest.raises(UserError, match="--max-shard-size 0 must be at least 1 byte"):
        merge(run.plan(), tmp_path / "new" / "out", MergeOptions(max_shard_size=0))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5 * 10**9),
        ("500MB", 5 * 10**8),
        ("1TB", 10**12),
        ("2KB", 2000),
        ("500MiB", 500 << 20),
        ("1.5 GiB", 3 << 29),
        (" 4gb ", 4 * 10**9),
    ],
)
def test_sizes_are_decimal_unless_they_have_an_i(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "5", "GB", "-1GB", "5 GB GB", "0GB", "0.0001KB", "1e3MB", "5PB", "nanGB", "5GBs"])
def test_other_sizes_are_refused(text):
    with pytest.raises(UserError, match="is not a size"):
        parse_size(text)


def test_the_command_line_takes_a_size(run, command, tmp_path):
    result = command("merge", "--ckpt", run.folder, "--out", tmp_path / "out", "--max-shard-size", "20KB")
    assert result.returncode == 0, result.stderr
    assert len(headers(tmp_path / "out")) > 3
    refused = command("merge", "--ckpt", run.folder, "--out", tmp_path / "other", "--max-shard-size", "much")
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
