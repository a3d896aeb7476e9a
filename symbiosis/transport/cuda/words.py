"""The page of host words through which a GPU client and the executor tell each other of calls, as both ends see it.

When its input lies in device memory, the client's stream clears the reply word, writes the number of a registered call to
`BELL`, and waits until the reply word is that number. The executor's CPU sees the bell, moves the number to `CURRENT`, and
launches product and answer; its stream writes the reply word. So at any moment the words say whether a call is unanswered, and
if the executor dies, the next one finds it here and answers it: the client's stream has waited, and notices nothing but the time.

The reply word is the first of the client's first segment of device memory, where its GPU polls it fastest. All memory is the
client's: it outlives the executor.
"""

BELL, CURRENT = 0, 16  # indices of 32-bit words; what different sides write lies on lines of its own
# Calls that the client's CPU announced, those of them that were answered, and the sum over all calls of how many ran together.
ENQUEUED, ANSWERED, BATCHED = 32, 48, 49
SLEEPS = 64  # the executor must be woken by an eventfd
BEAT = 80
ERROR, ERROR_LENGTH, ERROR_TEXT = 96, 97, 98  # the code of the newest refusal, and its text
LONGEST_ERROR = 1024

# A captured step makes its calls in one round: its stream clears `CURRENT` and these two words of the first segment (at these
# bytes), rings once for the round, and then makes each call through them, as `kernels.gpu.doorbell` says. So here, too, the words say
# at any moment which call is unanswered. Large calls are waited for by the stream, until the word is no less than the number;
# others by kernels. `LET_GO` instead of a number ends the waiting of the round; a third word, once it is not zero, that of all
# kernels. What is computed then is void, and the client's CPU is told (`VOID` in `ERROR`, if nobody else tells it).
ROUND_BELL, ROUND_REPLY, ROUNDS_OVER, LET_GO, VOID = 128, 256, 384, 1 << 30, 0xFFFF
FIRST_BYTES = 512

MAX_CALLS = 1 << 16  # registered by one client at a time
MOST_KEPT = 1 << 14  # ... that come as they are, before those of shapes that no captured step uses are forgotten
FIRST_SEGMENT = 64 << 20  # bytes of device memory that a client begins with
MAX_SEGMENTS = 1 << 12  # of device memory that one client shares
ALIGNED, ROW_ALIGNED = 256, 16  # bytes: of what is put together, and of what lies where it is


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED
