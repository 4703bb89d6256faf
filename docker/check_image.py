"""Build the image and try it: what it says of itself, what it refuses, how it starts and stops.

    nox -s image                            with docker, or podman if there is no docker
    nox -s image -- --base IMAGE            on another base than the Dockerfile's
    nox -s image -- --stand-in              on a base made of Debian's packages and this Python: no registry is asked

Prints one line for each check, and exits with 1 if one failed. No TPU is needed, and none is used.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

import stand_in_base
from container_engine import Done, Engine
from image_checks import CHECKS, Trial, ended, require
from portlab_spec import cli
from portlab_spec.assets import default_model
from portlab_spec.errors import CheckFailed, UserError
from portlab_spec.files import read_json, write_json

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from serving_folders import Model, adapter_tensors, write_weights

ROOT = Path(__file__).parents[1]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
PROGRAMS = ("docker", "podman")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the program."""

    engine: Annotated[str | None, tyro.conf.arg(metavar="docker|podman")] = None
    """Program that builds and runs; left out, the first of them that works."""
    base: Annotated[str | None, tyro.conf.arg(metavar="IMAGE")] = None
    """Base image; left out, the Dockerfile's own, from its registry."""
    stand_in: bool = False
    """Make a base of Debian's packages and this Python, and keep it for the next time."""
    image: str = "portlab-vllm-tpu"
    """Name to build under."""
    log: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("build/image.log")
    """Output of the builds."""


class Table:
    """Lines as checks end, and whether one failed."""

    def __init__(self) -> None:
        self.failed = 0

    def check(self, title: str, run: Callable[[], str]) -> bool:
        """Run a check and print its line."""
        start = time.monotonic()
        try:
            verdict, seen = "ok", run()
        except CheckFailed as error:
            verdict, seen = "FAILED", str(error)
        except Exception as error:  # a check that breaks has not passed, and the others are still of interest
            verdict, seen = "FAILED", f"{type(error).__name__}: {error}"
        self.failed += verdict == "FAILED"
        print(f"{verdict:7} {time.monotonic() - start:6.1f} s  {title}\n{'':18}{' '.join(seen.split())}", flush=True)
        return verdict == "ok"


def main(argv: list[str]) -> int:
    """Build and try; returns the exit code."""
    options = tyro.cli(Options, prog="nox -s image --", description=__doc__, args=argv)
    engine = find_engine(options.engine)
    arguments = {"REVISION": revision()}
    if options.base or options.stand_in:
        arguments["PYTHON_IMAGE"] = options.base or stand_in(engine)
    options.log.parent.mkdir(parents=True, exist_ok=True)
    options.log.unlink(missing_ok=True)
    table = Table()
    table.check("hadolint", lint)
    built = table.check("build", lambda: build(engine, options, options.image, ROOT, arguments))
    if not built:
        return 1
    with tempfile.TemporaryDirectory() as folder:
        model = default_model().path
        models, server = make_models(Path(folder), model), make_stand_in_server(Path(folder))
        trial = Trial(engine, options.image, model, models, server)
        for check in CHECKS:
            table.check(str(check.__doc__), lambda check=check: check(trial))
    table.check("a change in packages/serve builds on the same pins", lambda: rebuild(engine, options, arguments))
    print(f"{table.failed} failed" if table.failed else "all passed")
    return 1 if table.failed else 0


def find_engine(asked: str | None) -> Engine:
    """The engine to use.

    Raises:
        UserError: none works.
    """
    for program in [asked] if asked else PROGRAMS:
        if shutil.which(program) and not subprocess.run([program, "info"], capture_output=True, check=False).returncode:
            return Engine(program)
    raise UserError(f"{asked or 'neither docker nor podman'} works here", fix="Install one of them and start it")


def stand_in(engine: Engine) -> str:
    """The stand-in base, made if it is not there."""
    held = subprocess.run([engine.program, "image", "inspect", stand_in_base.IMAGE], capture_output=True, check=False)
    return stand_in_base.IMAGE if held.returncode == 0 else stand_in_base.make(engine)


def revision() -> str:
    """The commit that is built, for the image's label."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def lint() -> str:
    """Hold the Dockerfile to hadolint's rules."""
    done = subprocess.run(["hadolint", str(DOCKERFILE)], capture_output=True, text=True, check=False)
    ended(Done(done.returncode, done.stdout, done.stderr or done.stdout), 0)
    return "no findings"


def build(engine: Engine, options: Options, image: str, context: Path, arguments: dict[str, str]) -> str:
    """Build the image of a copy of the repository."""
    done = engine.build(image, context / DOCKERFILE.relative_to(ROOT), context, arguments, options.log)
    require(done.code == 0, f"{done.last_line} (see {options.log})")
    return str(engine.inspect(image)["Id"])[:19]


def rebuild(engine: Engine, options: Options, arguments: dict[str, str]) -> str:
    """Build a copy with a changed line of code: all layers up to the pins have to be the same."""
    changed = f"{options.image}-changed"
    with tempfile.TemporaryDirectory() as folder:
        for part in ("docker", "packages/spec", "packages/serve"):
            shutil.copytree(ROOT / part, Path(folder) / part)
        module = Path(folder) / "packages/serve/src/portlab_serve/__init__.py"
        module.write_text(module.read_text(encoding="utf-8") + "# changed\n", encoding="utf-8")
        build(engine, options, changed, Path(folder), arguments)
    before, after = (engine.inspect(image)["RootFS"]["Layers"] for image in (options.image, changed))
    engine.remove(changed)
    same = [a == b for a, b in zip(before, after, strict=True)]
    require(not same[-1], "the change is not in the image")
    code_layers = 2  # wheels, and what is installed from them
    require(all(same[:-code_layers]), f"{same.count(True)} of {len(same)} layers are the same")
    return f"{same.count(True)} of {len(same)} layers are the same"


def make_models(folder: Path, base: Path) -> Path:
    """Tiny models as published, one spoilt, one that cannot be read to its end, and a random adapter of `base`."""
    models = folder / "models"
    models.mkdir()
    Model(models / "gemma4", "gemma-4-31B", "Gemma4ForConditionalGeneration", "model.language_model.", "gemma4")
    bad = Model(models / "bad", "functiongemma-270m", "Gemma3ForConditionalGeneration", "model.", "functiongemma")
    write_json(bad.path / "generation_config.json", {"eos_token_id": [1]})
    (models / "adapter").mkdir()
    factors = adapter_tensors(read_json(base / "config.json", "config"), "model.", rank=8, scale=0.03)
    write_weights(models / "adapter" / "adapter_model.safetensors", factors)
    adapted = sorted({name.split(".")[-3] for name in factors})
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": adapted}
    write_json(models / "adapter" / "adapter_config.json", settings)
    (models / "slow").mkdir()
    os.mkfifo(models / "slow" / "config.json")
    folder.chmod(0o755)  # user portlab reads it too
    return models


def make_stand_in_server(folder: Path) -> Path:
    """A package `vllm` that holds only the stand-in server."""
    package = folder / "stand-in" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for part in (package, package.parent, package.parent.parent):
        (part / "__init__.py").touch()
    shutil.copy(ROOT / "docker" / "stand_in_server.py", package / "api_server.py")
    return folder / "stand-in"


if __name__ == "__main__":
    cli.run("check-image", main)
