"""The main job on the real Gemma 3 270M, shortened, and its exports in other people's software."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from portlab_spec.assets import default_model
from portlab_spec.data import load_dataset
from portlab_spec.formats import FORMATS, encode
from portlab_spec.tokenizer import Tokenizer

pytestmark = pytest.mark.real_model

FMT = FORMATS["functiongemma"]
STOP = [1, 106, 50]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Twelve steps: enough to call tools, too few for the accuracy of the docs."""
    out = tmp_path_factory.mktemp("real") / "run"
    command = [sys.executable, "-m", "portlab_jax", "--out", str(out), "--steps", "12", "--batch-size", "16"]
    env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def report(run):
    return json.loads((run / "report.json").read_text())


@pytest.fixture(scope="module")
def merged(run):
    return AutoModelForCausalLM.from_pretrained(run / "merged", dtype=torch.float32)


@pytest.fixture(scope="module")
def adapted(run):
    base = AutoModelForCausalLM.from_pretrained(default_model().path, dtype=torch.float32)
    return PeftModel.from_pretrained(base, run / "adapter")


@pytest.fixture(scope="module")
def probe(run):
    checkpoint = run / "checkpoints" / "12" / "_CHECKPOINT_METADATA"
    return json.loads(checkpoint.read_text())["custom_metadata"]["probe"]


def test_training_teaches_the_format(report):
    before, after = (report[w]["metrics"] for w in ("before", "after"))
    assert before["call_exact"]["hits"] == 0
    assert before["parse_rate"]["hits"] == 0
    assert after["call_exact"]["value"] > 0.5
    assert after["call_exact"]["count"] == 63
    assert report["loss"][-1] < 0.2 * report["loss"][0]


def test_it_fits_in_six_gib(report):
    assert report["peak_rss_bytes"] < 6 * 2**30


def probe_logits(model, probe):
    with torch.no_grad():
        logits = model(torch.tensor([probe["token_ids"]])).logits[0]
    return logits[probe["positions"]].numpy()


def test_peft_agrees_with_the_trainer_in_float32(adapted, probe):
    logits = probe_logits(adapted, probe)
    expected = np.array(probe["topk_logits"])
    got = np.take_along_axis(logits, np.array(probe["topk_ids"]), axis=1)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_merged_agrees_within_bfloat16_rounding(merged, adapted, probe):
    exact, rounded = probe_logits(adapted, probe), probe_logits(merged, probe)
    # Every merged weight is off by at most 2^-9 relative; the logits' spread is some tens.
    assert np.sqrt(np.mean((rounded - exact) ** 2)) < 0.02 * exact.std()
    assert (rounded.argmax(1) == exact.argmax(1)).all()


def test_merged_gives_the_trainers_greedy_calls(run, merged):
    tokenizer = Tokenizer.load(run / "merged")
    outputs = json.loads((run / "after.json").read_text())["outputs"]
    held_out = [c for c in load_dataset("fitness-213") if c.split == "test"]
    for conversation in held_out[::8]:
        prompt = encode(FMT.render(conversation.prompt, generation_prompt=True), tokenizer).ids
        ids = torch.tensor([prompt])
        answer = merged.generate(ids, max_new_tokens=48, do_sample=False, eos_token_id=STOP, pad_token_id=0)
        assert tokenizer.decode(answer[0, len(prompt) :].tolist()) == outputs[conversation.id], conversation.id


def test_packed_and_padded_gradients_agree_on_the_real_model():
    """Tree packing is exact at full size too: every gradient, relative 1e-5."""
    import jax

    from portlab_jax.setup import initial_state, set_up
    from portlab_jax.step import gradients
    from portlab_spec.data.tokens import tokenize
    from portlab_spec.packing import Packing, pack_batch, plan
    from portlab_spec.recipe import Mesh, Recipe

    recipe, model = Recipe(dtype="float32", mesh=Mesh(data=1, fsdp=1, tp=1)), default_model()
    rows = tokenize(load_dataset("fitness-213")[::60], FMT, Tokenizer.load(model.path), 1024)
    setup = set_up(recipe, model, tuple(range(46, 53)))
    results = []
    with jax.set_mesh(setup.mesh.mesh):
        trained = initial_state(setup).adapter
        trained["lora"] = jax.tree.map(lambda leaf: leaf + 0.002, trained["lora"])
        for packed in (True, False):
            packing = Packing(window=setup.config.window, share_prefix=packed, pack=packed)
            layout = plan([rows], packing).layout(0)
            assert layout.plain is not packed
            batch = setup.mesh.put_rows(pack_batch(rows, layout), axis=1)
            options = setup.for_layout(layout)
            step = jax.jit(lambda a, f, b, o=options, chunk=layout.chunk: gradients(a, f, b, o, chunk))
            sums, tokens, grads = step(trained, setup.frozen, batch)
            results.append((float(sums.loss / tokens), jax.tree.map(np.asarray, grads)))
    (loss, grads), (padded_loss, padded_grads) = results
    np.testing.assert_allclose(loss, padded_loss, rtol=1e-5)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(padded_grads), strict=True):
        assert np.linalg.norm(x - y) <= 1e-5 * np.linalg.norm(y), jax.tree_util.keystr(path)
