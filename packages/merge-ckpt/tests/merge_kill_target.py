"""Merge again and again in forked children that are killed: all modules are loaded and the plan is made once.

Reads requests from stdin and answers each with a line on stdout, both JSON. A request has the options of a merge, `out`
and when to kill: `after` seconds, before the `event`-th step on the file system (audit events of Python's: open,
rename, ...), or once `files` of the output are finished; none for an undisturbed run. The answer has how the child
ended (`killed`, or `error` as text), the `seconds` it took and how many `events` there were.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from portlab_merge import journal
from portlab_merge.base_model import open_base
from portlab_merge.checkpoint import read_checkpoint
from portlab_merge.overlay import MergeOptions, merge
from portlab_merge.plan import Plan, make_plan

EVENTS = ("open", "os.", "shutil.", "tempfile.")


def child(plan: Plan, request: dict[str, Any], answer: int) -> None:
    """The merge itself; never returns."""
    count, finished = 0, 0

    def on_event(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if event.startswith(EVENTS):
            count += 1
            if count == request.get("event"):
                die()

    def on_added(self: journal.Journal, *args: Any) -> None:
        nonlocal finished
        add(self, *args)
        finished += 1
        if finished == request.get("files"):
            die()

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    add, journal.Journal.add = journal.Journal.add, on_added  # type: ignore[method-assign]
    sys.addaudithook(on_event)
    error = ""
    try:
        merge(plan, Path(request["out"]), MergeOptions(**request["options"]))
    except BaseException as fault:
        error = f"{type(fault).__name__}: {fault}"
    os.write(answer, json.dumps({"error": error, "events": count}).encode())
    os._exit(0)


def serve(plan: Plan, request: dict[str, Any]) -> dict[str, Any]:
    """One merge; what became of it."""
    reader, writer = os.pipe()
    start = time.monotonic()
    pid = os.fork()
    if not pid:
        child(plan, request, writer)
    os.close(writer)
    if "after" in request:
        time.sleep(request["after"])
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    result = json.loads(answer) if answer else {"error": "", "events": None}
    return {"killed": not answer, "seconds": time.monotonic() - start, **result}


def main(run: str, base: str) -> None:
    plan = make_plan(open_base(Path(base)), read_checkpoint(run))
    for line in sys.stdin:
        print(json.dumps(serve(plan, json.loads(line))), flush=True)


main(*sys.argv[1:])
