"""The hardware table against the compiler that knows the chips: device counts and kinds, memory, names of slices."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from portlab_jax.planner.topology import VARIABLES
from portlab_spec.hardware import find_chip, parse_slice, standard_slices

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler (extra plan)"
)

GENERATIONS = ("v5e", "v5p", "v6e", "tpu7x")

# Prints {"kinds": topology -> [device kind, devices], "refusals": topology -> why a program of 512 GiB is refused}.
ASK = """
import json, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

def devices(name):
    return topologies.get_topology_desc(topology_name=name, platform="tpu").devices

def refusal(name):
    everywhere = NamedSharding(Mesh(devices(name), ("x",)), PartitionSpec())
    x = jax.ShapeDtypeStruct((2**38,), jnp.bfloat16, sharding=everywhere)
    try:
        jax.jit(lambda a: a + 1).lower(x).compile()
    except Exception as error:
        return str(error)

every, small = json.loads(sys.argv[1])
kinds = {name: [devices(name)[0].device_kind, len(devices(name))] for name in every}
print(json.dumps({"kinds": kinds, "refusals": {name: refusal(name) for name in small}}))
"""


@pytest.fixture(scope="module")
def answers():
    every = [part.compiler_topology for g in GENERATIONS for part in standard_slices(g) if part.chips <= 512]
    small = [parse_slice(name).compiler_topology for name in ("v5e-4", "v5p-8", "v6e-4", "tpu7x-8")]
    command = [sys.executable, "-c", ASK, json.dumps([every, small])]
    done = subprocess.run(command, env=os.environ | VARIABLES, capture_output=True, text=True, timeout=300, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_libtpu_knows_every_slice_by_its_name_with_its_devices(answers):
    for topology, (kind, count) in answers["kinds"].items():
        part = parse_slice(topology)
        assert (find_chip(kind), count) == (part.chip, part.devices), topology


def test_usable_memory_is_what_the_compiler_allows(answers):
    assert len(answers["refusals"]) == 4
    for topology, refusal in answers["refusals"].items():
        chip = parse_slice(topology).chip
        assert chip.usable_hbm_from == "compiler"
        assert f"available HBM ({chip.usable_hbm_bytes / chip.devices / 2**30:.2f}G)" in refusal
