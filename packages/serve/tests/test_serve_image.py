"""The image and its compose file: instructions, pins, and flags that vLLM and portlab-serve take."""

import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from portlab_serve import health
from portlab_serve.cli import Options
from portlab_serve.command_line import ServerArgs, resolve
from portlab_serve.findings import errors_of
from portlab_serve.launch import prepare

ROOT = Path(__file__).parents[3]
DOCKER = ROOT / "docker"
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))
SERVICES = COMPOSE["services"]
VLLM_OPTIONS = (Path(__file__).parent / "data" / "vllm_0.32_options.txt").read_text().split("\n")[1:]
CHIPS = {"v6e-8": 8, "v6e-8-dp2": 8, "v5e-8": 8, "v6e-1": 1}


def instructions() -> list[tuple[str, str]]:
    text = (DOCKER / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in lines)]


def environment() -> dict[str, str]:
    (rest,) = [rest for name, rest in instructions() if name == "ENV"]
    return dict(word.split("=", 1) for word in shlex.split(rest))


def args_of(service: str, model: str) -> ServerArgs:
    words = [re.sub(r"\$\{MODEL:-[^}]*\}", "MODEL", word) for word in SERVICES[service]["command"]]
    return resolve([model if word == "/models/MODEL" else word for word in words])


# ------------------------------------------------------------------------------------------------- image


def test_the_last_stage_runs_portlab_serve():
    scripts = tomllib.loads((ROOT / "packages" / "serve" / "pyproject.toml").read_text())["project"]["scripts"]
    (entrypoint,) = [rest for name, rest in instructions() if name == "ENTRYPOINT"]
    assert entrypoint == '["portlab-serve"]'
    assert "portlab-serve" in scripts


def test_every_instruction_exists():
    known = {
        "ARG",
        "FROM",
        "COPY",
        "RUN",
        "ENV",
        "VOLUME",
        "EXPOSE",
        "STOPSIGNAL",
        "HEALTHCHECK",
        "ENTRYPOINT",
        "LABEL",
    }
    assert {name for name, _ in instructions()} == known


def test_what_is_copied_is_there_and_not_ignored():
    kept = [line[1:] for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"]
    for name, rest in instructions():
        if name == "COPY" and not rest.startswith("--from"):
            source = shlex.split(rest)[0]
            assert (ROOT / source).exists()
            assert source in kept


def test_the_health_check_reads_what_portlab_serve_records():
    (check,) = [rest for name, rest in instructions() if name == "HEALTHCHECK"]
    command = json.loads(check[check.index("[") :])
    assert command == ["python", "-m", health.__name__]
    assert Path(environment()[health.VARIABLE]).is_absolute()


def test_only_what_is_written_is_a_volume():
    """A volume that nobody mounts is left behind by every container."""
    (volumes,) = [json.loads(rest) for name, rest in instructions() if name == "VOLUME"]
    assert volumes == [environment()["PORTLAB_SERVE_CACHE"]]


def test_the_base_names_its_debian():
    """`python:3.12-slim` moves to another Debian when there is one."""
    assert ("ARG", "PYTHON_IMAGE=python:3.12-slim-bookworm") in instructions()
    assert [rest for name, rest in instructions() if name == "FROM"] == ["${PYTHON_IMAGE} AS wheels", "${PYTHON_IMAGE}"]


def test_the_pins_hold_for_what_builds_the_wheels():
    pinned = {line.partition("==")[0] for line in (DOCKER / "requirements.txt").read_text().splitlines()}
    (build,) = [rest for name, rest in instructions() if name == "RUN" and "pip wheel" in rest]
    assert "PIP_CONSTRAINT=/src/requirements.txt" in build
    for package in ("spec", "serve"):
        text = (ROOT / "packages" / package / "pyproject.toml").read_text()
        assert set(tomllib.loads(text)["build-system"]["requires"]) <= pinned


def test_the_pins_come_before_the_code():
    copied = [rest for name, rest in instructions() if name == "COPY"]
    assert copied.index("docker/requirements.txt /opt/requirements.txt") < copied.index(
        "--from=wheels /wheels /opt/wheels"
    )


def test_every_requirement_is_pinned_and_no_index_is_named():
    lines = (DOCKER / "requirements.txt").read_text().splitlines()
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9._-]*==\S+", line) for line in lines)
    assert "vllm-tpu==0.32.0" in lines


def test_what_portlab_needs_is_pinned():
    pinned = {line.partition("==")[0] for line in (DOCKER / "requirements.txt").read_text().splitlines()}
    for package in ("spec", "serve"):
        project = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]
        needed = {re.split(r"[<>=\[]", name)[0] for name in project["dependencies"]} - {"portlab-spec"}
        assert needed <= pinned


def test_with_an_index_of_cpu_wheels_torch_comes_from_it_without_cuda(tmp_path):
    """The instruction's shell code, with a `python` that writes down what it is asked to install."""
    (run,) = [rest for name, rest in instructions() if name == "RUN" and "TORCH_INDEX" in rest]
    code = re.sub(r"--mount=\S+", "", run).replace("/opt/", f"{tmp_path}/").replace("/tmp/torch", f"{tmp_path}/torch")
    pins = (DOCKER / "requirements.txt").read_text().splitlines()
    (tmp_path / "requirements.txt").write_text("\n".join(pins) + "\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/words\n')
    python.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "TORCH_INDEX": "https://index.example"}
    subprocess.run(["sh", "-c", code], env=environ, check=True)
    assert (tmp_path / "words").read_text().splitlines() == [
        f"-m pip install --no-deps --index-url https://index.example -r {tmp_path}/torch.txt",
        f"-m pip install --no-deps -r {tmp_path}/requirements.txt",
    ]
    torch = [line.partition("==")[0] for line in (tmp_path / "torch.txt").read_text().splitlines()]
    assert torch == ["torch", "torchvision"]
    dropped = set(pins) - set((tmp_path / "requirements.txt").read_text().splitlines())
    assert {name.partition("-")[0].partition("==")[0] for name in dropped} == {"cuda", "nvidia", "triton"}


# ----------------------------------------------------------------------------------------------- compose


@pytest.mark.parametrize("service", SERVICES)
def test_every_flag_is_one_of_vllms(service):
    for option in args_of(service, "/m").options:
        assert option.name in VLLM_OPTIONS


@pytest.mark.parametrize("service", SERVICES)
def test_the_flags_use_the_chips_of_the_slice(service):
    args = args_of(service, "/m")
    used = int(args.value("--tensor-parallel-size") or 1) * int(args.value("--data-parallel-size") or 1)
    assert used == CHIPS[service]


@pytest.mark.parametrize("service", ["v6e-8", "v6e-8-dp2", "v5e-8"])
def test_a_gemma_4_passes_the_checks_of_its_service(service, gemma4_31b):
    launch = prepare(args_of(service, str(gemma4_31b.path)), "vllm-tpu", {})
    assert errors_of(launch.findings) == []
    assert launch.implementation == "jax"


def test_a_functiongemma_passes_the_checks_of_its_service(functiongemma):
    assert errors_of(prepare(args_of("v6e-1", str(functiongemma.path)), "vllm-tpu", {}).findings) == []


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_is_chosen_by_its_profile_and_keeps_its_caches(service):
    held = SERVICES[service]
    assert held["profiles"] == [service]
    assert held["privileged"]
    assert held["init"]
    assert "cache:/cache" in held["volumes"]


def test_no_option_of_ours_hides_one_of_vllms():
    ours = {f"--{name.replace('_', '-')}" for name in Options.__dataclass_fields__}
    assert not ours & set(VLLM_OPTIONS)
