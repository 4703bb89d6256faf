"""What torch_xla's runtime is told before it is imported."""

from collections.abc import MutableMapping
from pathlib import Path

VIRTUAL_DEVICES = 4  # where there is no TPU, the CPU plays so many devices
TPU_FILES = ("dev/accel0", "dev/vfio/0")


def set_environment(environ: MutableMapping[str, str], root: Path = Path("/")) -> None:
    """Choose the runtime: the user's choice, else the TPU that is there, else virtual devices on the CPU."""
    if "PJRT_DEVICE" not in environ:
        environ["PJRT_DEVICE"] = "TPU" if any((root / name).exists() for name in TPU_FILES) else "CPU"
    if environ["PJRT_DEVICE"] == "CPU":
        environ.setdefault("CPU_NUM_DEVICES", str(VIRTUAL_DEVICES))
    environ.pop("USE_TORCH_XLA", None)
    # Each compilation would say that GSPMD will go, and virtual devices on a busy CPU that they wait for each other.
    environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
