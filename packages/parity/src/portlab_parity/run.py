"""Backends run as processes of their own environments, one after the other, each leaving its evidence in a folder."""

import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from portlab_spec.errors import CheckFailed, UserError
from portlab_spec.evidence import Evidence
from portlab_spec.run.child import child_process, last_words

# What writes the evidence, and the environments of the repository in which it is installed, in order.
MODULES = {
    "jax": ("portlab_jax.evidence", ("train_jax", "tests")),
    "xla": ("portlab_xla.evidence", ("train_xla", "tests_xla", "tests")),
    "torchax": ("portlab_torchax.evidence", ("train_torchax", "tests_torchax")),
    "plain": ("portlab_hf.evidence", ("train_xla", "tests_xla", "tests")),
}


@dataclass(frozen=True)
class Backend:
    """A way to compute.

    Attributes:
        name: of it; a script's is that of its file.
        command: program and arguments; the folders of the work and of the evidence follow.
        more: arguments behind those.
        environment: variables beside ours.
    """

    name: str
    command: tuple[str, ...]
    more: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def find_backend(name: str, pythons: Mapping[str, Path], root: Path, device: str = "cpu") -> Backend:
    """A backend by its name, or a script by its file.

    Args:
        name: "jax", "xla", "torchax", "plain", or the path of a script.
        pythons: interpreters by backend; a script's by the name of its file.
        root: of the repository with `.nox`.
        device: "cpu", or what the backend finds: "auto".

    Raises:
        UserError: no such backend or script, or no interpreter that has it.
    """
    script = Path(name) if name.endswith(".py") else None
    if script is None and name not in MODULES:
        raise UserError(
            f"no backend {name!r}", where="--backends", fix=f"Give {', '.join(MODULES)}, or a script: mine.py"
        )
    if script is not None and not script.is_file():
        raise UserError("no such script", where=name, fix="Give the path of a Python file")
    key = script.stem if script else name
    module, environments = MODULES["plain" if script else name]
    python = pythons.get(key) or _interpreter(key, environments, root)
    if not python.exists():
        raise UserError("no such interpreter", where=f"--python {key}={python}", fix="Give one that has the backend")
    environment = {"USE_TORCH_XLA": "0"} if module == "portlab_hf.evidence" else {}
    if device == "cpu":
        environment |= {"JAX_PLATFORMS": "cpu", "PJRT_DEVICE": "CPU"}
    more = (str(script.absolute()),) if script else ()
    if name == "xla":
        more = ("cpu" if device == "cpu" else "xla",)
    return Backend(key, (str(python.absolute()), "-m", module), more, environment)


def _interpreter(name: str, environments: tuple[str, ...], root: Path) -> Path:
    for environment in environments:
        if (python := root / ".nox" / environment / "bin" / "python").exists():
            return python
    if name in ("jax", "plain"):
        return Path(sys.executable)
    raise UserError(
        f"no environment has the backend {name}: none of .nox/{', .nox/'.join(environments)} exists",
        where="--backends",
        fix=f"Make one: nox -s {environments[0]} --install-only, or give --python {name}=PATH",
    )


def run_backend(backend: Backend, work: Path, out: Path, timeout: float | None = None) -> tuple[Evidence, float]:
    """Run a backend on the work.

    Args:
        backend: to run.
        work: folder of the work.
        out: folder for the evidence.
        timeout: seconds that it may take; None for no limit.

    Returns:
        Its evidence, and the seconds it took.

    Raises:
        UserError: its program cannot be run.
        CheckFailed: the backend failed or took too long; its last words are in the message.
    """
    log = out.with_name(f"{out.name}.log")
    command = [*backend.command, str(work), str(out), *backend.more]
    shutil.rmtree(out, ignore_errors=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with log.open("wb") as stream, child_process(command, backend.environment, stream) as process:
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise CheckFailed(
                f"the backend {backend.name} took longer than {timeout:g} s", where=str(log), fix="Give it more time"
            ) from None
    if code:
        raise CheckFailed(
            f"the backend {backend.name} failed: {last_words(log)}", where=str(log), fix="Read the log, and mend it"
        )
    return Evidence.load(out), time.monotonic() - started


@contextlib.contextmanager
def folder_for(out: Path | None) -> Iterator[Path]:
    """The folder that is asked for, or one that goes afterwards.

    Raises:
        UserError: something is in it.
    """
    if out is not None:
        if out.exists() and any(out.iterdir()):
            raise UserError("is not empty", where=str(out), fix="Choose another --out")
        out.mkdir(parents=True, exist_ok=True)
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="portlab-parity-") as name:
        yield Path(name)
