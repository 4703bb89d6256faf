"""One conversation, token by token: the ids of the whole sequence without a cache, whatever was asked before."""

import logging
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
import torch
from eight_devices import on_eight_devices, run_on_eight_devices
from tiny_run import GEMMA3, QWEN3, save_model

from portlab_jax import streaming
from portlab_jax.mesh import MeshPlan
from portlab_jax.streaming import StreamingDecoder, cache_slots, choose_mesh, load
from portlab_jax.weights import load_params
from portlab_spec.decoding import find_decoder
from portlab_spec.errors import UserError
from portlab_spec.models import UnsupportedModel
from portlab_spec.recipe import Mesh

NEW = 6
# Around the ends of chunks of 8 tokens, up to the end of a cache of 32 slots, of which the answer takes six. The window
# of most models is 6.
LENGTHS = (1, 2, 8, 9, 16, 17, 26)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(streaming, "CHUNK", 8)
    monkeypatch.setattr(streaming, "SLOTS", 32)
    monkeypatch.setattr(streaming, "use_compilation_cache", lambda: None)


@pytest.fixture(scope="module")
def compiled(tiny_model):
    tiny = tiny_model("gemma3, two kv heads")
    return StreamingDecoder(tiny.config, tiny.params, tiny.mesh)


@pytest.fixture
def decoder(compiled):
    """A decoder of `tiny_one` that has read nothing, but may have compiled."""
    compiled._kept.clear()
    return compiled


@pytest.fixture
def chunks(decoder, monkeypatch):
    """Slots at which chunks of prompts were read."""
    seen, read = [], decoder.read

    def counted(params, caches, tokens, at):
        seen.append(int(at))
        return read(params, caches, tokens, at)

    counted.prepare = read.prepare
    monkeypatch.setattr(decoder, "read", counted)
    return seen


def prompt_of(rng, length):
    return [2, *rng.integers(3, 96, length - 1).tolist()]


def reference(tiny, prompt, new=NEW):
    """Token by token over the whole sequence in transformers, no cache."""
    ids = list(prompt)
    for _ in range(new):
        with torch.no_grad():
            ids.append(int(tiny.torch(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_equals_transformers_at_every_length(tiny, rng):
    decoder = StreamingDecoder(tiny.config, tiny.params, tiny.mesh)
    prompts = [prompt_of(rng, length) for length in LENGTHS]
    assert [[*decoder.decode(p, (), NEW)] for p in prompts] == [reference(tiny, p) for p in prompts]


def test_equals_transformers_in_a_larger_cache(tiny_one, rng, decoder):
    prompts = [prompt_of(rng, length) for length in (27, 40)]
    assert [[*decoder.decode(p, (), NEW)] for p in prompts] == [reference(tiny_one, p) for p in prompts]


def test_an_answer_ends_with_the_first_stop_id(tiny_one, rng, decoder):
    prompt = prompt_of(rng, 12)
    free = reference(tiny_one, prompt)
    stop = free[3]
    assert [*decoder.decode(prompt, {stop, 999}, NEW)] == free[: free.index(stop) + 1]


def test_an_answer_ends_at_its_limit(tiny_one, rng, decoder):
    prompt = prompt_of(rng, 12)
    assert [*decoder.decode(prompt, (), 2)] == reference(tiny_one, prompt, 2)
    assert [*decoder.decode(prompt, (), 0)] == []


def test_a_token_is_computed_when_it_is_asked_for(rng, decoder, monkeypatch):
    calls = Counter()
    compiled = decoder.step.prepare

    def prepare(*args):
        program = compiled(*args)

        def counted(*args):
            calls["step"] += 1
            return program(*args)

        return counted

    monkeypatch.setattr(decoder.step, "prepare", prepare)
    answer = decoder.decode(prompt_of(rng, 12), (), NEW)
    assert calls["step"] == 0
    next(answer)
    next(answer)
    assert calls["step"] == 2
    answer.close()
    assert calls["step"] == 2


def test_only_chunks_that_differ_are_read_again(rng, decoder, chunks):
    first = prompt_of(rng, 21)
    list(decoder.decode(first, (), NEW))
    assert chunks == [0, 8, 16]  # the last is padded, and not kept
    chunks.clear()
    list(decoder.decode([*first[:14], 90, *first[15:]], (), NEW))
    assert chunks == [8, 16]
    chunks.clear()
    list(decoder.decode(first[:17], (), NEW))  # two chunks and the token that makes the next
    assert chunks == [8]


@pytest.mark.parametrize("case", ["gemma3, two kv heads", "gemma4, shared keys and values"])
def test_what_was_asked_before_changes_nothing(tiny_model, rng, case):
    """Prompts that share a start, an answer that is given up: as if each were the first."""
    tiny, start = tiny_model(case), prompt_of(rng, 20)
    decoder = StreamingDecoder(tiny.config, tiny.params, tiny.mesh)
    given_up = decoder.decode([*start[:18], 70], (), NEW)
    began = next(given_up)
    for prompt in (start, [*start, 50, 51, 52], start[:11], [*start[:9], 60, *start[10:]], start):
        assert [*decoder.decode(prompt, (), NEW)] == reference(tiny, prompt)
    # Taken up again, it goes on where it was.
    assert [began, *given_up] == reference(tiny, [*start[:18], 70])


class XlaCompilations(logging.Handler):
    """Counts what XLA compiles, by JAX's own log."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def emit(self, record):
        message = record.getMessage()
        if message.startswith("Finished XLA compilation of"):
            self.names[message.split()[4]] += 1


@pytest.fixture
def compilations():
    handler = XlaCompilations()
    logging.getLogger("jax").addHandler(handler)
    with jax.log_compiles():
        yield handler.names
    logging.getLogger("jax").removeHandler(handler)


def test_twenty_turns_compile_two_programs_for_each_size_of_cache(tiny_one, rng, compilations, caplog):
    decoder = StreamingDecoder(tiny_one.config, tiny_one.params, tiny_one.mesh)
    prompt = prompt_of(rng, 5)
    for turn in range(20):
        made = [*decoder.decode(prompt, (), 2)]
        prompt += [*made, *rng.integers(3, 96, 1 + turn % 5).tolist()]
    sizes = (32, 64, 128)
    assert 64 < len(prompt) < 126
    assert (decoder.read.count, decoder.step.count) == (len(sizes), len(sizes))
    assert compilations["jit(_read)"] == compilations["jit(_step)"] == len(sizes)
    assert max(compilations.values()) == len(sizes)  # and so does what makes empty caches and copies them
    assert "compiled anew" not in caplog.text


def test_what_is_prepared_is_not_compiled_again(tiny_one, rng):
    decoder = StreamingDecoder(tiny_one.config, tiny_one.params, tiny_one.mesh)
    decoder.prepare(20, NEW)
    assert (decoder.read.count, decoder.step.count) == (1, 1)
    list(decoder.decode(prompt_of(rng, 20), (), NEW))
    assert (decoder.read.count, decoder.step.count) == (1, 1)


def test_caches_double():
    assert [cache_slots(n) for n in (1, 32, 33, 64, 65, 129)] == [32, 32, 64, 64, 128, 256]


def test_bfloat16_decodes(tiny_one, rng):
    small = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny_one.params)
    decoder = StreamingDecoder(tiny_one.config, small, tiny_one.mesh)
    assert len([*decoder.decode(prompt_of(rng, 20), (), NEW)]) == NEW
    assert {leaf.dtype for leaf in jax.tree.leaves(decoder._kept[32].caches)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("case", ["gemma3, two kv heads", "gemma4, shared keys and values", "gemma4, experts"])
def test_a_folder_is_loaded_by_the_entry_point(tiny_model, rng, case):
    """On a CPU its layers are not stacked."""
    tiny, prompt = tiny_model(case), prompt_of(rng, 20)
    assert find_decoder("jax").load() is load
    decoder = load(tiny.folder)
    assert decoder.positions == 512
    assert len(decoder._params["layers"]) == tiny.config.num_hidden_layers
    assert [*decoder.decode(prompt, (), NEW)] == reference(tiny, prompt)


def test_another_family_is_refused_as_not_supported_here(tmp_path):
    with pytest.raises(UnsupportedModel, match="has none of qwen3"):
        load(save_model(tmp_path, QWEN3))


def test_a_folder_without_weights_is_refused(tmp_path):
    (save_model(tmp_path, GEMMA3) / "model.safetensors").unlink()
    with pytest.raises(UserError, match="safetensors") as refused:
        load(tmp_path)
    assert not isinstance(refused.value, UnsupportedModel)


@on_eight_devices
def test_equals_transformers_on_several_devices(tiny_model, rng):
    tiny = tiny_model("gemma4, keys are values")  # heads of sliding layers are cut, those of full ones repeated
    mesh = MeshPlan.create(Mesh(data=1, fsdp=1, tp=2), jax.devices()[:2])
    params, _ = load_params(tiny.folder, tiny.config, jnp.float32, mesh)
    decoder = StreamingDecoder(tiny.config, params, mesh)
    prompts = [prompt_of(rng, length) for length in (9, 20)]
    assert [[*decoder.decode(p, (), NEW)] for p in prompts] == [reference(tiny, p) for p in prompts]


@on_eight_devices
def test_as_few_devices_as_hold_the_weights(monkeypatch):
    monkeypatch.setattr(streaming, "device_memory", lambda device: 16 * 2**30)
    sizes = [choose_mesh(gib * 2**30).mesh.shape["tp"] for gib in (1, 8, 12, 60, 1000)]
    assert sizes == [1, 1, 2, 8, 8]


def test_on_eight_devices():
    assert "2 passed" in run_on_eight_devices(__file__, "-k", "several_devices or as_few_devices")
