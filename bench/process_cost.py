"""What a command costs from its start until its output is on disk: seconds, memory and bytes of all its processes."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from peers.disk import put_on_disk
from portlab_spec.errors import UserError

PROC = Path("/proc")


class Cost(NamedTuple):
    """Of one run.

    Attributes:
        seconds: until the output is on disk.
        cpu_seconds: user and system, of all processes.
        peak_memory_bytes: sum of the largest resident sets (VmHWM) of all processes, mapped files included.
        read_bytes: from storage.
        written_bytes: to storage.
        syscall_read_bytes: asked of the kernel, from its cache or not; mapped files do not show.
        call_seconds: without start and imports, where a command tells.
    """

    seconds: float
    cpu_seconds: float
    peak_memory_bytes: int
    read_bytes: int
    written_bytes: int
    syscall_read_bytes: int
    call_seconds: float = 0.0


def run(command: Sequence[str | Path], out: Path, environment: Mapping[str, str]) -> Cost:
    """Run a command that writes the folder `out`.

    Raises:
        UserError: it fails.
    """
    started = time.perf_counter()
    child = subprocess.Popen(
        list(map(str, command)), env={**os.environ, **environment}, stdout=sys.stderr, stderr=sys.stderr
    )
    memory = _PeakMemory(child.pid)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # its counters are there until it is waited for
    io = _fields(PROC / str(child.pid) / "io")
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    peak = memory.stop()
    if child.returncode:
        raise UserError(f"could not run {' '.join(map(str, command))} (exit code {child.returncode})")
    put_on_disk(out)
    return Cost(
        seconds=time.perf_counter() - started,
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        peak_memory_bytes=peak,
        read_bytes=io["read_bytes"],
        written_bytes=io["write_bytes"],
        syscall_read_bytes=io["rchar"],
    )


class _PeakMemory:
    """Watches a process and its descendants. (ru_maxrss would do for one, but starts with what its parent held.)"""

    def __init__(self, pid: int) -> None:
        self._pid, self._peaks, self._done = pid, dict[int, int](), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def stop(self) -> int:
        """Stop watching; returns bytes."""
        self._done.set()
        self._thread.join()
        return sum(self._peaks.values())

    def _watch(self) -> None:
        while not self._done.wait(0.02):
            for pid in _tree(self._pid):
                peak = _fields(PROC / str(pid) / "status").get("VmHWM", 0) * 1024
                self._peaks[pid] = max(self._peaks.get(pid, 0), peak)


def _tree(pid: int) -> list[int]:
    pids = [pid]
    for parent in pids:  # grows meanwhile
        for children in (PROC / str(parent) / "task").glob("*/children"):
            try:
                pids += map(int, children.read_text().split())
            except OSError:  # gone
                continue
    return pids


def _fields(path: Path) -> dict[str, int]:
    """The numbers of a file of lines `name: number ...`; empty once the process is gone."""
    try:
        lines = [line.partition(":") for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {name: int(value.split()[0]) for name, _, value in lines if value.split() and value.split()[0].isdecimal()}
