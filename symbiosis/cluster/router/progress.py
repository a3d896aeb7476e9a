"""How far a stream has come: what a server needs so that it can go on with it."""

from dataclasses import dataclass

from symbiosis.server.openai_protocol import Continuation

DONE = b"data: [DONE]"
FAILED = b'data: {"error":'


@dataclass
class Progress:
    """What the events of a stream have told, by choice.

    >>> progress = Progress(Continuation("cmpl-1", 0), choices=1)
    >>> progress.take(b': 0 17 4 .\\ndata: {"choices":[]}')
    b'data: {"choices":[]}'
    >>> progress.told.tokens, progress.told.ended
    ([[17, 4]], [0])
    """

    told: Continuation
    choices: int
    count: int = 0  # tokens

    def take(self, event: bytes) -> bytes:
        """Note what an event tells, and return it without the comment."""
        if not event.startswith(b":"):
            self.told.opened += event.startswith(b"data: {")
            return event
        comment, _, rest = event.partition(b"\n")
        _, choice, *words = comment.split()
        tokens = [int(word) for word in words if word != b"."]
        if not self.told.tokens:  # nothing is made for choices before a server has let them in
            self.told.tokens = [[] for _ in range(self.choices)]
        self.told.tokens[int(choice)] += tokens
        self.count += len(tokens)
        if words and words[-1] == b".":
            self.told.ended.append(int(choice))
        return rest
