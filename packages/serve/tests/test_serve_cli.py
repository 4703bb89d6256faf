"""The program: exit codes, what it prints, and a server that it starts."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from portlab_serve import cli, health
from portlab_serve.chat_template import shipped
from portlab_spec.errors import CheckFailed, UserError


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    for name in ("VLLM_ARGS", "PORTLAB_SERVE_CACHE", "MODEL_IMPL_TYPE", health.VARIABLE):
        monkeypatch.delenv(name, raising=False)


def test_the_command_is_printed_with_the_findings(functiongemma, capsys):
    assert cli.main([str(functiongemma.path), "--print-command", "--max_model_len", "64"]) == 0
    first, verdict, command = capsys.readouterr().out.splitlines()
    assert first == "note    template     the model has none: functiongemma.jinja is used"
    assert verdict == "preflight: ok (vllm, torch)"
    assert f"--model {functiongemma.path} --max_model_len 64 --tool-call-parser portlab-functiongemma" in command
    assert command.endswith(f"--chat-template {shipped('functiongemma')}")


def test_the_preflight_alone_prints_no_command(functiongemma, capsys):
    assert cli.main(["--preflight-only", str(functiongemma.path), "--target", "vllm-tpu"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "preflight: ok (vllm-tpu, torchax)"


def test_json_holds_all_of_it(functiongemma, capsys):
    cli.main([str(functiongemma.path), "--print-command", "--json"])
    held = json.loads(capsys.readouterr().out)
    assert (held["ok"], held["target"], held["tool_format"]) == (True, "vllm", "functiongemma")
    assert held["findings"][0].keys() == {"level", "check", "what", "where", "fix"}


def test_vllm_args_are_read(functiongemma, monkeypatch, capsys):
    monkeypatch.setenv("VLLM_ARGS", f"--model {functiongemma.path} --port 1")
    cli.main(["--print-command"])
    assert f"--model {functiongemma.path} --port 1 --tool" in capsys.readouterr().out


def test_a_failed_check_is_one_line_and_stops(functiongemma, capsys):
    (functiongemma.path / "tokenizer.json").unlink()
    with pytest.raises(CheckFailed, match="the preflight found 1 error, listed above") as raised:
        cli.main([str(functiongemma.path), "--preflight-only"])
    assert raised.value.exit_code == 1
    where = functiongemma.path / "tokenizer.json"
    assert capsys.readouterr().out.startswith(f"error   tokenizer    {where}: tokenizer not found. Check the path\n")


def test_a_failed_check_can_be_passed_over(functiongemma):
    functiongemma.write_config(architectures=[])
    assert cli.main([str(functiongemma.path), "--preflight-only", "--ignore-preflight"]) == 0


def test_the_cache_may_come_from_the_environment(functiongemma, monkeypatch, capsys):
    monkeypatch.setenv("PORTLAB_SERVE_CACHE", "/cache")
    cli.main([str(functiongemma.path), "--print-command"])
    assert "VLLM_CACHE_ROOT=/cache/vllm" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ([], "there is no adapter to check"),
        (["--lora-modules", "a=/x", "--uds", "/s"], "cannot be used with --uds"),
    ],
)
def test_an_effect_that_cannot_be_checked_is_refused(functiongemma, more, complaint):
    with pytest.raises(UserError, match=complaint):
        cli.main([str(functiongemma.path), "--target", "cpu", "--check-adapter", *more])


def test_the_servers_code_is_the_programs(functiongemma, tmp_path):
    """A package `vllm` that ends with 7 stands in for the server."""
    package = tmp_path / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text("import sys; print(*sys.argv[1:3]); sys.exit(7)")
    argv = [str(functiongemma.path), "--target", "cpu"]
    code = f"from portlab_serve import cli; import sys; sys.argv[1:] = {argv!r}; cli.entry()"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (7, f"--model {functiongemma.path}\n")
    assert "preflight: ok (cpu, torch)" in done.stderr


@pytest.mark.parametrize(
    ("options", "address"),
    [
        ([], "http://127.0.0.1:8000"),
        (["--host", "0.0.0.0", "--port", "9"], "http://127.0.0.1:9"),
        (["--host=::"], "http://127.0.0.1:8000"),
        (["--host=::1"], "http://[::1]:8000"),
        (["--host", "10.0.0.2"], "http://10.0.0.2:8000"),
        (["--uds", "/socket"], None),
        (["--ssl-keyfile", "/key"], None),
    ],
)
def test_the_health_check_learns_where_the_server_answers(functiongemma, tmp_path, monkeypatch, options, address):
    monkeypatch.setenv(health.VARIABLE, str(tmp_path / "address"))
    monkeypatch.setattr(cli, "run", lambda *_: 0)
    cli.main([str(functiongemma.path), "--target", "cpu", *options])
    assert (tmp_path / "address").exists() == (address is not None)
    assert address is None or (tmp_path / "address").read_text() == address


def test_a_signal_ends_it_while_it_checks(tmp_path):
    """Its handler is seen in the exit code, 128 + 15: process 1 of a container ignores signals that have none."""
    os.mkfifo(tmp_path / "config.json")
    argv = ["--target", "cpu", str(tmp_path)]
    code = f"from portlab_serve import cli; import sys; sys.argv[1:] = {argv!r}; cli.entry()"
    process = subprocess.Popen([sys.executable, "-c", code])
    writer = None
    while writer is None:
        assert process.poll() is None
        with contextlib.suppress(OSError):  # nobody reads yet
            writer = os.open(tmp_path / "config.json", os.O_WRONLY | os.O_NONBLOCK)
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + 15
    os.close(writer)
