"""One way for every command line to end: exit code, one clear line, no traceback unless asked."""

import errno
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from portlab_spec.errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED, UserError


def run(prog: str, main: Callable[[list[str]], int | None], argv: Sequence[str] | None = None) -> NoReturn:
    """Run `main(args)` and exit with its code; errors become one line on stderr.

    `--debug` anywhere on the command line is taken out of `args`, shows tracebacks and debug logs.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args
    args = [a for a in args if a != "--debug"]
    logging.basicConfig(level=logging.DEBUG if debug else logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        code = main(args) or 0
        sys.stdout.flush()
    except UserError as error:
        if debug:
            raise
        code = _fail(prog, str(error), error.exit_code)
    except KeyboardInterrupt:
        code = _fail(
            prog,
            "interrupted; what was saved is complete, run the same command again to go on",
            EXIT_INTERRUPTED,
        )
    except BrokenPipeError:
        # The reader (head, less) went away: not our fault, and nothing more can be said on stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:
        if debug or error.errno is None:
            raise
        code = _fail(prog, describe_os_error(error), EXIT_BAD_INPUT)
    sys.exit(code)


def describe_os_error(error: OSError) -> str:
    """One line for an operating-system error, with advice for the ones users meet."""
    where = f"{error.filename}: " if error.filename else ""
    advice = {
        errno.ENOSPC: "Free some space or choose another --out; nothing half-written was kept.",
        errno.EDQUOT: "Free some space or choose another --out; nothing half-written was kept.",
        errno.EACCES: "Check the permissions of that path.",
        errno.EROFS: "Choose an --out on a writable disk.",
        errno.ENOENT: "Check the path.",
    }.get(error.errno or 0, "")
    return f"{where}{error.strerror or error}. {advice}".rstrip()


def _fail(prog: str, message: str, code: int) -> int:
    print(f"{prog}: error: {' '.join(message.split())}", file=sys.stderr)
    return code
