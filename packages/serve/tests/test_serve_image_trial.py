"""What tries the image (docker/check_image.py): each check can fail, and engines are called as they understand."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "docker"))
import image_checks
import stand_in_base
import stand_in_server
from check_image import Table
from container_engine import Done, Engine, Layer
from image_checks import Trial
from portlab_spec.errors import CheckFailed

CONFIG = {
    "Entrypoint": ["portlab-serve"],
    "User": "",
    "StopSignal": "SIGTERM",
    "Volumes": {"/cache": {}},
    "ExposedPorts": {"8000/tcp": {}},
    "Healthcheck": {"Test": ["CMD", "python", "-m", "portlab_serve.health"]},
    "Labels": {
        f"org.opencontainers.image.{name}": name for name in ("title", "description", "licenses", "version", "revision")
    },
}
COMMAND = (
    "VLLM_XLA_CACHE_PATH=/cache/xla python -m vllm.entrypoints.openai.api_server --model /model --chat-template /t\n"
)


class FakeEngine:
    """An engine whose containers end as they are told."""

    def __init__(self, done=None, config=CONFIG, layers=(1, 2, 3), stopped=stand_in_server.EXIT_CODE):
        self.done, self.config, self.stopped = done, config, stopped
        self.history = [Layer("RUN", size) for size in layers]

    def run(self, image, *words, options=()):
        return self.done(words) if callable(self.done) else self.done

    def inspect(self, image):
        return {"Config": self.config}

    def layers(self, image):
        return self.history

    @contextmanager
    def running(self, image, *words, options=()):
        yield "id"

    def logs(self, container):
        return "python -m vllm.entrypoints.openai.api_server --model /model\nready\n"

    def stop(self, container, seconds):
        return self.stopped


def trial(tmp_path: Path, *args, **kwargs) -> Trial:
    return Trial(FakeEngine(*args, **kwargs), "image", tmp_path, tmp_path, tmp_path)


def command_of(done: Done):
    """A container that prints `done`, and holds the template."""
    return lambda words: Done(0, "", "") if words[0] == "-f" else done


PASSING = {
    "description": {},
    "sizes": {},
    "requirements": {"done": Done(0, "No broken requirements found.\n", "")},
    "imports": {"done": Done(0, "noise\nvllm 0.32.0\n", "")},
    "help_text": {"done": Done(0, "usage: portlab-serve\n", "")},
    "good_model": {"done": Done(0, "preflight: ok (vllm-tpu, torchax)\n", "")},
    "gemma4_model": {"done": Done(0, "preflight: ok (vllm-tpu, jax)\n", "")},
    "bad_model": {"done": Done(1, "", "portlab-serve: error: the preflight found 2 errors\n")},
    "bad_command": {"done": Done(2, "", "portlab-serve: error: no model is named\n")},
    "printed_command": {"done": command_of(Done(0, COMMAND, ""))},
    "caches": {"done": Done(0, "portlab /cache/xla\n", "")},
    "issue_command": {},
    "stop": {},
    "no_tpu": {"done": Done(1, "", "preflight: ok (vllm-tpu, torchax)\nRuntimeError: Engine core\n")},
}
FAILING = {
    "description": {"config": CONFIG | {"Volumes": {"/cache": {}, "/models": {}}}},
    "sizes": {"layers": (5, 0, 0)},
    "requirements": {"done": Done(1, "vllm requires torch, which is not installed.\n", "")},
    "imports": {"done": Done(1, "", "ImportError: libfoo.so\n")},
    "help_text": {"done": Done(127, "", "portlab-serve: not found\n")},
    "good_model": {"done": Done(1, "", "portlab-serve: error: the preflight found 1 error\n")},
    "gemma4_model": {"done": Done(0, "preflight: ok (vllm-tpu, torchax)\n", "")},
    "bad_model": {"done": Done(0, "preflight: ok\n", "")},
    "bad_command": {"done": Done(2, "", "Traceback\nValueError\n")},
    "printed_command": {"done": command_of(Done(0, COMMAND.replace("/cache", "/root"), ""))},
    "caches": {"done": Done(1, "", "PermissionError: /cache/xla\n")},
    "stop": {"stopped": 137},
    "no_tpu": {"done": Done(127, "", "portlab-serve: not found\n")},
}


@pytest.mark.parametrize("name", PASSING)
def test_a_check_tells_what_it_saw(name, tmp_path):
    assert getattr(image_checks, name)(trial(tmp_path, **PASSING[name]))


@pytest.mark.parametrize("name", FAILING)
def test_a_check_can_fail(name, tmp_path):
    with pytest.raises(CheckFailed):
        getattr(image_checks, name)(trial(tmp_path, **FAILING[name]))


def test_checks_have_names_of_their_own():
    names = [check.__doc__ for check in image_checks.CHECKS]
    assert all(names)
    assert len(set(names)) == len(names)


def test_a_check_that_breaks_has_failed(capsys):
    table = Table()
    assert not table.check("one", lambda: {}["Healthcheck"])
    assert capsys.readouterr().out.splitlines()[1].strip() == "KeyError: 'Healthcheck'"


def test_one_failed_check_fails_the_table(capsys):
    def fail() -> str:
        raise CheckFailed("exit code 2, not 1")

    table = Table()
    assert table.check("one", lambda: "seen")
    assert not table.check("two", fail)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ok ")
    assert lines[2].startswith("FAILED ")
    assert lines[3].strip() == "exit code 2, not 1"
    assert table.failed == 1


# ---------------------------------------------------------------------------------------------------- engine


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A program `podman` on PATH that writes its words to a file and prints what `answer` holds."""
    (tmp_path / "answer").write_text("")
    script = tmp_path / "podman"
    script.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/words\ncat {tmp_path}/answer\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def test_podman_is_asked_for_the_format_that_has_health_checks(program):
    log = program / "log"
    assert Engine("podman").build("name", Path("d/Dockerfile"), Path("d"), {"A": "b"}, log).code == 0
    words = (program / "words").read_text()
    assert words == "build --format docker --file d/Dockerfile --tag name --build-arg A=b d\n"


def test_a_run_leaves_nothing_behind(program):
    Engine("podman").run("name", "--help", options=("--network", "none"))
    assert (program / "words").read_text() == "run --rm --no-healthcheck --network none name --help\n"


def test_a_container_in_the_background_is_removed(program):
    (program / "answer").write_text("abc\n")
    with pytest.raises(ValueError, match="stop"), Engine("podman").running("name"):
        raise ValueError("stop")
    assert (program / "words").read_text() == "run --detach --no-healthcheck name\nrm --force --volumes abc\n"


@pytest.mark.parametrize(("none", "some"), [("0", "2920000"), ("0 B", "2.92 MB")], ids=["docker", "podman"])
def test_layers_come_first_to_last(program, none, some):
    (program / "answer").write_text(f"{none}\tENTRYPOINT x\n{some}\tRUN pip\n")
    assert Engine("podman").layers("name") == [Layer("RUN pip", 2_920_000), Layer("ENTRYPOINT x", 0)]


def test_an_engine_that_fails_says_why(program):
    (program / "podman").write_text("#!/bin/sh\necho no such image >&2; exit 1\n")
    with pytest.raises(RuntimeError, match="podman image: no such image"):
        Engine("podman").inspect("name")


def test_an_image_is_described_by_its_json(program):
    (program / "answer").write_text(json.dumps([{"Config": CONFIG}]))
    assert Engine("podman").inspect("name")["Config"] == CONFIG


def test_a_health_check_is_found_where_podman_has_it(program):
    (program / "answer").write_text(json.dumps([{"Config": {}, "Healthcheck": CONFIG["Healthcheck"]}]))
    assert Engine("podman").inspect("name")["Config"] == {"Healthcheck": CONFIG["Healthcheck"]}


# -------------------------------------------------------------------------------------------------- stand-in


def test_pip_settings_of_this_machine_hold_in_a_container():
    listing = """\
:env:.default-timeout='180'
:env:.find-links='/srv/wheels'
global.cert='/etc/ssl/cert.pem'
global.extra-index-url='file:///srv/index https://mirror.example/simple'
global.timeout='60'
install.no-compile='true'"""
    assert stand_in_base.pip_settings(listing) == {"timeout": "180", "extra-index-url": "https://mirror.example/simple"}


def test_the_python_is_copied_without_what_was_installed_into_it(tmp_path):
    stand_in_base.copy_python(tmp_path)
    name = "python{}.{}".format(*stand_in_base.PYTHON)
    assert (tmp_path / "bin" / "python").readlink() == Path(name)
    assert (tmp_path / "lib" / name / "json" / "decoder.py").exists()
    assert list((tmp_path / "lib" / name / "site-packages").iterdir()) == []


# ------------------------------------------------------------------------------------------------ on a TPU VM

SCRIPT = Path(__file__).parents[3] / "docker" / "try_on_tpu.sh"
ANSWER = {
    "choices": [{"finish_reason": "tool_calls", "message": {"tool_calls": [{"function": {"name": "get_steps"}}]}}]
}
FAKE_DOCKER = """#!/bin/sh
echo "$*" >> {folder}/words
case "$*" in
*State.Running*) echo true ;;
*State.ExitCode*) echo {code} ;;
logs*) echo 'adapter try: log probabilities move by up to 1.5' ;;
esac
"""


def try_on_tpu(folder: Path, code: int, *words: str) -> tuple[int, str, list[str]]:
    """The script with a docker and a curl that only pretend: its exit code, its output, docker's command lines."""
    for name, text in {
        "docker": FAKE_DOCKER.format(folder=folder, code=code),
        "curl": f"#!/bin/sh\ncase \"$*\" in */health*) ;; *) echo '{json.dumps(ANSWER)}' ;; esac\n",
    }.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    done = subprocess.run(
        ["bash", str(SCRIPT), str(folder), "model", *words],
        env={"PATH": f"{folder}:{os.environ['PATH']}"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, done.stdout, (folder / "words").read_text().splitlines()


def test_the_trial_on_a_tpu_starts_twice_and_then_with_the_adapter(tmp_path):
    code, out, commands = try_on_tpu(tmp_path, 0, "--adapter", "lora", "--max-model-len=64")
    assert code == 0
    assert out.count("ok      healthy after") == 3
    assert out.count('answer  tool_calls [{"function": {"name": "get_steps"}}]') == 2
    assert "adapter try: log probabilities move by up to 1.5" in out
    starts = [command.partition("portlab-vllm-tpu ")[2] for command in commands if command.startswith("run --detach")]
    served = "/models/model --max-model-len=64"
    assert starts == [served, served, f"{served} --lora-modules try=/models/lora --check-adapter"]
    assert sum(command.startswith("stop --time 120") for command in commands) == 3


def test_the_trial_on_a_tpu_fails_with_the_servers_exit_code(tmp_path):
    code, out, _ = try_on_tpu(tmp_path, 137, "--max-model-len=64")
    assert code == 1
    assert "FAILED  exit code 137 after stop" in out
    assert (tmp_path / "try.log").exists()
