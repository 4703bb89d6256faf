"""A base image in place of python:3.12-slim-bookworm, for a machine that reaches Debian's packages and no registry.

It holds Debian 12 and the Python that runs this file, and it inherits how pip reaches its index here. It serves to try
the image; it is never to be published.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from container_engine import Engine
from portlab_spec.errors import UserError

IMAGE = "localhost/portlab-stand-in:python-3.12-slim-bookworm"
RELEASE, PYTHON = "bookworm", (3, 12)
# What python:3.12-slim-bookworm leaves of Debian's packages for Python to load.
PACKAGES = (
    "ca-certificates", "libbz2-1.0", "libexpat1", "libffi8", "liblzma5", "libncursesw6", "libnsl2", "libreadline8",
    "libsqlite3-0", "libssl3", "libuuid1", "netbase", "tzdata", "zlib1g",
)  # fmt: skip
ENVIRONMENT = ("PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8")
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
# What of pip's settings says how to reach an index; files of this machine are not there in a container.
PIP_SETTINGS = ("index-url", "extra-index-url", "trusted-host", "proxy", "timeout")


def make(engine: Engine) -> str:
    """Make the image and return its name.

    Raises:
        UserError: this machine is not Debian 12 with Python 3.12 and mmdebstrap, or a step fails.
    """
    require_machine()
    with tempfile.TemporaryDirectory() as folder:
        files, archive = Path(folder) / "files", Path(folder) / "root.tar"
        copy_python(files / "usr" / "local")
        copy_network_settings(files)
        hooks = (f"sync-in {files} /", 'chroot "$1" ldconfig', 'chroot "$1" python -m ensurepip')
        run(
            "mmdebstrap", "--quiet", "--mode=root", "--variant=minbase", f"--include={','.join(PACKAGES)}",
            *(f"--customize-hook={hook}" for hook in hooks), RELEASE, str(archive),
        )  # fmt: skip
        changes = (*(f"ENV {variable}" for variable in ENVIRONMENT), 'CMD ["python3"]')
        run(engine.program, "import", *(word for c in changes for word in ("--change", c)), str(archive), IMAGE)
    return IMAGE


def require_machine() -> None:
    """Refuse a machine whose Python would not run in the image."""
    fix = "Pass --base IMAGE, one that can be pulled or is here"
    if shutil.which("mmdebstrap") is None:
        raise UserError("mmdebstrap is not installed", where="--stand-in", fix="apt-get install mmdebstrap")
    release = Path("/etc/os-release")
    if not release.exists() or f"VERSION_CODENAME={RELEASE}" not in release.read_text(encoding="utf-8").splitlines():
        raise UserError(f"only Debian {RELEASE}'s Python can be copied to it", where="--stand-in", fix=fix)
    if sys.version_info[:2] != PYTHON:
        raise UserError("Python 3.12 has to run this", where="--stand-in", fix=fix)


def copy_python(target: Path) -> None:
    """This interpreter and its standard library, without what was installed into it."""
    source, name = Path(sys.base_prefix), f"python{PYTHON[0]}.{PYTHON[1]}"
    (target / "bin").mkdir(parents=True)
    shutil.copy2(source / "bin" / name, target / "bin")
    for link in ("python3", "python"):
        (target / "bin" / link).symlink_to(name)
    unused = shutil.ignore_patterns("site-packages", "test", "tests", "idlelib", "__pycache__", "config-*")
    shutil.copytree(source / "lib" / name, target / "lib" / name, ignore=unused)
    (target / "lib" / name / "site-packages").mkdir()
    for library in (source / "lib").glob("libpython3*.so*"):
        shutil.copy2(library, target / "lib", follow_symlinks=False)


def copy_network_settings(root: Path) -> None:
    """This machine's certificates, and pip's index and proxy."""
    settings = pip_settings(pip_config())
    if CERTIFICATES.exists():
        (root / CERTIFICATES.relative_to("/")).parent.mkdir(parents=True)
        shutil.copy2(CERTIFICATES, root / CERTIFICATES.relative_to("/"))
        settings["cert"] = str(CERTIFICATES)
    (root / "etc").mkdir(exist_ok=True)
    lines = [f"{key} = {value}" for key, value in settings.items()]
    (root / "etc" / "pip.conf").write_text("\n".join(["[global]", *lines, ""]), encoding="utf-8")


def pip_config() -> str:
    """What `pip config list` prints, of whichever pip there is."""
    pip = shutil.which("pip", path=f"{sys.base_prefix}/bin{os.pathsep}{os.environ['PATH']}")
    return subprocess.run([str(pip), "config", "list"], capture_output=True, text=True, check=True).stdout


def pip_settings(listing: str) -> dict[str, str]:
    """Settings that hold in a container too, from lines such as `global.timeout='60'`; variables come first."""
    found: dict[str, str] = {}
    for line in sorted(listing.splitlines(), key=lambda line: not line.startswith(":env:")):
        key, _, value = line.partition("=")
        name = key.removeprefix(":env:.").rpartition(".")[2].removeprefix("default-")
        addresses = [part for part in value.strip("'\"").split() if not part.startswith(("/", "file:"))]
        if name in PIP_SETTINGS and addresses:
            found.setdefault(name, " ".join(addresses))
    return found


def run(*command: str) -> None:
    """Run a step.

    Raises:
        UserError: it fails; the message is the last line of its errors.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UserError(last, where=command[0], fix="See its manual, or pass --base IMAGE")
