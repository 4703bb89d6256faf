"""The server as a child process: signals go to it, its exit code comes back."""

import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from types import FrameType

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class ServerProcess:
    """A running server. It is its own session, so that Ctrl-C reaches it once, through us."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self._child = subprocess.Popen(list(command), env=dict(environ), start_new_session=True)
        self._stopping = False
        for number in FORWARDED:
            signal.signal(number, self._forward)

    @property
    def runs(self) -> bool:
        """Is it still there, and nobody has asked it to stop?"""
        return self._child.poll() is None and not self._stopping

    def stop(self, patience: float = 60.0) -> None:
        """End it, by force after `patience` seconds."""
        self._child.terminate()
        try:
            self._child.wait(patience)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def wait(self) -> int:
        """Its exit code; 128 + n if signal n ended it, as shells say it."""
        code = self._child.wait()
        return 128 - code if code < 0 else code

    def _forward(self, number: int, _: FrameType | None) -> None:
        self._stopping = True
        if self._child.poll() is None:
            self._child.send_signal(number)


def run(command: Sequence[str], environ: Mapping[str, str], once_started: Callable[[ServerProcess], None]) -> int:
    """Start a server, call `once_started`, and wait for the server's end; it is stopped if the call fails."""
    server = ServerProcess(command, environ)
    try:
        once_started(server)
    except BaseException:
        server.stop()
        raise
    return server.wait()
