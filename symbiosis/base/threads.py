"""How the threads of one process take turns."""

import sys

SWITCH_S = 0.0005


def take_turns_often() -> None:
    """Have threads that compute in Python give way after half a millisecond. By default it is 5 ms, for which another thread waits each time that it comes
    back from what needs no interpreter, such as a product or a socket: a step does so hundreds of times."""
    sys.setswitchinterval(SWITCH_S)
