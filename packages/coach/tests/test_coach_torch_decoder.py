"""A model folder run by transformers: the likeliest tokens, one at a time."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.numpy import load_file, save_file  # noqa: E402
from tiny_run import GEMMA3, QWEN3, save_model  # noqa: E402
from toy_gemmas import CASES, randomize  # noqa: E402

from fitnesscoach.backends.torch_decoder import TorchDecoder, load  # noqa: E402
from portlab_spec.errors import UserError  # noqa: E402

NEW = 6
PROMPT = [2, 60, 17, 33, 88, 5, 41, 9, 77, 20, 63, 12]  # twice the window


@pytest.fixture(params=["gemma3, two kv heads", "gemma4, shared keys and values", "gemma4, experts"])
def model(request):
    return randomize(CASES[request.param]())


@torch.no_grad()
def reference(model, prompt):
    """Token by token over the whole sequence, no cache."""
    ids = list(prompt)
    for _ in range(NEW):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_the_likeliest_tokens(model):
    expected = reference(model, PROMPT)
    decoder = TorchDecoder(model)
    assert [*decoder.decode(PROMPT, (), NEW)] == expected
    assert [*decoder.decode(PROMPT, (), 2)] == expected[:2]
    assert [*decoder.decode(PROMPT, {expected[3]}, NEW)] == expected[: expected.index(expected[3]) + 1]


def test_answers_do_not_disturb_each_other(model):
    decoder, other = TorchDecoder(model), [2, 8, 9]
    first, second = decoder.decode(PROMPT, (), NEW), decoder.decode(other, (), NEW)
    pairs = [*zip(first, second, strict=True)]
    assert [[*ids] for ids in zip(*pairs, strict=True)] == [reference(model, PROMPT), reference(model, other)]


@pytest.mark.parametrize("config", [GEMMA3, QWEN3], ids=["gemma3", "qwen3"])
def test_a_folder_is_loaded(tmp_path, config):
    decoder = load(save_model(tmp_path, config))
    assert decoder.positions == 1024
    assert len([*decoder.decode(PROMPT, (), NEW)]) == NEW


def test_a_folder_without_a_tensor_is_refused(tmp_path):
    path = save_model(tmp_path) / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(
        UserError, match=r"cannot load the model \(the tensor model.layers.1.mlp.up_proj.weight is miss"
    ):
        load(tmp_path)


def test_a_tensor_of_another_shape_is_refused(tmp_path):
    path = save_model(tmp_path) / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:8].copy()
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(UserError, match="transformers cannot load the model") as refused:
        load(tmp_path)
    assert "\n" not in str(refused.value)


def test_a_folder_without_weights_is_refused(tmp_path):
    (save_model(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(UserError, match="transformers cannot load the model"):
        load(tmp_path)


def test_a_model_that_transformers_does_not_know_is_refused(tmp_path):
    save_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gemma9"}')
    with pytest.raises(UserError, match="transformers cannot load the model") as refused:
        load(tmp_path)
    assert "\n" not in str(refused.value)
