"""Greedy decoding with a shared prefix gives what the whole sequence gives without a cache."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
import torch
from eight_devices import on_eight_devices, run_on_eight_devices

from portlab_jax.decode import Decoder, common_prefix_length
from portlab_jax.lora import AdapterOptions, init_adapter
from portlab_jax.mesh import MeshPlan
from portlab_jax.model import with_adapter
from portlab_jax.weights import load_params
from portlab_spec.models import plan_adapter
from portlab_spec.recipe import Lora, Mesh

NEW = 10
OPTIONS = AdapterOptions()
# (data, fsdp, tp). The models have four query heads, and two key/value heads or one.
MESHES = [
    ("gemma3, two kv heads", (4, 1, 2)),  # both kinds of heads are cut
    ("gemma3, two kv heads", (2, 1, 4)),  # keys and values are repeated
    ("gemma3, one kv head, wide window", (1, 1, 8)),  # no heads are cut
    ("gemma4, keys are values", (4, 1, 2)),  # heads of sliding layers are cut, those of full ones repeated
    ("gemma4, shared keys and values", (2, 2, 2)),
    ("gemma4, experts", (1, 1, 2)),
    ("gemma4, experts", (1, 4, 2)),
]


@pytest.fixture
def decode():
    """Decode with a model's own weights, or with an adapter's."""

    def run(tiny, prompts, stop_ids=(), new=NEW, *, adapter=None, options=OPTIONS, **more):
        with jax.set_mesh(tiny.mesh.mesh):
            weights = with_adapter(tiny.params, adapter or {"lora": {}}, options)
            return Decoder(tiny.config, options, stop_ids, new, tiny.mesh)(weights, prompts, **more)

    return run


def prompts_with(rng, prefix, suffixes):
    shared = rng.integers(3, 96, prefix).tolist()
    return [[*shared, 10 + i, *rng.integers(3, 96, n).tolist()] for i, n in enumerate(suffixes)]


def reference(tiny, prompt, stop_ids):
    """Token by token over the whole sequence in transformers, no cache."""
    ids = list(prompt)
    for _ in range(NEW):
        with torch.no_grad():
            ids.append(int(tiny.torch(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        if ids[-1] in stop_ids:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("prefix", [20, 1], ids=["window shorter than prefix", "only BOS shared"])
def test_equals_transformers_token_by_token(tiny, rng, decode, prefix):
    prompts = prompts_with(rng, prefix, [3, 9, 1, 5])
    free = [reference(tiny, p, stop_ids=()) for p in prompts]
    stop_ids = (free[0][4], free[1][0])  # tokens that really occur, so that rows stop at different times
    expected = [reference(tiny, p, stop_ids) for p in prompts]
    assert len({len(e) for e in expected}) > 1
    assert decode(tiny, prompts, stop_ids, batch_size=4) == expected


def test_prompts_without_anything_in_common(tiny_one, decode):
    prompts = [[5, 6, 7], [8, 9]]
    assert decode(tiny_one, prompts) == [reference(tiny_one, p, ()) for p in prompts]


def test_batch_size_does_not_change_the_answers(tiny_one, rng, decode):
    leaves = plan_adapter(tiny_one.config, Lora(rank=4, alpha=8.0))
    with jax.set_mesh(tiny_one.mesh.mesh):
        adapter = init_adapter(leaves, jax.random.key(0), embedding=tiny_one.params["embed_tokens"], token_ids=(3, 5))
        keys = iter(jax.random.split(jax.random.key(1), 100))
        adapter = jax.tree.map(lambda leaf: leaf + 0.1 * jax.random.normal(next(keys), leaf.shape), adapter)
    more = {"adapter": adapter, "options": AdapterOptions(leaves, 0.0, (3, 5))}
    prompts = prompts_with(rng, 12, [3, 9, 1, 5, 2])
    whole = decode(tiny_one, prompts, batch_size=8, **more)
    assert whole == decode(tiny_one, prompts, batch_size=2, **more)
    assert whole != decode(tiny_one, prompts)
    assert all(len(ids) == NEW for ids in whole)


def test_one_compilation_serves_questions_of_many_lengths(tiny_one, rng):
    decoder = Decoder(tiny_one.config, OPTIONS, (), 2, tiny_one.mesh)
    shared = rng.integers(3, 96, 12).tolist()
    with jax.set_mesh(tiny_one.mesh.mesh):
        weights = with_adapter(tiny_one.params, {"lora": {}}, OPTIONS)
        for lengths in ([3, 9], [1, 20], [30, 2]):
            prompts = [[*shared, 10 + i, *rng.integers(3, 96, n).tolist()] for i, n in enumerate(lengths)]
            decoder(weights, prompts, batch_size=2)
    assert decoder._generate._cache_size() == 1
    assert decoder._prefill._cache_size() == 1


def test_bfloat16_decodes(tiny_one, rng, decode):
    small = SimpleNamespace(
        config=tiny_one.config,
        mesh=tiny_one.mesh,
        params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny_one.params),
    )
    assert all(len(ids) == NEW for ids in decode(small, prompts_with(rng, 8, [2, 5])))


def test_common_prefix_leaves_every_prompt_a_token():
    assert common_prefix_length([[1, 2, 3], [1, 2]]) == 1
    assert common_prefix_length([[1, 2, 3], [1, 5, 3]]) == 1
    assert common_prefix_length([[1, 2, 3], [4]]) == 0
    assert common_prefix_length([[1, 2, 3]]) == 2


def test_progress_is_told_after_every_batch(tiny_one, rng, decode):
    told = []
    decode(tiny_one, prompts_with(rng, 4, [1, 1, 1]), (), 2, batch_size=2, advance=told.append)
    assert told == [2, 3]


@on_eight_devices
@pytest.mark.parametrize(("case", "sizes"), MESHES)
def test_equals_transformers_on_a_mesh(tiny_model, rng, decode, case, sizes):
    tiny = tiny_model(case)
    data, fsdp, tp = sizes
    mesh = MeshPlan.create(Mesh(data=data, fsdp=fsdp, tp=tp), jax.devices()[: data * fsdp * tp])
    with jax.set_mesh(mesh.mesh):
        params, _ = load_params(tiny.folder, tiny.config, jnp.float32, mesh)
    prompts = prompts_with(rng, 9, [3, 9, 1, 5, 2])
    stop_ids = (reference(tiny, prompts[0], ())[2],)
    expected = [reference(tiny, p, stop_ids) for p in prompts]
    # Three rows at a time: rounded up to the mesh's groups, and more than one batch of them where there are few.
    placed = SimpleNamespace(config=tiny.config, mesh=mesh, params=params)
    assert decode(placed, prompts, stop_ids, batch_size=3) == expected


def test_on_eight_devices():
    assert f"{len(MESHES)} passed" in run_on_eight_devices(__file__, "-k", "on_a_mesh")
