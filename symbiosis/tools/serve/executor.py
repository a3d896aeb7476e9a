"""What the server's own executor does before it starts."""

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have this process told to end when the one that started it dies, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
