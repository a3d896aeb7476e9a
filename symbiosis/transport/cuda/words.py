"""The layout of the page of host words through which a GPU client and the executor tell each other of calls.

To make a call, the client's stream clears the reply word, writes the number of a registered call to `BELL`, and waits until the reply word
is that number. The executor's CPU sees the bell, moves the number to `CURRENT`, and launches the product and the answer; its stream writes
the reply word. So at any moment the words say whether a call is unanswered. If the executor dies, the next one finds the call here and
answers it. The client's stream has waited meanwhile, and goes on.

The reply word is the first word of the client's first segment of device memory, where its GPU polls it fastest. All memory belongs to the
client and outlives the executor.
"""

BELL, CURRENT = 0, 16  # indices of 32-bit words; the two sides write to different cache lines
# How many calls the client's CPU has announced, how many of them were answered, and how many ran together, summed over all calls.
ENQUEUED, ANSWERED, BATCHED = 32, 48, 49
SLEEPS = 64  # set while the executor must be woken by its eventfd
BEAT = 80
ERROR, ERROR_LENGTH, ERROR_TEXT = 96, 97, 98  # the code of the newest refusal, and its text
LONGEST_ERROR = 1024

# A captured step makes its calls in one round. Its stream clears `CURRENT` and the first two of these words, which lie at these bytes of the
# first segment, rings once for the round, and then makes each call through the two words, as `kernels.gpu.doorbell` says. So here, too, the
# words say at any moment which call is unanswered. For a large call the stream waits, until the reply word is no less than the call's
# position; for any other call a kernel waits. `LET_GO` (`kernels/gpu/__init__.py`) in place of a position ends the waiting of the round. The third word ends that of all
# kernels once it is not zero. What is computed after that is void, and the client's CPU is told: by `VOID` in `ERROR`, if by nothing else.
ROUND_BELL, ROUND_REPLY, ROUNDS_OVER, VOID = 128, 256, 384, 0xFFFF
FIRST_BYTES = 512

MAX_CALLS = 1 << 16  # how many calls a client may have registered
MOST_KEPT = 1 << 14  # how many a client keeps before it forgets those that no captured step uses
FIRST_SEGMENT = 64 << 20  # bytes of device memory that a client begins with
MAX_SEGMENTS = 1 << 12  # how many segments a client may share
# bytes: the alignment of tensors in a segment, and of those that stay where the model has them
ALIGNED, ROW_ALIGNED = 256, 16


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED
