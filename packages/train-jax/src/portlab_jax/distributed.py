"""Several hosts: find the other processes, agree with them on inputs and on when to stop.

Every host runs the same command. Where JAX can find the peers by itself (a TPU slice, Slurm, Open MPI) nothing has to
be said; elsewhere three variables tell each process who it is:

    PORTLAB_COORDINATOR=HOST:PORT  PORTLAB_PROCESSES=N  PORTLAB_PROCESS=I    (HOST is where process 0 runs)
"""

import hashlib
import importlib.util
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from portlab_spec.errors import UserError

log = logging.getLogger(__name__)

VARIABLES = ("PORTLAB_COORDINATOR", "PORTLAB_PROCESSES", "PORTLAB_PROCESS")
HOW = f"Set all of {', '.join(VARIABLES)} (host:port of process 0, their number, this one's from 0), or none"
# What JAX's own detection needs (jax/_src/clusters/slurm_cluster.py).
SLURM_STEP = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
WAIT_SECONDS = 300


@dataclass(frozen=True)
class Peers:
    """How this process finds the others: by an address, or by what JAX knows of the cluster."""

    found_by: str
    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None
    certain: bool = True
    """False where only the cloud's metadata can tell whether there are others."""


def find_peers(env: Mapping[str, str], *, tpu: bool) -> Peers | None:
    """Decide whether other processes belong to this run.

    Args:
        env: environment variables.
        tpu: this host has TPU chips, see `has_tpu`.

    Returns:
        How to find them; None if this process is the only one.

    Raises:
        UserError: the variables of `VARIABLES` are incomplete or contradict each other.
    """
    if any(env.get(name) for name in VARIABLES):
        return _told(env)
    if all(env.get(name) for name in SLURM_STEP) and _number(env, "SLURM_NTASKS") > 1:
        return Peers("Slurm")
    if _number(env, "OMPI_COMM_WORLD_SIZE") > 1:
        return Peers("Open MPI")
    if not tpu:
        return None
    if env.get("TPU_PROCESS_ADDRESSES_PATH") or _number(env, "MEGASCALE_NUM_SLICES") > 1:
        return Peers("TPU pod")
    hosts = env.get("TPU_PROCESS_ADDRESSES") or env.get("TPU_WORKER_HOSTNAMES")
    if hosts:
        return Peers("TPU slice") if "," in hosts else None
    return None if env.get("TPU_SKIP_MDS_QUERY") else Peers("Cloud TPU metadata", certain=False)


def _told(env: Mapping[str, str]) -> Peers | None:
    missing = [name for name in VARIABLES if not env.get(name)]
    if missing:
        raise UserError(f"not set, though {_first_set(env)} is", where=", ".join(missing), fix=HOW)
    coordinator = env["PORTLAB_COORDINATOR"]
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal():
        raise UserError(f"{coordinator!r} is not HOST:PORT", where="PORTLAB_COORDINATOR", fix=HOW)
    processes, process = _number(env, "PORTLAB_PROCESSES"), _number(env, "PORTLAB_PROCESS")
    if processes < 1:
        raise UserError(f"{env['PORTLAB_PROCESSES']!r} is not a number from 1", where="PORTLAB_PROCESSES", fix=HOW)
    if not 0 <= process < processes:
        what = f"{env['PORTLAB_PROCESS']!r} is not a number from 0 to {processes - 1}"
        raise UserError(what, where="PORTLAB_PROCESS", fix=HOW)
    return Peers("PORTLAB_COORDINATOR", coordinator, processes, process) if processes > 1 else None


def _first_set(env: Mapping[str, str]) -> str:
    return next(name for name in VARIABLES if env.get(name))


def _number(env: Mapping[str, str], name: str) -> int:
    """The variable as a number; -1 if it is not one."""
    text = env.get(name, "")
    return int(text) if text.isdecimal() else -1


def has_tpu(env: Mapping[str, str], root: Path = Path("/")) -> bool:
    """Whether JAX will find TPU chips here, told without starting JAX."""
    platforms = env.get("JAX_PLATFORMS", "")
    if platforms and "tpu" not in platforms.split(","):
        return False
    devices = [*root.glob("dev/accel[0-9]*"), *root.glob("dev/vfio/[0-9]*")]
    return bool(devices) and importlib.util.find_spec("libtpu") is not None


def initialize(env: Mapping[str, str] = os.environ) -> None:
    """Join the other processes of this run, if there are any; the first thing that a program does with JAX.

    Raises:
        UserError: bad variables, or the coordinator cannot be reached.
    """
    peers = find_peers(env, tpu=has_tpu(env))
    if peers is None or jax.distributed.is_initialized():
        return
    if peers.coordinator and peers.process:
        wait_for(peers.coordinator, WAIT_SECONDS)
    if peers.coordinator and peers.process == 0:
        log.info("waiting for %d other processes on %s", (peers.processes or 1) - 1, peers.coordinator)
    try:
        if peers.coordinator:
            jax.distributed.initialize(
                peers.coordinator, peers.processes, peers.process, cluster_detection_method="deactivate"
            )
        else:
            jax.distributed.initialize()
    except ValueError:
        if peers.certain:
            raise
        log.info("%s names no other hosts: training on this one", peers.found_by)
        return
    log.info("process %d of %d, found by %s", jax.process_index(), jax.process_count(), peers.found_by)


def wait_for(address: str, seconds: float) -> None:
    """Wait until somebody listens on HOST:PORT. JAX would abort the process with a stack trace instead of raising.

    Raises:
        UserError: nobody does within the time.
    """
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                fix = "Start process 0 there, and let this host reach that port"
                raise UserError(f"{address}: {error}", where="PORTLAB_COORDINATOR", fix=fix) from None
        time.sleep(min(1.0, seconds))


def is_main() -> bool:
    """Whether this process is the one that prints and writes reports."""
    return jax.process_index() == 0


def check_same(what: str, text: str) -> None:
    """Check that every process holds the same text, such as a recipe or a digest of the rows. All must call it.

    Raises:
        UserError: some process differs from process 0; raised in all of them.
    """
    if jax.process_count() == 1:
        return
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.int32)
    digests_P8 = np.asarray(multihost_utils.process_allgather(digest))
    others = [str(i) for i, other in enumerate(digests_P8) if (other != digests_P8[0]).any()]
    if others:
        raise UserError(
            f"process {', '.join(others)} and process 0 differ", where=what, fix="Give every host the same files"
        )


def stop_agreement() -> Callable[[int], bool] | None:
    """How several processes agree to save a checkpoint and leave after the same step; None if this is the only one.

    Only one process may be told to stop, and those that go on would wait for it in the next collective. JAX's
    preemption service listens for SIGTERM, spreads the word and settles on a step that no process has passed, so
    processes must not install a SIGTERM handler of their own: it would take the signal from JAX's.

    Returns:
        Told the number of the step just finished, says whether this is the last. Every process calls it once a step,
        with the same steps; it costs some 20 microseconds.
    """
    return multihost_utils.reached_preemption_sync_point if jax.process_count() > 1 else None
