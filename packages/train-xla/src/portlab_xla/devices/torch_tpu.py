"""TorchTPU (`torch-tpu`), PyTorch's next way to TPUs: found, and refused with what is missing.

Release 0.2.0 (October 2026) makes `tpu` a device of PyTorch itself, beside torch 2.11 to 2.15. This package's stack
stands on torch_xla 2.9, which needs torch 2.9; and accelerate 1.15, beneath TRL, knows no device `tpu`. Once both
change, a class here beside `PlainDevice` is all that the trainer needs.
"""

import importlib.metadata
from typing import NoReturn

from portlab_spec.errors import UserError


def installed() -> str | None:
    """Version of torch-tpu, if it is installed."""
    try:
        return importlib.metadata.version("torch-tpu")
    except importlib.metadata.PackageNotFoundError:
        return None


def refuse() -> NoReturn:
    """Say what TorchTPU lacks for this trainer.

    Raises:
        UserError: always.
    """
    found = installed()
    state = f"torch-tpu {found} is installed" if found else "torch-tpu is not installed"
    raise UserError(
        f"TorchTPU cannot train yet: {state}; accelerate 1.15, on which TRL runs, has no device 'tpu', and torch-tpu "
        "needs torch 2.11 or newer where torch_xla needs 2.9",
        where="--device tpu",
        fix="Use --device xla, which runs on TPUs through torch_xla",
    )
