"""Devices of a TPU slice that is not here, for the real TPU compiler to compile for.

libtpu holds the compiler and asks neither a TPU nor a network for it, once it is told not to look for either. Compiled
programs come with their memory, cost and text; they cannot run.
"""

import importlib.util
import os
import platform
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from portlab_spec.errors import UserError
from portlab_spec.hardware import Slice

# Without them libtpu asks the cloud's metadata server where it is, for minutes where there is none.
VARIABLES: Mapping[str, str] = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    # A TPU belongs to one process at a time, and libtpu sees to that; its compiler may serve any number.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    # JAX itself must not take the compiler for a TPU: everything that runs, runs on the CPU.
    "JAX_PLATFORMS": "cpu",
    # Warnings about the host that is not there; errors still come.
    "TPU_MIN_LOG_LEVEL": "2",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TPU_STDERR_LOG_LEVEL": "2",
}


def prepare_environment(env: MutableMapping[str, str] = os.environ) -> None:
    """Set what JAX and libtpu read when they start; call it before JAX is imported.

    Raises:
        UserError: no libtpu for this platform, or it is not installed.
    """
    require_compiler()
    env.update(VARIABLES)


def require_compiler(system: str | None = None, machine: str | None = None) -> None:
    """Refuse where the TPU compiler does not exist.

    Raises:
        UserError: says what to install, or where.
    """
    system, machine = system or platform.system(), machine or platform.machine()
    if system != "Linux" or machine not in ("x86_64", "AMD64"):
        raise UserError(
            f"the TPU compiler exists for Linux on x86-64 alone, and this is {system} on {machine}",
            where="plan-tpu",
            fix="Run it on such a machine or in a container for linux/amd64; training on CPU works here",
        )
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            "the TPU compiler (libtpu) is not installed",
            where="plan-tpu",
            fix="Run `nox -s plan_tpu -- ...`, or install the extra portlab-train-jax[plan]",
        )


def devices(part: Slice) -> Sequence[Any]:
    """The devices of a slice, to be laid out as a mesh and compiled for.

    Raises:
        UserError: this libtpu does not know the slice.
    """
    from jax.experimental import topologies

    try:
        found = topologies.get_topology_desc(topology_name=part.compiler_topology, platform="tpu")
    except Exception as error:  # libtpu's faults come as JaxRuntimeError or ValueError, by version
        raise UserError(
            f"this libtpu does not compile for {part.compiler_topology} ({str(error).splitlines()[0]})",
            where=part.name,
            fix="Install the pinned libtpu, or choose another slice",
        ) from None
    return list(found.devices)
