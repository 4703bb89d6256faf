"""Any file -> a GPU recipe: what it is, and who reads it."""

from collections.abc import Mapping
from typing import Any

from portlab_port.read_command import read_command
from portlab_port.read_script import notebook_code, read_script
from portlab_port.read_yaml import read_yaml
from portlab_port.settings import GpuRecipe, Style

_SCRIPTS = (".py",)
_COMMANDS = (".sh", ".bash", ".slurm", ".sbatch", ".cmd", ".txt")


def read(text: str, source: str, style: Style | None = None, by_hand: Mapping[str, Any] | None = None) -> GpuRecipe:
    """Read a recipe.

    Args:
        text: the file.
        source: its name: the suffix tells scripts and command lines from YAML.
        style: what it is, in place of what its name says; `unsloth` is a script or YAML.
        by_hand: values in place of the file's, by its names or those of the rules.

    Raises:
        UserError: it is no recipe of that kind.
    """
    name = source.lower()
    if name.endswith(".ipynb"):
        return read_script(notebook_code(text, source), source, by_hand)
    if style == "script" or (style in (None, "unsloth") and name.endswith(_SCRIPTS)):
        return read_script(text, source, by_hand)
    if style == "command" or (style is None and name.endswith(_COMMANDS)):
        return read_command(text, source, by_hand)
    return read_yaml(text, source, style, by_hand)
