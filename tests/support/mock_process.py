"""The mock server in a process of its own, so that it shares no event loop and no core's turn with the client."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx


@contextmanager
def mock_server(*options: str) -> Iterator[str]:
    """Its address; it ends with the block."""
    command = [sys.executable, "-m", "portlab_bench", "mock", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("listening on "), line
            yield line.split()[-1]
        finally:
            process.terminate()


def request_body(index: int, **more: object) -> bytes:
    """A request that gives itself its number as id. Here, since client processes import it by name."""
    ask = {"messages": [{"role": "user", "content": "x"}], "stream": True, "request_id": str(index)}
    return json.dumps(ask | more).encode()


def log_of(url: str) -> dict[str, dict]:
    """What it sent, by the ids that requests gave themselves."""
    return {sent["id"]: sent for sent in httpx.get(f"{url}/log", timeout=30).json()}
