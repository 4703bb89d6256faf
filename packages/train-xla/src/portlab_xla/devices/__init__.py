"""Where a run computes: the one seam between the trainer and PyTorch's ways to an accelerator.

`device.py` says what the trainer asks of a device; `plain.py` is a CPU or one CUDA GPU, `xla.py` is PyTorch/XLA under
SPMD, `torch_tpu.py` is where TorchTPU will plug in. Nothing else in the package knows torch_xla.
"""

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Literal

from portlab_spec.recipe import Mesh

if TYPE_CHECKING:  # the command line answers --help without PyTorch
    from portlab_xla.devices.device import Device

Name = Literal["xla", "cpu", "cuda", "tpu"]


def set_environment(name: Name, environ: MutableMapping[str, str]) -> None:
    """Set the variables that libraries read when they are imported. Call it before torch or transformers are."""
    environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # TRL reports each trainer that is made
    if name == "xla":
        from portlab_xla.devices import runtime

        runtime.set_environment(environ)
    else:
        # transformers, accelerate and PEFT take the XLA device as soon as torch_xla can be imported.
        environ["USE_TORCH_XLA"] = "0"


def open_device(name: Name, mesh: Mesh, *, parameters: int = 0, rows: int | None = None) -> "Device":
    """Take hold of a device.

    Args:
        name: as on the command line.
        mesh: of the recipe, for devices of several parts.
        parameters: of the model, which decide how far a mesh that is left open cuts them.
        rows: of a micro-batch; devices that would get none cut heads.

    Raises:
        UserError: it is not there, or the mesh does not fit it.
    """
    if name == "xla":
        from portlab_xla.devices.xla import XlaDevice

        return XlaDevice(mesh, parameters=parameters, rows=rows)
    if name == "tpu":
        from portlab_xla.devices.torch_tpu import refuse

        refuse()
    from portlab_xla.devices.plain import PlainDevice

    return PlainDevice(name, mesh)
