"""Which build of JAX this machine needs, and with it which pins the sessions that train on JAX install.

Standard library only: noxfile.py imports this module before anything is installed.
"""

import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

OVERRIDE = "PORTLAB_ACCELERATOR"
OVERRIDES = ("cpu", "cuda", "cuda12", "cuda13", "tpu")

# PCI ids of TPUs, as JAX knows them (jax/_src/hardware_utils.py). The vendor alone says nothing: the network cards of
# Google's machines bear it too.
GOOGLE = "0x1ae0"
TPU_DEVICES = {
    *("0x0027", "0x0056", "0x005e", "0x0062", "0x0063"),  # v3, an unnamed one, v4, v5p, v5e
    *("0x006f", "0x0076", "0x0083", "0x007c"),  # v6e, TPU7x, TPU8i, TPU8t
}
# Set in the pods of TPU nodes (GKE), or by users who bring their own runtime.
TPU_VARIABLES = ("TPU_WORKER_HOSTNAMES", "TPU_ACCELERATOR_TYPE", "TPU_LIBRARY_PATH")

# JAX's installation page: CUDA 12 needs driver 525, CUDA 13 needs driver 580 and compute capability 7.5.
CUDA12_DRIVER = 525
CUDA13_DRIVER = 580
CUDA13_CAPABILITY = (7, 5)


class Choice(NamedTuple):
    """A build of JAX, and why it was chosen."""

    build: str  # cpu, cuda12, cuda13 or tpu
    reason: str

    def environment(self, session: str) -> str:
        """Name of the pins of a session that runs on JAX: requirements/NAME.txt."""
        return session if self.build == "cpu" else f"{session}_{self.build}"

    def variables(self, env: Mapping[str, str]) -> dict[str, str]:
        """Environment variables for JAX, less those that the user has set.

        An accelerator that was found must work: without `JAX_PLATFORMS`, JAX would train on the CPU instead, a hundred
        times slower.
        """
        platform = self.build.rstrip("0123456789")
        wanted = {"JAX_PLATFORMS": platform if platform == "cpu" else f"{platform},cpu"}
        return {name: value for name, value in wanted.items() if name not in env}

    def __str__(self) -> str:
        return f"JAX for {self.build}: {self.reason} ({OVERRIDE}={'|'.join(OVERRIDES)} overrides)"


class Driver(NamedTuple):
    """NVIDIA's driver, as far as it tells about itself."""

    found_by: str
    version: int | None = None  # major version
    capability: tuple[int, int] | None = None  # lowest compute capability of the machine's GPUs

    def __str__(self) -> str:
        version = f" {self.version}" if self.version else ""
        capability = ", compute capability {}.{}".format(*self.capability) if self.capability else ""
        return f"NVIDIA driver{version}{capability}, found by {self.found_by}"


def nvidia_smi() -> str:
    """Driver version and compute capability of each GPU, a line each; empty without a working driver."""
    command = ["nvidia-smi", "--query-gpu=driver_version,compute_cap", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def choose(
    env: Mapping[str, str],
    root: Path = Path("/"),
    smi: Callable[[], str] = nvidia_smi,
    system: str = sys.platform,
) -> Choice:
    """Choose the build of JAX: what the user asks for, else the accelerator that is there, else the CPU's.

    Args:
        env: environment variables.
        root: root of the file system to look at.
        smi: gives what `nvidia_smi` gives.
        system: `sys.platform`; JAX has builds for accelerators on Linux only.

    Raises:
        ValueError: the override is not one of `OVERRIDES`.
    """
    asked = env.get(OVERRIDE, "")
    if asked and asked not in OVERRIDES:
        raise ValueError(f"{OVERRIDE}={asked}: choose one of {', '.join(OVERRIDES)}")
    if asked == "cuda":
        return Choice(cuda_build(find_driver(root, smi)) or "cuda12", f"{OVERRIDE}=cuda")
    if asked:
        return Choice(asked, f"{OVERRIDE}={asked}")
    if system != "linux":
        return Choice("cpu", f"JAX has no accelerator builds for {system}")
    if sign := find_tpu(env, root):
        return Choice("tpu", sign)
    driver = find_driver(root, smi)
    if driver is None:
        return Choice("cpu", "no accelerator found")
    build = cuda_build(driver)
    if build is None:
        return Choice("cpu", f"NVIDIA driver {driver.version} is older than {CUDA12_DRIVER}, which CUDA 12 needs")
    return Choice(build, str(driver))


def find_tpu(env: Mapping[str, str], root: Path) -> str:
    """The first sign of a TPU, in words; empty if there is none."""
    for name in TPU_VARIABLES:
        if env.get(name):
            return f"{name} is set"
    for device in sorted(root.glob("dev/accel[0-9]*")):
        return f"/{device.relative_to(root)}"
    for device in sorted(root.glob("sys/bus/pci/devices/*")):
        if read(device / "vendor") == GOOGLE and read(device / "device") in TPU_DEVICES:
            return f"TPU at PCI {device.name}"
    return ""


def find_driver(root: Path, smi: Callable[[], str]) -> Driver | None:
    """NVIDIA's driver, if the machine has one."""
    gpus = re.findall(r"^(\d+)[\d.]*, *(\d+)\.(\d+)", smi(), re.MULTILINE)
    if gpus:
        capability = min((int(major), int(minor)) for _, major, minor in gpus)
        return Driver("nvidia-smi", int(gpus[0][0]), capability)
    if text := read(root / "proc/driver/nvidia/version"):
        version = re.search(r"Kernel Module.*?\s(\d+)\.\d", text)
        return Driver("/proc/driver/nvidia", int(version[1]) if version else None)
    return Driver("/dev/nvidia0") if (root / "dev/nvidia0").exists() else None


def cuda_build(driver: Driver | None) -> str | None:
    """The newest CUDA that a driver is known to run: CUDA 12 runs on every GPU and driver that CUDA 13 runs on."""
    if driver is None or driver.version is None:
        return "cuda12"
    if driver.version < CUDA12_DRIVER:
        return None
    new = driver.version >= CUDA13_DRIVER and driver.capability and driver.capability >= CUDA13_CAPABILITY
    return "cuda13" if new else "cuda12"


def read(path: Path) -> str:
    """A small file's text, stripped; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


if __name__ == "__main__":
    import os

    print(choose(os.environ))
