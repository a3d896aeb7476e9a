"""The page of host words through which a GPU client and the executor tell each other of calls, as both ends see it.

When its input lies in device memory, the client's stream clears the reply word, writes the number of a registered call to
`BELL`, and waits until the reply word is that number. The executor's CPU sees the bell, moves the number to `CURRENT`, and
launches product and answer; its stream writes the reply word. So at any moment the words say whether a call is unanswered, and
if the executor dies, the next one finds it here and answers it: the client's stream has waited, and notices nothing but the time.

The reply word lies in the client's first segment of device memory, where its GPU polls it fastest. All memory is the client's:
it outlives the executor.

A client that is alone tends to make the same calls in the same order. Then the executor *arms* its stream: behind one answer it
enqueues the next one already, which waits until the client's stream has written the number to the device's bell, too; so no CPU
is on the way. What an armed answer writes to the reply word is read from a place of its own: should the client do something
else, the executor puts 0 there, rings the device's bell itself, and lets the answer pass to no effect. (That is why an
armed answer's place never overlaps that of the answer before it, which the client may still be reading.)
"""

# Bytes from the beginning of the first segment: the reply word, the device's bell, and what armed answers reply, by number.
REPLY_AT, DEVICE_BELL_AT, ARMED_AT = 0, 128, 4096

BELL, CURRENT = 0, 16  # indices of 32-bit words; what different sides write lies on lines of its own
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


FIRST_BYTES = ARMED_AT + 4 * (MAX_CALLS + 1)


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED
