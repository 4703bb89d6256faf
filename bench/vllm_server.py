"""vLLM's server as a child process, as it is or behind portlab-serve, asked over HTTP."""

import contextlib
import json
import os
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import psutil

START_SECONDS = 600  # the first import of vLLM alone takes minutes where disk or processors are busy
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the default is half of the machine's memory
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # binding is worth its while on machines with several sockets
    "OMP_NUM_THREADS": "1",  # two that wait for each other are slower where other work runs
}
Entry = Literal["vllm", "portlab"]
# What `vllm serve` runs; the command itself asks for a distribution named vllm, which vllm-cpu 0.32 is not.
MODULES: dict[Entry, str] = {"vllm": "vllm.entrypoints.openai.api_server", "portlab": "portlab_serve"}


class ServerFailed(Exception):
    """The server ended or failed; the message is the first error of its log."""


@dataclass(frozen=True)
class Answer:
    """A completion: its token ids and the log-probability of each."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class VllmServer:
    """A server in eager mode that calls its model `base`; a context manager that ends it.

    Args:
        python: interpreter of vLLM's environment.
        model: folder to serve.
        options: further command-line options.
        log: file for what the server prints.
        entry: vLLM's own server, or portlab-serve before it.
        environ: variables to add.

    Raises:
        ServerFailed: it ended before it was ready.
    """

    def __init__(
        self,
        python: Path,
        model: Path,
        options: Sequence[str],
        log: Path,
        entry: Entry = "vllm",
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.log, self._port = log, _free_port()
        self.root = f"http://127.0.0.1:{self._port}"
        self._environ = {**os.environ, **ENVIRONMENT, **(environ or {})}
        self._command = [str(python), "-m", MODULES[entry], "--model", str(model), "--enforce-eager"]
        self._command += ["--host", "127.0.0.1", "--port", str(self._port), "--served-model-name", "base", *options]

    def __enter__(self) -> "VllmServer":
        with self.log.open("w") as stream:
            self.process = psutil.Popen(
                self._command, env=self._environ, stdout=stream, stderr=stream, start_new_session=True
            )
        try:
            self._wait()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.end()

    def complete(self, prompts: Sequence[Sequence[int]], tokens: int, model: str = "base") -> list[Answer]:
        """Greedy completions of exactly `tokens` ids, of all prompts at once.

        Raises:
            ServerFailed: it could not.
        """
        body = {
            "model": model,
            "prompt": [list(prompt) for prompt in prompts],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 1,
            "return_token_ids": True,
        }
        try:
            choices = self._ask("/v1/completions", body)["choices"]
        except urllib.error.HTTPError as error:
            raise ServerFailed(self._first_error()) from error
        choices.sort(key=lambda choice: choice["index"])
        return [Answer(tuple(c["token_ids"]), tuple(c["logprobs"]["token_logprobs"])) for c in choices]

    def wait_for(self, text: str, seconds: float = 120.0) -> None:
        """Until its log has a text.

        Raises:
            ServerFailed: it never had.
        """
        end = time.monotonic() + seconds
        while text not in self.log.read_text():
            if self.process.poll() is not None or time.monotonic() > end:
                raise ServerFailed(self._first_error())
            time.sleep(0.2)

    def end(self, patience: float = 20.0) -> float:
        """End it and all that it started, by force after `patience` seconds; returns the seconds that took."""
        started = [self.process, *self.family()]
        began = time.monotonic()
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(psutil.TimeoutExpired, subprocess.TimeoutExpired):
                self.process.wait(patience)
        seconds = time.monotonic() - began
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        return seconds

    def family(self) -> list[psutil.Process]:
        """The processes that it started: behind portlab-serve the server, and vLLM's engine."""
        try:
            return self.process.children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def _wait(self) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise ServerFailed(self._first_error())
            try:
                self._ask("/v1/models")
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.5)
            else:
                return
        raise ServerFailed(f"not ready after {START_SECONDS} s, see {self.log}")

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.root}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as reply:
            return json.load(reply)

    def _first_error(self) -> str:
        lines = self.log.read_text().splitlines()
        found = (re.search(r"(?:^|[\] ])([A-Z]\w+Error: .+|portlab-serve: error: .+)", line) for line in lines)
        errors = [match[1] for match in found if match]
        return (errors or lines or ["it printed nothing"])[0]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
