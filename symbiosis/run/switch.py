"""Whether this process belongs to a program under `symbiosis run`."""

import os

SWITCH = "SYMBIOSIS_RUN"


def is_on() -> bool:
    """Whether models are to share.

    >>> is_on()
    False
    """
    return os.environ.get(SWITCH, "") not in ("", "0")
