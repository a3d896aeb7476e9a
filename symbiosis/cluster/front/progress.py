"""How far a stream has come: what a server needs so that it can go on with it."""

import time
import uuid
from typing import Any

DONE = b"data: [DONE]"
FAILED = b'data: {"error":'


class Progress:
    """What the events of a stream have told, by choice.

    >>> progress = Progress({"id": "cmpl-1", "created": 0, "tokens": [[]], "ended": [], "opened": 0})
    >>> progress.take(b': 0 17 4 .\\ndata: {"choices":[]}')
    b'data: {"choices":[]}'
    >>> progress.told["tokens"], progress.told["ended"]
    ([[17, 4]], [0])
    """

    def __init__(self, told: dict[str, Any]) -> None:
        self.told = told
        self.count = 0  # tokens

    @classmethod
    def of(cls, body: dict[str, Any], is_chat: bool, choices: int) -> "Progress":
        """Return that of a request; of one that a client continues itself, from where it is."""
        given = body.get("continuation")
        if isinstance(given, dict):
            return cls(given)
        kind = "chatcmpl" if is_chat else "cmpl"
        return cls({
            "id": f"{kind}-{uuid.uuid4().hex}", "created": int(time.time()), "tokens": [[] for _ in range(choices)], "ended": [], "opened": 0,
        })  # fmt: skip

    def take(self, event: bytes) -> bytes:
        """Note what an event tells, and return it without the comment."""
        if not event.startswith(b":"):
            self.told["opened"] += event.startswith(b"data: {")
            return event
        comment, _, rest = event.partition(b"\n")
        _, choice, *words = comment.split()
        tokens = [int(word) for word in words if word != b"."]
        self.told["tokens"][int(choice)] += tokens
        self.count += len(tokens)
        if words and words[-1] == b".":
            self.told["ended"].append(int(choice))
        return rest
