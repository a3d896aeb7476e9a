"""The page of host words through which a GPU client and the executor tell each other of calls, as both ends see it.

The client's stream writes the number of a registered call to `BELL` when its input lies in device memory, and waits until
`REPLY` is not 0. The executor's CPU sees the bell, moves the number to `CURRENT`, and launches product and answer; its
stream writes `REPLY`. The client's stream then clears `REPLY` and `CURRENT`, which lie side by side, and goes on. So at
any moment the words say whether a call is unanswered, and if the executor dies, the next one finds it here and answers it:
the client's stream has waited, and notices nothing but the time.

The memory is the client's, words and slabs: they outlive the executor.
"""

BELL, REPLY, CURRENT = 0, 16, 17  # indices of 32-bit words; what different sides write lies on lines of its own
ENQUEUED, ANSWERED, BATCHED = (
    32,
    48,
    49,
)  # calls that the client's CPU enqueued, that were answered, that ran together with these
SLEEPS = 64  # the executor must be woken by an eventfd
BEAT = 80
ERROR, ERROR_LENGTH, ERROR_TEXT = 96, 97, 98  # the code of the newest refusal, and its text
LONGEST_ERROR = 1024

MAX_CALLS = 1 << 16  # registered by one client
ALIGNED = 256


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED
