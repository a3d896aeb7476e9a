"""Learns how fast steps are, and so how large a piece of a long prompt may be, and when a step gives way to prompts that have just come.

What was quiet for a while is likely to stay so for as long again. So a piece takes no longer than nobody else has come, and a step that is
computed in vain takes at most half of the time. Whoever is being told tokens gets the next one with every step: beside them a piece is short.
"""

import math

from symbiosis.serving.scheduler.policy import Mean

LEAST = 32  # rows of a piece: smaller steps take hardly less time
BESIDE_S = 0.1  # the longest that a larger one may take of a step in which others get their next tokens


class Pace:
    """The pace of one engine.

    Args:
        most: Rows of prompts in a step.
    """

    def __init__(self, most: int) -> None:
        self._most, self._least = most, min(LEAST, most)
        self._rows_per_s = Mean()
        self._disturbed: float | None = None  # when a prompt last came while others were under way

    def disturbed(self, now: float) -> None:
        """Note that a prompt has come while others are under way."""
        self._disturbed = now

    def computed(self, rows: int, seconds: float) -> None:
        """Note how long a step with prompts has taken."""
        if seconds > 0:
            self._rows_per_s = self._rows_per_s.after(rows / seconds)

    def piece(self, now: float, beside: bool = False) -> int:
        """Return how many rows a prompt that does not end may have in a step, `beside` sequences that get their next tokens in it.

        >>> pace = Pace(512)
        >>> pace.computed(100, 1.0)
        >>> pace.piece(0.0)
        512
        >>> pace.disturbed(10.0)
        >>> [pace.piece(at) for at in (10.0, 12.0, 70.0)]
        [32, 200, 512]
        """
        if not self._rows_per_s.is_known:
            return min(4 * self._least, self._most)
        seconds = math.inf if self._disturbed is None else max(0.0, now - self._disturbed)
        if beside:
            seconds = min(seconds, BESIDE_S)
        return int(max(self._least, min(self._most, self._rows_per_s.value * seconds)))

    def gives_way(self, rows: int, began: float, now: float, coming: int) -> bool:
        """Whether a step of so many rows gives way to prompts of so many tokens, since these would wait for it longer than half as long as
        they take themselves.

        >>> pace = Pace(512)
        >>> pace.computed(500, 1.0)
        >>> [pace.gives_way(512, 0.0, now, coming=40) for now in (0.1, 1.0)], pace.gives_way(512, 0.0, 0.1, coming=2000)
        ([True, False], False)
        """
        if not self._rows_per_s.is_known or not self._least < rows <= self.piece(began):
            return False
        left = rows - self._rows_per_s.value * (now - began)
        return 2 * left > coming
