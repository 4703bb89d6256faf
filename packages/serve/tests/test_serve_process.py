"""The child process: exit codes and signals."""

import os
import signal
import sys
import threading
import time

import pytest

from portlab_serve.process import FORWARDED, run

WAIT = "import signal, sys, time\nsignal.signal({0}, lambda *_: sys.exit(7))\nopen({1!r}, 'w').close()\ntime.sleep(60)"


@pytest.fixture(autouse=True)
def _restored_handlers():
    before = {number: signal.getsignal(number) for number in FORWARDED}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def child(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.mark.parametrize("code", [0, 1, 3])
def test_the_servers_exit_code_comes_back(code):
    assert run(child(f"raise SystemExit({code})"), os.environ, lambda server: None) == code


def test_a_server_that_a_signal_ended_says_which():
    assert run(child("import os; os.kill(os.getpid(), 9)"), os.environ, lambda server: None) == 128 + 9


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_the_server(number, tmp_path):
    ready = tmp_path / "ready"

    def send() -> None:
        while not ready.exists():
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    threading.Thread(target=send).start()
    assert run(child(WAIT.format(int(number), str(ready))), os.environ, lambda server: None) == 7


def test_the_environment_is_the_servers(tmp_path):
    code = "import os; raise SystemExit(int(os.environ['CODE']))"
    assert run(child(code), {**os.environ, "CODE": "5"}, lambda server: None) == 5


def test_a_failed_check_stops_the_server():
    servers = []

    def fail(server) -> None:
        servers.append(server)
        raise ValueError("no effect")

    with pytest.raises(ValueError, match="no effect"):
        run(child("import time; time.sleep(60)"), os.environ, fail)
    assert not servers[0].runs
