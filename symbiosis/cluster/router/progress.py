"""How far a stream has come: what a server needs so that it can go on with it."""

import time

from symbiosis.cluster.router.completion_fields import CompletionFields
from symbiosis.server.openai_protocol import Continuation
from symbiosis.server.request_record import this_request

DONE = b"data: [DONE]"
FAILED = b'data: {"error":'


class Progress:
    """What the events of a stream have told, by choice.

    >>> progress = Progress(Continuation("cmpl-1", 0, tokens=[], ended=[], opened=0), choices=1)
    >>> progress.take(b': 0 17 4 .\\ndata: {"choices":[]}')
    b'data: {"choices":[]}'
    >>> progress.told.tokens, progress.told.ended
    ([[17, 4]], [0])
    """

    def __init__(self, told: Continuation, choices: int) -> None:
        self.told, self._choices = told, choices
        self.count = 0  # tokens

    @classmethod
    def of(cls, asked: CompletionFields) -> "Progress":
        """Return that of a request; of one that a client continues itself, from where it is."""
        if (given := asked.continuation) is not None:
            return cls(given, asked.sequences)
        kind = "chatcmpl" if asked.is_chat else "cmpl"
        return cls(
            Continuation(f"{kind}-{this_request().id}", int(time.time()), tokens=[], ended=[], opened=0),
            asked.sequences,
        )

    def take(self, event: bytes) -> bytes:
        """Note what an event tells, and return it without the comment."""
        if not event.startswith(b":"):
            self.told.opened += event.startswith(b"data: {")
            return event
        comment, _, rest = event.partition(b"\n")
        _, choice, *words = comment.split()
        tokens = [int(word) for word in words if word != b"."]
        if not self.told.tokens:  # nothing is made for choices before a server has let them in
            self.told.tokens = [[] for _ in range(self._choices)]
        self.told.tokens[int(choice)] += tokens
        self.count += len(tokens)
        if words and words[-1] == b".":
            self.told.ended.append(int(choice))
        return rest
