"""Advises clients that map the weights: whether others decode, with whom their few rows could be batched, or to whom training gives way."""

from math import inf

LASTS_S = 1.5  # a session counts as decoding for so long after its last few rows
BELIEVED_S = 3.0  # a session that says it decodes, is told to call and does not is believed for so long


class Advisor:
    """Knows which sessions make tokens, by calls or directly.

    >>> advisor = Advisor(batches=True, rations=False)
    >>> advisor.decoded(1, now=0.0, called=False)
    True
    >>> advisor.decoded(2, now=0.5, called=True)
    False
    >>> advisor.of(1, now=1.0), advisor.of(2, now=1.0), advisor.of(3, now=1.8)
    ((1, True), (1, False), (1, True))
    """

    def __init__(self, batches: bool, rations: bool) -> None:
        """
        Args:
            batches: Whether the executor batches calls at all.
            rations: Whether it holds training back for those, too, who make tokens without calling it.
        """
        self._batches, self._rations = batches, rations
        self._last = -inf  # when anybody made tokens
        self._made: dict[int, float] = {}
        self._decoded: dict[int, float] = {}
        self._called: dict[int, float] = {}
        self._asked: dict[int, float] = {}  # since when a session that says it decodes is told to call
        self._unbelieved: set[int] = set()  # sessions whose reports do not count until they call

    def decoded(self, session: int, now: float, called: bool, few: bool = True) -> bool:
        """Note that a session has multiplied rows of tokens, or has had them multiplied by a call. `few`: that could be batched. Return whether
        nobody had lately, so that others should be advised anew."""
        first = now - self._last >= LASTS_S
        self._last = self._made[session] = now
        if few:
            self._decoded[session] = now
        if called:
            self._called[session] = now
            self._asked.pop(session, None)
            self._unbelieved.discard(session)
        return first

    def left(self, session: int) -> None:
        for known in (self._made, self._decoded, self._called, self._asked):
            known.pop(session, None)
        self._unbelieved.discard(session)

    def of(self, session: int, now: float) -> tuple[int, bool]:
        """Return how many other sessions decode whose rows could be batched with this one's, and whether any other has made
        tokens lately to which large products of training give way in the executor."""
        believed = {one: then for one, then in self._decoded.items() if one not in self._unbelieved}
        others = _recent(believed, session, now) if self._batches else 0
        self._ask(session, others > 0, now)
        return others, _recent(self._made if self._rations else self._called, session, now) > 0

    def _ask(self, session: int, to_call: bool, now: float) -> None:
        """Stop believing a session that reports decoding but never calls: it would make others call for nothing."""
        if not to_call or now - self._decoded.get(session, -LASTS_S) >= LASTS_S:
            self._asked.pop(session, None)
        elif now - self._asked.setdefault(session, now) >= BELIEVED_S:
            self._unbelieved.add(session)


def _recent(when: dict[int, float], but: int, now: float) -> int:
    return sum(session != but and now - then < LASTS_S for session, then in when.items())
