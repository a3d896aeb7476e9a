"""Drafts tokens for texts that decode, and learns in which of them drafts are chosen.

A draft token is chosen where it is the very token that would be drawn there without it: by the logits of its place, and the random number of its
sequence's seed and position. That accepts as many as rejection sampling does for a draft that is certain, and texts are those of the same seed
without drafts. So nothing depends on what is drafted, but how many tokens a step tells.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Protocol
from weakref import WeakKeyDictionary

from symbiosis.serving.request import Request, Token
from symbiosis.serving.scheduler.scheduler_output import ScheduledRequest, SchedulerOutput, Sequence

REST = 16  # tokens of a text without drafts, once a single one was not chosen


class Proposer(Protocol):
    """Guesses how texts go on."""

    def propose(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, tuple[int, ...]]:
        """Return up to so many tokens for each text; texts for which nothing is known are not in it."""

    def forget(self, sequence: Sequence) -> None:
        """Free what is kept of a text that leaves the batch."""


class Speculation:
    """The drafts of one engine.

    Args:
        most: Draft tokens of a text in one step.
    """

    def __init__(self, proposer: Proposer, most: int) -> None:
        self.most, self._proposer = most, proposer
        self._lengths: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()
        self._rests: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()  # until a text has so many tokens
        self.drafted = self.accepted = 0  # tokens

    def drafts(self, decoding: Iterable[Sequence], most: int) -> dict[Sequence, tuple[int, ...]]:
        """Return the draft tokens of sequences, of each so many at most. One that follows a schema or grammar has none: what may come next in it
        is known token by token."""
        wanted = {each: count for each in decoding if (count := min(most, self._wanted(each))) > 0}
        return self._proposer.propose(wanted) if wanted else {}

    def _wanted(self, sequence: Sequence) -> int:
        sampling = sequence.request.sampling
        if sampling.guide is not None or len(sequence.tokens) < self._rests.get(sequence, 0):
            return 0
        return min(self._lengths.get(sequence, self.most), sampling.max_tokens - sequence.produced - 1)

    def learn(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Note how many draft tokens of a sequence were chosen: next it gets twice as many, and none for a while where a single one was not chosen."""
        self.drafted, self.accepted = self.drafted + drafted, self.accepted + accepted
        if not accepted and drafted == 1:
            self._rests[sequence] = len(sequence.tokens) + REST
        self._lengths[sequence] = max(1, min(self.most, 2 * accepted))

    def forget(self, sequence: Sequence) -> None:
        """Free what is kept of a sequence that leaves the batch."""
        self._proposer.forget(sequence)


@dataclass(slots=True, frozen=True, eq=False)
class Drafted:
    """A sequence as it is behind some of its draft tokens."""

    sequence: Sequence
    drafts: tuple[int, ...]

    @property
    def request(self) -> Request:
        return self.sequence.request

    @property
    def completion(self) -> int:
        return self.sequence.completion

    @property
    def tokens(self) -> list[int]:
        return [*self.sequence.tokens, *self.drafts]

    @property
    def virtual(self) -> int:
        return self.sequence.virtual

    @property
    def prompt_length(self) -> int:
        return self.sequence.prompt_length

    @property
    def produced(self) -> int:
        return self.sequence.produced + len(self.drafts)


def choosing(step: SchedulerOutput) -> list[Sequence | Drafted]:
    """Return for each row that chooses a token what that token is to follow."""
    rows: list[Sequence | Drafted] = []
    for segment in step.segments:
        if segment.chooses:
            rows.append(segment.sequence)
            rows += [Drafted(segment.sequence, segment.drafts[:count]) for count in range(1, 1 + len(segment.drafts))]
    return rows


def accepted(
    step: SchedulerOutput, tokens: Iterable[Token | None]
) -> Iterator[tuple[ScheduledRequest, list[Token | None]]]:
    """Yield the tokens that segments choose, given those of all rows: draft tokens as long as each is the one that is chosen there, and the token behind them."""
    rows = iter(tokens)
    for segment in step.segments:
        if segment.chooses:
            its = list(islice(rows, 1 + len(segment.drafts)))
            if segment.drafts:
                its = its[: 1 + agreeing(segment.drafts, [None if token is None else token.id for token in its])]
            yield segment, its


def agreeing(drafts: Iterable[int], tokens: Iterable[int | None]) -> int:
    """Return how many draft tokens are those that came.

    >>> agreeing((5, 6, 7), [5, 6, 8, 9]), agreeing((5, 6), [5, 6, 8])
    (2, 2)
    """
    count = 0
    for draft, token in zip(drafts, tokens, strict=False):
        if draft != token:
            break
        count += 1
    return count
