"""The image's health check."""

import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from portlab_serve import health


@pytest.fixture
def record(tmp_path, monkeypatch):
    path = tmp_path / "address"
    monkeypatch.setenv(health.VARIABLE, str(path))
    return path


@pytest.fixture
def server():
    """A server that answers /health with `server.status`."""

    class Health(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(server.status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Health)
    server.status = 200
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def check() -> tuple[int, str]:
    """In a process of its own, as an engine runs it."""
    done = subprocess.run(
        [sys.executable, "-m", "portlab_serve.health"], capture_output=True, text=True, check=False, timeout=60
    )
    return done.returncode, done.stdout + done.stderr


def test_nothing_is_recorded_unless_a_file_is_named(monkeypatch, tmp_path):
    monkeypatch.delenv(health.VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    health.record("http://127.0.0.1:8000")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("status", "code"), [(200, 0), (204, 1), (503, 1)])
def test_health_is_what_the_recorded_server_answers(record, server, status, code):
    server.status = status
    health.record(f"http://127.0.0.1:{server.server_port}")
    assert check() == (code, f"http://127.0.0.1:{server.server_port}/health: {status}\n")


def test_a_proxy_is_not_asked(record, server, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    health.record(f"http://127.0.0.1:{server.server_port}")
    assert check()[0] == 0


def test_a_server_that_is_gone_is_one_line(record, server):
    health.record("http://127.0.0.1:9")
    code, text = check()
    assert code == 1
    assert text.startswith("http://127.0.0.1:9/health: ")
    assert text.count("\n") == 1


def test_a_server_that_was_not_started_is_one_line(record):
    assert check() == (1, f"no server was started yet: {health.VARIABLE} names no file\n")
