"""Programs of small models through the real TPU compiler, for slices that are not here."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from portlab_jax.planner.plan import compile_job
from portlab_jax.planner.program import Program
from portlab_jax.planner.records import Job
from portlab_spec.recipe import Recipe

pytestmark = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is not installed")

CONFIG = {
    "model_type": "gemma4_text",
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_global_key_value_heads": 2,
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
}


@pytest.fixture
def model(tmp_path):
    """A folder with the configuration of a small Gemma 4 whose head sizes are those of the large ones."""

    def make(*layers):
        config = CONFIG | {"num_hidden_layers": len(layers), "layer_types": [f"{kind}_attention" for kind in layers]}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return str(tmp_path)

    return make


def recipe(model, **more):
    # FunctionGemma's control tokens are trained, so that gradients go through all layers down to the embedding.
    settings = {"model": model, "format": "functiongemma", "batch_size": 8, "share_prefix": False, "pack": False}
    settings["lora"] = {"rank": 4, "alpha": 8, "targets": ["q_proj", "o_proj"]}
    return Recipe.model_validate(settings | more).model_dump(mode="json")


@pytest.mark.parametrize("layers", [("sliding",), ("full", "sliding")])
def test_several_rows_a_device_go_through_the_kernels(model, layers):
    """libtpu 0.0.50 and 0.0.52 die of a projection that is fused with the norm of its heads in front of a kernel."""
    result = compile_job(Job("train", recipe(model(*layers)), "v5p-8", length=1024))
    assert not result.error
    (shape,) = result.programs["shapes"]
    assert set(shape["attention"].values()) == {"splash"}
    program = Program.from_json(shape["program"])
    assert program.fits
    assert (program.kernels, program.unknown_loops) == ({}, 0)
    counted = sum(shape["analytic"]["flops"].values())
    assert program.flops == pytest.approx(counted, rel=0.05)


def test_a_decode_step_reads_the_weights_and_the_cache_once(model):
    job = Job("decode", recipe(model("sliding", "full")), "v5e-1", batch=8, context=1024)
    result = compile_job(job)
    program = Program.from_json(result.programs["program"])
    arguments = result.programs["arguments"]
    assert program.fits
    assert program.bytes == pytest.approx(arguments["weights"] + arguments["cache"], rel=0.5)


def test_a_prefill_step_computes_each_token_once(model):
    result = compile_job(Job("prefill", recipe(model("sliding")), "v5e-1", batch=2, context=1024))
    assert not result.error
    program = Program.from_json(result.programs["program"])
    weights = 256 * (2 * 8 * 256 + 2 * 4 * 256 + 3 * 512)
    pairs = (1024 // 512) * (1024 // 512 + 1) // 2 * 512 * 512
    head = 2 * 2 * 2048 * 256
    assert program.flops == pytest.approx(2 * 2 * 1024 * weights + 2 * 4 * pairs * 8 * 256 + head, rel=0.05)


def test_jax_stays_usable_beside_the_compiler():
    """Devices of a slice can be had, and what runs runs on the CPU; without any variable set, too."""
    program = """
from portlab_jax.planner import topology
from portlab_spec.hardware import parse_slice
topology.prepare_environment()
print(len(topology.devices(parse_slice("v5e-8"))))
import jax
print(jax.devices()[0].platform, jax.jit(lambda x: x + 1)(1))
"""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    plain = "import jax; print(jax.devices()[0].platform, jax.jit(lambda x: x + 1)(1))"
    for code, last in ((program, ["8", "cpu 2"]), (plain, ["cpu 2"])):
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=120)
        assert done.stdout.split("\n")[:-1] == last
