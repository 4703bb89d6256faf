"""The coach on a model folder in its own process: JAX and transformers give the same ids and the same answers."""

import asyncio
import json

import pytest
from tiny_run import GEMMA3, QWEN3, save_model, save_tokenizer
from toy_gemmas import gemma4, randomize

from fitnesscoach.backends import BackendError
from fitnesscoach.backends.folder import Folder
from fitnesscoach.backends.runtimes import load_decoder
from fitnesscoach.cli import main
from portlab_jax import streaming
from portlab_spec.conversation import Message
from portlab_spec.errors import UserError

NEW = 12
POSITIONS = 8192  # a character is a token here, and the coach's prompt has thousands


@pytest.fixture(scope="module")
def gemma3_folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("gemma3"), GEMMA3 | {"max_position_embeddings": POSITIONS})


@pytest.fixture(scope="module")
def gemma4_folder(tmp_path_factory):
    """As E2B: per-layer inputs, the last layers share keys and values."""
    folder = tmp_path_factory.mktemp("gemma4")
    sizes = {"vocab_size": 640, "vocab_size_per_layer_input": 640, "max_position_embeddings": POSITIONS}
    randomize(gemma4(hidden_size_per_layer_input=8, num_kv_shared_layers=3, **sizes)).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(params=["gemma3_folder", "gemma4_folder"])
def model(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(autouse=True)
def no_cache_of_programs(monkeypatch):
    monkeypatch.setattr(streaming, "use_compilation_cache", lambda: None)


def test_ids_are_the_same_at_every_length(model):
    jax, torch = (load_decoder(model, runtime) for runtime in ("jax", "transformers"))
    assert type(load_decoder(model)) is type(jax)
    ids = [2, *(3 + i * i % 600 for i in range(700))]
    border = streaming.SLOTS - NEW  # of the smallest cache
    for length in (1, 64, 65, border, border + 1, 700):
        made = [*torch.decode(ids[:length], (), NEW)]
        assert [*jax.decode(ids[:length], (), NEW)] == made
    # `made` is of the longest.
    stopped = made[: made.index(made[5]) + 1]
    assert [*jax.decode(ids[:700], {made[5]}, NEW)] == [*torch.decode(ids[:700], {made[5]}, NEW)] == stopped


def test_answers_and_what_is_streamed_are_the_same(model):
    async def answer(runtime):
        pieces = []

        async def show(text):
            pieces.append(text)

        backend = Folder(model, runtime=runtime, max_tokens=NEW)
        answered = await backend.answer([Message(role="user", content="How many steps today?")], (), show)
        await backend.close()
        return answered, pieces

    jax, torch = (asyncio.run(answer(runtime)) for runtime in ("jax", "transformers"))
    assert jax == torch
    assert jax[0].raw


def test_a_conversation_beyond_the_positions_is_one_line(gemma3_folder):
    backend = Folder(gemma3_folder, runtime="jax")
    with pytest.raises(BackendError, match=r"tokens, the model 8,192 positions\. Start a new one"):
        asyncio.run(backend.answer([Message(role="user", content="x" * 9000)], (), print))


def test_eval_scores_folders_with_either(gemma3_folder, gemma4_folder, capsys):
    def scores(runtime):
        models = ["--model", str(gemma3_folder), "--model", str(gemma4_folder)]
        limits = ["--limit", "2", "--max-tokens", str(NEW)]
        assert main(["eval", *models, "--compare", "--json", "--runtime", runtime, *limits]) == 0
        (found,) = json.loads(capsys.readouterr().out)
        for model in found["models"].values():
            del model["seconds"]
        return found

    found = scores("jax")
    assert len(found["models"]) == 2
    assert found["differences"]
    assert found == scores("transformers")


def test_a_family_that_jax_does_not_run_goes_to_transformers(tmp_path):
    folder = save_model(tmp_path, QWEN3)
    with pytest.raises(UserError, match=rf"^{folder}: .*has none of qwen3\. Pass --runtime transformers$"):
        main(["ask", "x", "--model", str(folder), "--runtime", "jax"])
    assert len([*load_decoder(folder).decode([2, 5, 6], (), NEW)]) == NEW
