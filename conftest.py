"""What holds for every test."""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that starts tests in the background has them, and every program they start, ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
