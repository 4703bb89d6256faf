"""Every job of the repository, each in an environment of its own, built with uv from compiled pins.

nox -s train_jax     fine-tune, evaluate, export, verify (arguments after -- go to train-jax)
nox -s tests         lint, then all tests (arguments after -- go to pytest)
nox -s lint          ruff and mypy
nox -s lock          rewrite requirements/*.txt
nox -s bench_step    packed training step against its own plain variants and transformers + PEFT
nox -s seeds         the main job's accuracy over several seeds
nox -s folds         cross-validation of recipe choices
"""

from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "uv"
nox.options.sessions = ["tests"]
nox.options.reuse_existing_virtualenvs = True

PYTHON = "3.12"
PACKAGES = ("packages/spec", "packages/train-jax", "packages/merge-ckpt")
CODE = ("packages", "bench", "tests", "noxfile.py")

# session -> (workspace packages whose dependencies it needs, extra requirements)
ENVIRONMENTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "train_jax": (PACKAGES, ()),
    # torch 2.9 is the newest that torch_xla supports; one version everywhere means one download.
    "tests": (
        PACKAGES,
        (
            "hypothesis",
            "mypy",
            "peft==0.21.2",
            "pytest",
            "ruff",
            "safetensors",
            "torch==2.9.1",
            "transformers==5.23.0",
            "types-pyyaml",
        ),
    ),
}


def install(session: nox.Session, environment: str) -> None:
    """Install an environment's pins and the workspace packages, editable."""
    session.install("-r", f"requirements/{environment}.txt")
    packages = ENVIRONMENTS[environment][0]
    session.install("--no-deps", *(arg for package in packages for arg in ("-e", package)))


@nox.session(python=PYTHON)
def train_jax(session: nox.Session) -> None:
    """Fine-tune, evaluate and export with the JAX trainer."""
    install(session, "train_jax")
    session.run("train-jax", *session.posargs)


@nox.session(python=PYTHON)
def tests(session: nox.Session) -> None:
    """Lint, then every test."""
    install(session, "tests")
    check(session)
    session.run("pytest", *(session.posargs or ["-m", "not slow"]))


@nox.session(python=PYTHON)
def lint(session: nox.Session) -> None:
    """Formatting, lint rules and types."""
    install(session, "tests")
    check(session)


def check(session: nox.Session) -> None:
    """What `lint` checks, in an environment that already holds the tools."""
    session.run("ruff", "format", "--check", *CODE)
    session.run("ruff", "check", *CODE)
    session.run("mypy", *(f"{package}/src" for package in PACKAGES))


@nox.session(python=PYTHON)
def bench_step(session: nox.Session) -> None:
    """Examples per second of the training step, beside plain variants and transformers + PEFT."""
    install(session, "tests")
    session.run("python", "bench/bench_step.py", *session.posargs)


@nox.session(python=PYTHON)
def seeds(session: nox.Session) -> None:
    """Held-out accuracy of the main job over several seeds."""
    install(session, "train_jax")
    session.run("python", "bench/seeds.py", *session.posargs)


@nox.session(python=PYTHON)
def folds(session: nox.Session) -> None:
    """Cross-validation of recipe choices over the rows outside the test split."""
    install(session, "train_jax")
    session.run("python", "bench/folds.py", *session.posargs)


@nox.session(python=PYTHON)
def lock(session: nox.Session) -> None:
    """Compile requirements/*.txt from the packages' dependencies."""
    session.install("uv")
    for name, (packages, extras) in ENVIRONMENTS.items():
        source = Path(session.create_tmp()) / f"{name}.in"
        source.write_text("\n".join(extras) + "\n")
        session.run(
            "uv", "pip", "compile", "--quiet", "--universal", "--python-version", PYTHON, "--upgrade",
            "--no-emit-index-url", "--no-annotate", "--no-header", "--extra", "demo",
            "--no-emit-package", "portlab-spec",
            *(f"{package}/pyproject.toml" for package in packages), str(source),
            "--output-file", f"requirements/{name}.txt",
        )  # fmt: skip
