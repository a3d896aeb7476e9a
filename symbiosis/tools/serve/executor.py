"""What processes do first that another one has started: those of a server, and those of a cluster."""

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have this process told to end when the one that started it dies, however that happens, and not by a SIGHUP: it has no terminal, and whoever
    rotates logs sends it to all processes of a service."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
