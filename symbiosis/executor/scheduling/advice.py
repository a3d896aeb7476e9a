"""Advises clients that map the weights: whether others decode, with whom their few rows could be joined."""

LASTS_S = 1.5  # a session counts as decoding for so long after its last few rows
BELIEVED_S = 3.0  # a session that says it decodes, is told to call and does not is believed for so long


class Advisor:
    """Knows which sessions decode, by calls or directly.

    >>> advisor = Advisor(joins=True)
    >>> advisor.decoded(1, now=0.0, called=False)
    >>> advisor.decoded(2, now=0.5, called=True)
    >>> advisor.of(1, now=1.0), advisor.of(2, now=1.0), advisor.of(3, now=1.8)
    ((1, True), (1, False), (1, True))
    """

    def __init__(self, joins: bool) -> None:
        """`joins` says whether the executor joins calls at all."""
        self._joins = joins
        self._decoded: dict[int, float] = {}
        self._called: dict[int, float] = {}
        self._asked: dict[int, float] = {}  # since when a session that says it decodes is told to call
        self._unbelieved: set[int] = set()  # sessions whose reports do not count until they call

    def decoded(self, session: int, now: float, called: bool) -> None:
        """Note that a session has multiplied few rows, or has had them multiplied by a call."""
        self._decoded[session] = now
        if called:
            self._called[session] = now
            self._asked.pop(session, None)
            self._unbelieved.discard(session)

    def left(self, session: int) -> None:
        for known in (self._decoded, self._called, self._asked):
            known.pop(session, None)
        self._unbelieved.discard(session)

    def of(self, session: int, now: float) -> tuple[int, bool]:
        """Return how many other sessions decode whose rows could be joined with this one's, and whether any other has decoded by calls
        lately, to which large products give way in the executor."""
        believed = {one: then for one, then in self._decoded.items() if one not in self._unbelieved}
        others = _recent(believed, session, now) if self._joins else 0
        self._ask(session, others > 0, now)
        return others, _recent(self._called, session, now) > 0

    def _ask(self, session: int, to_call: bool, now: float) -> None:
        """Stop believing a session that reports decoding but never calls: it would make others call for nothing."""
        if not to_call or now - self._decoded.get(session, -LASTS_S) >= LASTS_S:
            self._asked.pop(session, None)
        elif now - self._asked.setdefault(session, now) >= BELIEVED_S:
            self._unbelieved.add(session)


def _recent(when: dict[int, float], but: int, now: float) -> int:
    return sum(session != but and now - then < LASTS_S for session, then in when.items())
