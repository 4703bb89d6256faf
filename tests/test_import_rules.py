"""Who may import whom: spec nobody, everyone else spec, PyTorch's trainers portlab_hf too. And what must stay light."""

import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {p.parent.name: p.parents[2] for p in ROOT.glob("packages/*/src/*/__init__.py")}
# Modules that may import what runs models, and that nothing imports at the top: verify --logits, a coach whose model
# runs in its own process.
OPTIONAL = {"portlab_merge": ("logits.py",), "fitnesscoach": ("torch_decoder.py",)}
SHARED = {"portlab_xla": {"portlab_spec", "portlab_hf"}, "portlab_torchax": {"portlab_spec", "portlab_hf"}}
HEAVY = ("jax", "torch", "transformers", "orbax", "flax")


def imported(folder: Path, without: tuple[str, ...] = ()) -> set[str]:
    names = set()
    for file in (file for file in folder.rglob("*.py") if file.name not in without):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names.add((node.module or "").partition(".")[0])
    return names


def test_the_packages_are_found():
    assert {
        "portlab_spec",
        "portlab_hf",
        "portlab_jax",
        "portlab_merge",
        "portlab_serve",
        "portlab_torchax",
        "portlab_bench",
        "portlab_port",
        "portlab_parity",
        "portlab_xla",
    } <= set(PACKAGES)


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_packages_meet_only_in_what_they_share(package):
    shared = set() if package == "portlab_spec" else SHARED.get(package, {"portlab_spec"})
    others = set(PACKAGES) - {package} - shared
    assert not imported(PACKAGES[package] / "src") & others


@pytest.mark.parametrize(
    "package",
    [
        "portlab_spec",
        "portlab_merge",
        "portlab_serve",
        "portlab_bench",
        "portlab_port",
        "portlab_parity",
        "fitnesscoach",
    ],
)
def test_no_framework_in_the_light_packages(package):
    assert not imported(PACKAGES[package] / "src", OPTIONAL.get(package, ())) & set(HEAVY)


def loaded_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in done.stdout.split()}


@pytest.mark.parametrize(
    "statement",
    [
        "import portlab_spec, portlab_spec.recipe, portlab_spec.data, portlab_spec.formats, portlab_spec.metrics",
        "import portlab_spec.assets, portlab_spec.tokenizer, portlab_spec.models, portlab_spec.report",
        "import portlab_spec.packing, portlab_spec.models.flops, portlab_spec.run.command_line, portlab_spec.run.data",
        "import portlab_spec.run.display, portlab_spec.run.charts, portlab_spec.run.trackers, portlab_spec.run.stages",
        "import portlab_merge.cli, portlab_merge.overlay, portlab_merge.verify, portlab_merge.peft_adapter",
        "import portlab_serve.cli, portlab_serve.launch, portlab_serve.tool_calls",
        "import fitnesscoach.cli, fitnesscoach.web, fitnesscoach.terminal, fitnesscoach.backends.folder",
        "import portlab_port.cli",
        "import portlab_parity.cli, portlab_spec.evidence",
        "import portlab_jax.cli",
        "import portlab_xla.cli",
        "import portlab_torchax.cli",
    ],
)
def test_nothing_heavy_is_loaded(statement):
    package = statement.split()[1].partition(".")[0].rstrip(",")
    if find_spec(package) is None:
        pytest.skip(f"{package} has an environment of its own")
    assert not loaded_after(statement) & set(HEAVY)


def test_vllm_is_imported_by_its_plugin_alone():
    found = {name for name, folder in PACKAGES.items() if "vllm" in imported(folder / "src", ("vllm_plugin.py",))}
    assert not found


def test_the_shared_pytorch_part_knows_no_device():
    assert not imported(PACKAGES["portlab_hf"] / "src") & {"jax", "torch_xla", "torchax"}


def test_every_package_says_what_it_is_for():
    for folder in PACKAGES.values():
        assert len((folder / "README.md").read_text()) > 300, folder
        assert (folder / "tests").is_dir()


def test_files_stay_readable():
    long = {f: n for f in ROOT.glob("packages/*/src/**/*.py") if (n := len(f.read_text().splitlines())) > 500}
    assert not long
