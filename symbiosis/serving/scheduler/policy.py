"""Decides which sequences run next, by pure functions over the waiting ones. They have no clock; `now` is passed to them.

A policy is an order in which sequences are tried, and `admit` tries them. A sequence for which there is no room is passed by, but not for
ever. Early abort follows S-LoRA (arXiv:2311.03285); fairness between tenants follows the virtual token counter (arXiv:2401.00588).
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol, TypeVar

LOOKAHEAD = 64  # sequences that are passed by at most, to find one that fits
MOST_OVERTAKEN = 32  # times that one may be passed by; then nobody overtakes it any more
LONGER = 2  # times as many tokens left to compute: then a prompt gives way to another
PART = 0.2  # of the rows of shorter prompts: what longer ones get beside them; twice that where tenants share
SHORT = 64  # tokens of a prompt that is not worth cutting
DRAFTED = 16  # rows of tokens and draft tokens together: more take a step longer than they are worth
INPUT_COST, OUTPUT_COST = 1.0, 2.0  # of a token, to its tenant


class Wants(Protocol):
    """What a tenant wants computed, as far as fairness looks at it."""

    @property
    def tenant(self) -> str: ...
    @property
    def brought(self) -> int: ...


class Waits(Wants, Protocol):
    """A sequence, as far as policies look at it."""

    overtaken: int

    @property
    def arrived(self) -> float: ...
    @property
    def version(self) -> int: ...
    @property
    def has_begun(self) -> bool: ...
    @property
    def priority(self) -> int: ...


class Runs(Protocol):
    """A sequence that runs, as far as policies look at it."""

    overtaken: int

    @property
    def uncomputed(self) -> int: ...
    @property
    def may_wait_again(self) -> bool: ...


class Prompt(Protocol):
    """A sequence whose prompt is being computed, as far as policies look at it."""

    owed: float

    @property
    def uncomputed(self) -> int: ...


S = TypeVar("S", bound=Wants)
W = TypeVar("W", bound=Waits)
R = TypeVar("R", bound=Runs)
P = TypeVar("P", bound=Prompt)


@dataclass(slots=True)
class StepBatch:
    """What runs, and how much more may run."""

    sequences: int
    most_sequences: int
    versions: set[int] = field(default_factory=set)  # of adapters; the base is none
    most_versions: int | None = None
    tenants: Counter[str] = field(default_factory=Counter)  # how many sequences of each run
    most_of_tenant: int | None = None

    def may_take(self, version: int, tenant: str) -> bool:
        """Whether the limits, memory and the number of sequences aside, allow one more."""
        if self.most_of_tenant is not None and self.tenants[tenant] >= self.most_of_tenant:
            return False
        is_new = version != 0 and version not in self.versions
        return not (is_new and self.most_versions is not None and len(self.versions) >= self.most_versions)


def admit(order: Iterable[W], batch: StepBatch, start: Callable[[W], bool]) -> list[W]:
    """Return the sequences that join the batch, which counts them. `start(sequence)` begins one if there is memory for it.

    If there is no room for a sequence, at most `MOST_OVERTAKEN` others pass it by. Then the batch drains until it fits. A sequence that its
    own tenant's limit holds back holds back no other.
    """
    joined: list[W] = []
    passed: list[W] = []
    for sequence in order:
        if (
            batch.sequences >= batch.most_sequences
            or len(passed) > LOOKAHEAD
            or any(each.overtaken >= MOST_OVERTAKEN for each in passed)
        ):
            break
        if batch.may_take(sequence.version, sequence.tenant) and start(sequence):
            batch.sequences += 1
            batch.versions |= {sequence.version} - {0}
            batch.tenants[sequence.tenant] += 1
            joined.append(sequence)
            for other in passed:
                other.overtaken += 1
            continue
        if batch.may_take(0, sequence.tenant):
            passed.append(sequence)
    return joined


def longer(running: Sequence[R], tokens: int) -> list[R]:
    """Return the running prompts that give way to one of so many tokens, the newest first: those that have told no token, have `LONGER` times
    as many left to compute, and were overtaken less than `MOST_OVERTAKEN` times. The first of several sequences keeps its place.

    >>> from types import SimpleNamespace as S
    >>> running = [S(uncomputed=n * 100, overtaken=0, may_wait_again=n != 3) for n in (5, 4, 3, 2, 1)]
    >>> [each.uncomputed for each in longer(running, 100)], len(longer(running[:1], 100))
    ([200, 400], 1)
    """
    return [
        each
        for each in reversed(running[1:] or running)
        if each.may_wait_again and each.uncomputed >= LONGER * tokens and each.overtaken < MOST_OVERTAKEN
    ]


def giving_way(running: Iterable[W], waiting: Iterable[W], most_of_tenant: int | None) -> list[W]:
    """Return the running sequences beyond their tenant's limit that give way, the newest first: one for each waiting sequence whose tenant
    is below the limit.

    >>> from types import SimpleNamespace as S
    >>> running = [S(tenant="a", arrived=float(n)) for n in range(4)]
    >>> [each.arrived for each in giving_way(running, [S(tenant="b")], most_of_tenant=2)]
    [3.0]
    """
    if most_of_tenant is None:
        return []
    counts = Counter(each.tenant for each in running)
    wanted = Counter(each.tenant for each in waiting)
    claims = sum(min(count, max(0, most_of_tenant - counts[tenant])) for tenant, count in wanted.items())
    chosen: list[W] = []
    for each in sorted(running, key=lambda sequence: sequence.arrived, reverse=True):
        if len(chosen) < claims and counts[each.tenant] > most_of_tenant:
            counts[each.tenant] -= 1
            chosen.append(each)
    return chosen


def by_fairness(waiting: Iterable[S], counters: Mapping[str, float]) -> Iterator[S]:
    """Order sequences by the virtual token counter: always the tenant that has got least, and of its sequences the first that came.

    >>> from types import SimpleNamespace as S
    >>> queue = [S(tenant="a", brought=5, name=1), S(tenant="a", brought=5, name=2), S(tenant="b", brought=1, name=3)]
    >>> [each.name for each in by_fairness(queue, {"a": 0.0, "b": 3.0})]
    [1, 3, 2]
    """
    queues: dict[str, list[S]] = {}
    for sequence in waiting:
        queues.setdefault(sequence.tenant, []).append(sequence)
    heap = [(counters.get(tenant, 0.0), number, iter(queue)) for number, (tenant, queue) in enumerate(queues.items())]
    heapq.heapify(heap)
    while heap:
        counter, number, queue = heapq.heappop(heap)
        for sequence in queue:
            yield sequence
            heapq.heappush(heap, (counter + INPUT_COST * sequence.brought, number, queue))
            break


def by_priority(order: Iterable[W]) -> Iterator[W]:
    """Order each tenant's sequences by priority, the lowest first. They share the places that the tenant has in this order, so nothing changes for others.

    >>> from types import SimpleNamespace as S
    >>> queue = [S(tenant="a", priority=0, name=1), S(tenant="b", priority=5, name=2), S(tenant="a", priority=-1, name=3)]
    >>> [each.name for each in by_priority(queue)]
    [3, 2, 1]
    """
    places = list(order)
    queues: dict[str, list[W]] = {}
    for sequence in places:
        queues.setdefault(sequence.tenant, []).append(sequence)
    urgent = {tenant: iter(sorted(queue, key=lambda each: each.priority)) for tenant, queue in queues.items()}
    return (next(urgent[place.tenant]) for place in places)


def lifted(counters: Mapping[str, float], tenant: str, active: Iterable[str]) -> float:
    """Return the counter of a tenant that comes, or comes back: no tenant saves up by staying away.

    >>> lifted({"a": 100.0, "b": 80.0, "c": 3.0}, "c", active=["a", "b"])
    80.0
    """
    own = counters.get(tenant, 0.0)
    return max(own, min((counters.get(other, 0.0) for other in active if other != tenant), default=own))


def shared(wanted: Mapping[str, int], most: int) -> dict[str, int]:
    """Share out so many rows: alike, and what some do not want goes to the others. Where there are too few, the first ones get them.

    >>> shared({"a": 1000, "b": 10, "c": 1000}, 100), shared({"a": 3, "b": 1, "c": 2}, 2)
    ({'a': 45, 'b': 10, 'c': 45}, {'a': 1, 'b': 1, 'c': 0})
    """
    parts = dict.fromkeys(wanted, 0)
    while most > 0 and (hungry := [whose for whose, rows in wanted.items() if parts[whose] < rows]):
        each = max(1, most // len(hungry))
        for whose in hungry:
            more = min(each, wanted[whose] - parts[whose], most)
            parts[whose] += more
            most -= more
    return parts


def prompt_rows(
    prompts: Sequence[P], most: int, piece: int, whose: Callable[[P], str], whole: bool = False
) -> dict[P, int]:
    """Return how many rows of which prompts a step computes.

    Those that end in this step are first, the shortest before the others, as long as none of them makes it more than twice as long. Of the
    rest, the one that came first gets a part of each step, so that it ends, too, however many shorter ones come.

    Args:
        prompts: In the order of their coming.
        most: Rows in all.
        piece: Rows in all if no prompt ends.
        whose: Who shares rows alike with others, but for the first of their prompts that are not worth cutting.
        whole: Each prompt is computed in one piece, and saves up for it.
    """
    if sum(each.uncomputed for each in prompts) <= min(piece, most):
        return {each: each.uncomputed for each in prompts}
    wanted = Counter[str]()
    for each in prompts:
        wanted[whose(each)] += each.uncomputed
    part = PART * min(2, len(wanted))
    rows = _ending(prompts, most if wanted.total() <= most else int(most / (1 + part)), piece, whose, wanted)
    firsts: dict[str, P] = {}
    for each in prompts:
        if each not in rows:
            firsts.setdefault(whose(each), each)
    if ending := sum(rows.values()):
        credit, room = part * ending / max(1, len(firsts)), most - ending
        for first in firsts.values():
            rows[first] = _paid(first, credit, room, whole)
            room -= rows[first]
        return rows
    for name, mine in shared(wanted, piece).items():
        first, shortest = firsts[name], min((p for p in prompts if whose(p) == name), key=lambda p: p.uncomputed)
        paid = 0 if first is shortest else _paid(first, mine * part / (1 + part), mine, whole)
        rows[first] = paid
        rows[shortest] = min(mine - paid, shortest.uncomputed)
        if whole:
            rows[shortest] = 0 if paid or not mine else shortest.uncomputed
    return rows


def _ending(
    prompts: Sequence[P], most: int, piece: int, whose: Callable[[P], str], wanted: Mapping[str, int]
) -> dict[P, int]:
    """Return the rows of the prompts that end in this step."""
    rows: dict[P, int] = {}
    left, served, room = shared(wanted, most), set[str](), most
    for each in sorted(prompts, key=lambda prompt: prompt.uncomputed):
        count, name = each.uncomputed, whose(each)
        if count > max(piece, SHORT, most - room):
            break
        if count <= room and (count <= left[name] or (count <= SHORT and name not in served)):
            rows[each] = count
            room -= count
            left[name] -= count
            served.add(name)
    return rows


def _paid(prompt: Prompt, credit: float, room: int, whole: bool) -> int:
    """Credit rows to a prompt, and return how many of those that it has by now it gets."""
    prompt.owed += credit
    count = min(int(prompt.owed), prompt.uncomputed, room)
    if whole:
        count = prompt.uncomputed if prompt.owed >= prompt.uncomputed else 0
    prompt.owed -= count
    return count


def draft_tokens(decoding: int, most: int) -> int:
    """Return how many draft tokens each of so many sequences has in a step: fewer where there are many, and none where their own tokens fill it.

    >>> [draft_tokens(decoding, 8) for decoding in (1, 2, 4, 8, 64)]
    [8, 7, 3, 1, 0]
    """
    return max(0, min(most, DRAFTED // decoding - 1))


def too_late(waiting: Iterable[W], now: float, first_token_s: float, takes_s: float) -> list[W]:
    """Return the sequences that would get their first token after the deadline even if they began now. What has begun is not aborted."""
    return [s for s in waiting if not s.has_begun and now + takes_s > s.arrived + first_token_s]


def by_deadline(waiting: Sequence[W], arrivals: float, begun: float) -> Iterable[W]:
    """Order sequences first come, first served while the server keeps up, and the newest first while more requests come in a second than
    begin.

    Then some miss the deadline in any case, and a server that takes the oldest first serves every one of them just too late.
    """
    return reversed(waiting) if arrivals > begun else waiting


def newest(running: Sequence[W]) -> W:
    """Return the sequence that gives up its memory when none is left: the one that came last, so that the first one always ends."""
    position = count()
    return max(running, key=lambda sequence: (sequence.arrived, next(position)))


@dataclass(frozen=True, slots=True)
class Rate:
    """Events a second, of which the recent ones count most.

    >>> rate = Rate(over_s=10.0)
    >>> for second in range(60):
    ...     rate = rate.after(float(second), events=5)
    >>> round(rate.at(60.0))
    5
    """

    over_s: float
    value: float = 0.0
    since: float | None = None

    def at(self, now: float) -> float:
        return self.value if self.since is None else self.value * math.exp((self.since - now) / self.over_s)

    def after(self, now: float, events: int = 1) -> "Rate":
        return Rate(self.over_s, self.at(now) + events / self.over_s, now)


@dataclass(frozen=True, slots=True)
class Mean:
    """A moving average, in which a new value counts a tenth.

    >>> Mean().after(2.0).after(3.0)
    Mean(value=2.1, is_known=True)
    """

    value: float = 0.0
    is_known: bool = False

    def after(self, value: float) -> "Mean":
        return Mean(self.value + (value - self.value) / 10 if self.is_known else value, True)
