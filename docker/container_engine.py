"""docker or podman: build an image, look into it, run it. Their command lines agree in all that is used here."""

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RUN_SECONDS = 600
# podman runs health checks by systemd, and complains among the output where there is none.
QUIET = ("--no-healthcheck",)


UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True)
class Layer:
    """One step of an image's history: the instruction and the bytes that it added."""

    instruction: str
    size: int


@dataclass(frozen=True)
class Done:
    """A command that ended."""

    code: int
    out: str
    err: str

    @property
    def last_line(self) -> str:
        """What it said last, for a table."""
        lines = (self.err or self.out).strip().splitlines()
        return lines[-1] if lines else ""


@dataclass(frozen=True)
class Engine:
    """A program that builds and runs images.

    Attributes:
        program: `docker` or `podman`.
    """

    program: str

    def build(self, image: str, dockerfile: Path, context: Path, arguments: Mapping[str, str], log: Path) -> Done:
        """Build an image; the program's output goes to `log`, at whose end it is added."""
        words = [word for key, value in arguments.items() for word in ("--build-arg", f"{key}={value}")]
        command = [self.program, "build", *self._docker_format(), "--file", dockerfile, "--tag", image, *words, context]
        with log.open("a", encoding="utf-8") as stream:
            done = subprocess.run(command, stdout=stream, stderr=stream, check=False)
        return Done(done.returncode, "", log.read_text(encoding="utf-8"))

    def _docker_format(self) -> tuple[str, ...]:
        """OCI's format, podman's default, has no place for a health check."""
        return ("--format", "docker") if self.program == "podman" else ()

    def run(self, image: str, *words: str, options: Sequence[str] = (), seconds: float = RUN_SECONDS) -> Done:
        """Run an image's entrypoint on `words` and wait for its end.

        Raises:
            subprocess.TimeoutExpired: it takes longer than `seconds`.
        """
        return self._call("run", "--rm", *QUIET, *options, image, *words, seconds=seconds)

    @contextmanager
    def running(self, image: str, *words: str, options: Sequence[str] = ()) -> Iterator[str]:
        """A container in the background, by its id; it is removed at the end."""
        container = self._checked("run", "--detach", *QUIET, *options, image, *words).strip()
        try:
            yield container
        finally:
            self._call("rm", "--force", "--volumes", container)

    def exec(self, container: str, *words: str) -> Done:
        """Run a command in a running container."""
        return self._call("exec", container, *words)

    def stop(self, container: str, seconds: int) -> int:
        """Ask a container to stop, end it by force after `seconds`; returns its exit code."""
        self._checked("stop", "--time", str(seconds), container)
        return int(self._checked("inspect", "--format", "{{.State.ExitCode}}", container))

    def is_running(self, container: str) -> bool:
        """Has it not ended?"""
        return self._checked("inspect", "--format", "{{.State.Running}}", container).strip() == "true"

    def logs(self, container: str) -> str:
        """What a container has printed."""
        done = self._call("logs", container)
        return done.out + done.err

    def inspect(self, image: str) -> dict[str, Any]:
        """An image's configuration (`Config`), the digests of its layers (`RootFS`) and more, as docker has it."""
        found: dict[str, Any] = json.loads(self._checked("image", "inspect", image))[0]
        if "Healthcheck" in found:  # where podman has it
            found["Config"]["Healthcheck"] = found["Healthcheck"]
        return found

    def layers(self, image: str) -> list[Layer]:
        """Its history, first step first; steps that add no file have size 0."""
        text = self._checked("history", "--no-trunc", "--human=false", "--format", "{{.Size}}\t{{.CreatedBy}}", image)
        rows = [line.split("\t", 1) for line in text.splitlines()]
        return [Layer(instruction, bytes_of(size)) for size, instruction in reversed(rows)]

    def remove(self, image: str) -> None:
        """Remove an image's name, and what no other image uses."""
        self._checked("image", "rm", image)

    def _call(self, *words: str | Path, seconds: float | None = None) -> Done:
        done = subprocess.run([self.program, *words], capture_output=True, text=True, timeout=seconds, check=False)
        return Done(done.returncode, done.stdout, done.stderr)

    def _checked(self, *words: str | Path) -> str:
        done = self._call(*words)
        if done.code:
            raise RuntimeError(f"{self.program} {words[0]}: {done.last_line}")
        return done.out


def bytes_of(size: str) -> int:
    """A size as engines print it: bytes, or what podman makes of them although it is told not to, `2.92 MB`."""
    number, _, unit = size.partition(" ")
    return int(float(number) * UNITS[unit])
