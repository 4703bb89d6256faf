"""Checkpoints and optimisers over several devices: a run may go on with other devices than it began with."""

import functools
import json
import os
import subprocess
import sys

import pytest

# Saves, or restores and prints, on an explicit mesh. Shardings name every axis: P() of a matrix is another type than
# P(None, None), and would compile the step anew.
PROGRAM = """
import json, sys
from pathlib import Path
from typing import Any, NamedTuple
import jax, jax.numpy as jnp, optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from portlab_jax.checkpoint import Checkpoints
from portlab_spec.run.train_log import TrainLog
from portlab_jax.optim import make_optimizer
from portlab_jax.leaf_digests import leaf_digests
from portlab_spec.run.metadata import FORMATS
from portlab_spec.recipe import Optimizer

class State(NamedTuple):
    adapter: Any
    opt: Any
    step: Any
    key: Any

action, folder, name, *sizes = sys.argv[1:]
mesh = jax.make_mesh(tuple(map(int, sizes)), ("data", "fsdp", "tp"), axis_types=(AxisType.Explicit,) * 3)
METADATA = {"format": FORMATS["lora"]}
with jax.set_mesh(mesh), Checkpoints(Path(folder)) as checkpoints:
    transform = make_optimizer(Optimizer(name=name, warmup_steps=0, schedule="constant"), 10)
    specs = {"a": P(None, "fsdp", "tp"), "rows": P(None, None)}
    shapes = {"a": (2, 256, 128), "rows": (3, 8)}
    values = jax.tree.map(lambda shape: jnp.arange(jnp.prod(jnp.array(shape)), dtype=jnp.float32).reshape(shape) / 7,
                          shapes, is_leaf=lambda x: isinstance(x, tuple))
    adapter = {k: jax.device_put(v, NamedSharding(mesh, specs[k])) for k, v in values.items()}
    key = jax.device_put(jax.random.key_data(jax.random.key(3)), NamedSharding(mesh, P(None)))
    state = State(adapter, transform.init(adapter), jax.device_put(jnp.int32(0), NamedSharding(mesh, P())), key)

    @jax.jit
    def step(state):
        updates, opt = transform.update(state.adapter, state.opt, state.adapter)
        return State(optax.apply_updates(state.adapter, updates), opt, state.step + 1, state.key)

    if action == "save":
        state = step(step(state))
        checkpoints.save(state, TrainLog([1.0, 0.5], 1.0), METADATA)
        print(json.dumps({"digests": leaf_digests(state), "compilations": step._cache_size()}))
    else:
        restored = checkpoints.resume(state, METADATA)
        same = jax.tree.map(lambda a, b: a.sharding == b.sharding, restored.state, state)
        print(json.dumps({"step": restored.step, "digests": leaf_digests(restored.state),
                          "placed": bool(jax.tree.all(same))}))
        assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, step(restored.state), state))
"""


def program(devices, action, folder, name, *sizes):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    arguments = [action, str(folder), name, *map(str, sizes)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


EIGHT, ONE = (8, (2, 2, 2)), (1, (1, 1, 1))


@pytest.fixture(scope="module")
def save(tmp_path_factory):
    """Save on some devices, once each: the folder, and what the program said."""

    @functools.cache
    def save(name, devices, sizes):
        folder = tmp_path_factory.mktemp("saved") / "c"
        return folder, program(devices, "save", folder, name, *sizes)

    return save


@pytest.mark.parametrize(
    ("name", "saver", "restorer"),
    [("adamw", EIGHT, ONE), ("adamw", ONE, EIGHT), ("adafactor", EIGHT, (8, (1, 8, 1)))],
    ids=["8 to 1", "1 to 8", "adafactor, 2x2x2 to fsdp 8"],
)
def test_a_run_goes_on_with_other_devices(save, name, saver, restorer):
    folder, saved = save(name, *saver)
    restored = program(restorer[0], "restore", folder, name, *restorer[1])
    assert restored == {"step": 2, "digests": saved["digests"], "placed": True}


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_the_state_is_sharded_from_the_start_so_that_a_step_compiles_once(save, name):
    _, saved = save(name, *EIGHT)
    assert saved["compilations"] == 1
