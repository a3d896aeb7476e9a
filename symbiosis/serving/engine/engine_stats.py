"""What an engine counts, as plain data that crosses processes. The boundaries of histograms are those of vLLM, so that its plots fit."""

from bisect import bisect_left

import msgspec

FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
BETWEEN_TOKENS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
WHOLE_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class Histogram(msgspec.Struct):
    """For each boundary, how many values were at most that and above the boundary before; the last count is of values above all.

    >>> histogram = Histogram.of((1.0, 2.0))
    >>> for value in (0.5, 1.0, 7.0):
    ...     histogram.observe(value)
    >>> histogram.counts, histogram.total, histogram.count
    ([2, 0, 1], 8.5, 3)
    """

    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0

    @classmethod
    def of(cls, bounds: tuple[float, ...]) -> "Histogram":
        return cls(bounds, [0] * (len(bounds) + 1))

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        return sum(self.counts)


class EngineStats(msgspec.Struct, kw_only=True):
    """The figures of one engine since it started."""

    running: int = 0  # completions in the batch
    waiting: int = 0  # ... and all others under way
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # of these, those that were chosen
    prefix_tokens: int = 0  # of prompts that joined the batch: asked whether they were computed before
    prefix_hits: int = 0  # ... and were
    pages: int = 0
    pages_free: int = 0
    pages_cached: int = 0  # hold prefixes that nobody uses now: free, if need be
    evictions: int = 0  # of sequences
    adapters: int = 0  # known
    adapters_loaded: int = 0  # in the host's memory
    adapter_bytes: int = 0  # what they take there
    adapters_here: int = 0  # on the device
    adapter_fetches: int = 0
    adapter_evictions: int = 0
    finished: dict[str, int] = msgspec.field(default_factory=dict)  # completions, by why they ended
    first_token_s: Histogram = msgspec.field(default_factory=lambda: Histogram.of(FIRST_TOKEN_S))
    between_tokens_s: Histogram = msgspec.field(default_factory=lambda: Histogram.of(BETWEEN_TOKENS_S))
    queue_s: Histogram = msgspec.field(default_factory=lambda: Histogram.of(WHOLE_S))
    whole_s: Histogram = msgspec.field(default_factory=lambda: Histogram.of(WHOLE_S))

    @property
    def cache_usage(self) -> float:
        """How much of the memory is in use, from 0 to 1."""
        return 1.0 - (self.pages_free + self.pages_cached) / self.pages if self.pages else 0.0
