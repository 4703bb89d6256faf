"""Errors that a user can act on.

Every command line of Portlab turns a `UserError` into one line on stderr and an exit code; a traceback is
shown only under `--debug`. Anything else that escapes is a fault of ours.
"""

EXIT_FAILED_CHECK = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, the shell's convention


class UserError(Exception):
    """Bad usage or input: what is wrong, where, and how to mend it.

    Args:
        what: the fault, as a plain sentence without a full stop.
        where: file, key, line or leaf that holds it; empty if `what` says it all.
        fix: what the user should do; empty only if nothing can be done.
    """

    exit_code = EXIT_BAD_INPUT

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what, self.where, self.fix = what, where, fix
        line = f"{where}: {what}" if where else what
        super().__init__(f"{line}. {fix}" if fix else line)


class CheckFailed(UserError):
    """Input was fine, but a check of the result failed (exit code 1)."""

    exit_code = EXIT_FAILED_CHECK
