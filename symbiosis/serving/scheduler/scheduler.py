"""Continuous batching: which sequences join and leave, and what each computes in the next step. It is plain Python; policies decide about
the order.

A sequence waits, runs, and is gone. It joins as soon as there is room for its adapter and its tokens. When no room is left for the next
token of a sequence, the newest one gives up its blocks and waits again. The tokens that it has chosen so far then belong to its prompt.

A waiting prompt for which there is no place, or are no pages, gets those of running prompts that have told no token and have at least twice
as many tokens left, the newest first. Each of these waits in its old turn again, and finds what it had computed unless its pages were needed.
A sequence is overtaken by `MOST_OVERTAKEN` others at most, whether it gives way or waits: then nobody passes it, and it keeps its place.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from heapq import nsmallest
from itertools import islice
from operator import attrgetter
from typing import Any, Protocol

from symbiosis.serving.kv_cache.block_manager import BlockManager
from symbiosis.serving.lora.adapter import Adapter
from symbiosis.serving.scheduler import policy
from symbiosis.serving.scheduler.pace import Pace
from symbiosis.serving.scheduler.scheduler_output import BLOCK, ScheduledRequest, SchedulerOutput, Sequence
from symbiosis.serving.serve_options import Policy
from symbiosis.serving.speculation.speculation import Speculation

PREFETCHED = 4  # adapters of the queue that are brought before their turn
UNKNOWN = 0  # stands for a token that is on its way
ORDER = attrgetter("order")


class ResidentAdapters(Protocol):
    """Which adapters are on the device, as far as a scheduler asks."""

    def is_here(self, adapter: Any) -> bool: ...
    def pages_of(self, adapter: Any) -> int: ...
    def fetch(self, adapter: Any) -> bool: ...
    def prefetch(self, adapters: Iterable[Any]) -> int: ...
    def pin(self, adapter: Any) -> None: ...
    def unpin(self, adapter: Any) -> None: ...
    def make_room(self, pages: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class StepRules:
    """What a step may hold, and which sequences come first."""

    max_batch: int = 64  # sequences
    adapters_in_batch: int | None = None
    prefill_tokens: int = 512  # rows of prompts at most, beside all decoding sequences
    whole_prompts: bool = False  # each prompt in one piece
    policy: Policy = "fcfs"
    first_token_s: float = 6.0  # the deadline of `abort`
    of_tenant: int | None = None  # sequences of one tenant that run together while others wait


@dataclass(slots=True)
class Counts:
    """What has happened so far."""

    evictions: int = 0
    asked: int = 0  # tokens of prompts
    found: int = 0  # tokens of prompts whose keys and values were there


class Unsettled(Exception):
    """A sequence would have to give way while a step computes its next token."""


class Scheduler:
    """The scheduler of one engine. Only the engine's thread calls it.

    Args:
        release: Called with each sequence that leaves the batch, to free its blocks.
        speculation: Drafts tokens for sequences that decode.
    """

    def __init__(
        self,
        blocks: BlockManager,
        residency: ResidentAdapters | None = None,
        rules: StepRules | None = None,
        release: Callable[[Sequence], None] | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self._speculation = speculation
        self.rules, self.counts = rules or StepRules(), Counts()
        # how many tokens of a prompt are computed at a time at most; None if all are
        self.piece = None if self.rules.whole_prompts else self.rules.prefill_tokens
        self._pace, self._advanced = Pace(self.rules.prefill_tokens), 0.0
        self.waiting: list[Sequence] = []  # both in the order of their coming
        self.running: list[Sequence] = []
        self._of_request: dict[int, list[Sequence]] = {}  # those that wait or run
        self._of_tenant = Counter[str]()  # how many of each wait or run; tenants without any are not in it
        self._blocks, self._residency, self._release = blocks, residency, release or blocks.release
        self._followers: dict[Sequence, list[Sequence]] = {}  # wait until the prompt that they share is computed
        self._counters: dict[str, float] = {}  # the tokens of each tenant, weighted
        self._arrivals = self._begun = policy.Rate(self.rules.first_token_s)
        self._takes = policy.Mean()  # seconds from joining to the first token
        self._untried: set[Sequence] = set()  # those that have come since any could join
        self._something_changed = False  # so that a sequence may be able to join
        self._is_ahead = False
        self._with_priority = 0  # how many of those that wait or run have another priority than 0

    def add(self, sequences: list[Sequence]) -> None:
        """Add the completions of one request. The first one computes the prompt, and the others find it."""
        first, *others = sequences
        if self.rules.policy == "vtc" and first.tenant not in self._of_tenant:
            self._counters[first.tenant] = policy.lifted(self._counters, first.tenant, self._of_tenant)
        # what has begun elsewhere counts neither as coming nor as begun
        if self.rules.policy == "abort" and not first.has_begun:
            self._arrivals = self._arrivals.after(first.arrived)
        if self.waiting or any(each.uncomputed > 1 for each in self.running):
            self._pace.disturbed(first.arrived)
        self._of_request[first.request.id] = list(sequences)
        self._of_tenant[first.tenant] += len(sequences)
        self._with_priority += len(sequences) if first.priority else 0
        self._wait(first)
        if others:
            self._followers[first] = others

    def drop(self, request: int) -> None:
        """Drop a whole request at once."""
        for sequence in list(self._of_request.get(request, ())):
            self.finish(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Count a sequence no more. What one request or tenant costs does not grow with what others have waiting."""
        mine, tenant = self._of_request.get(sequence.request.id, []), sequence.tenant
        if sequence not in mine:
            return
        sequence.has_ended = True
        mine.remove(sequence)
        if not mine:
            del self._of_request[sequence.request.id]
        self._of_tenant[tenant] -= 1
        self._with_priority -= sequence.priority != 0
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant]
        self._followers.pop(sequence, None)
        self._untried.discard(sequence)
        self._something_changed = True
        if sequence in self.running:
            self._leave(sequence)
        else:
            at = bisect_left(self.waiting, sequence.order, key=ORDER)
            if self.waiting[at : at + 1] == [sequence]:  # else it waits for the prompt that it shares
                del self.waiting[at]

    def late(self, now: float) -> list[Sequence]:
        """Return the waiting sequences that can no longer have their first token in time, if the policy gives those up.

        How long first tokens have taken counts only for those that found no room. A sequence for which there is room begins, and that
        is how the server learns that first tokens come sooner again.
        """
        if self.rules.policy != "abort":
            return []
        waiting = [each for each in self.waiting if not each.began]  # what has given way is not given up
        tried = [each for each in waiting if each not in self._untried]
        untried = [each for each in waiting if each in self._untried]
        within = self.rules.first_token_s
        return policy.too_late(tried, now, within, self._takes.value) + policy.too_late(untried, now, within, 0.0)

    def next_step(self, now: float, is_ahead: bool = False) -> SchedulerOutput | None:
        """Return what to compute now, or None if there is nothing.

        Args:
            is_ahead: The step before is under way: it was launched, and is not advanced. Raises `Unsettled` if that must come first.
        """
        self._is_ahead = is_ahead
        if self.waiting and self._something_changed:
            self._something_changed = False
            self._join(now)
            if self.waiting:
                self._make_way(now)
            if self.waiting:
                self._prefetch(now)
        return self._compose(now)

    def begin_anew(self) -> None:
        """Have all sequences wait again, because what was computed of them is lost. No step is under way."""
        self._is_ahead = False
        for sequence in reversed(self.running.copy()):
            self._evict(sequence)

    def gives_way(self, step: SchedulerOutput, now: float, coming: int) -> bool:
        """Whether a step that is being computed should be composed anew, since a prompt of so many tokens has come, and can join."""
        longer = policy.longer(self.running, coming)
        if len(self.running) - len(longer) >= self.rules.max_batch:
            return False
        if self._blocks.needed(coming) > self._blocks.spare() + self._blocks.held_by(longer):
            return False
        return self._pace.gives_way(step.rows, step.began, now, coming)

    def launched(self, step: SchedulerOutput) -> dict[Sequence, int]:
        """Note that the keys and values of a step are about to be computed, before those of any later step. Each sequence that chooses is
        then longer by a token, whatever it will be, and by its draft tokens: return where in its tokens these come."""
        places = {}
        for segment in step.segments:
            segment.sequence.computed = segment.end
            if segment.chooses:
                places[segment.sequence] = len(segment.sequence.tokens)
                segment.sequence.tokens += (*segment.drafts, UNKNOWN)
        return places

    def choose(self, segment: ScheduledRequest, place: int, tokens: list[int]) -> None:
        """Note which tokens a segment has chosen, at this place. What was computed for draft tokens that were not chosen is given up, with its
        pages."""
        sequence = segment.sequence
        sequence.tokens[place : place + 1 + len(segment.drafts)] = tokens
        if segment.drafts and self._speculation is not None:
            sequence.computed -= 1 + len(segment.drafts) - len(tokens)
            self._blocks.shrink(sequence)
            self._speculation.learn(sequence, len(segment.drafts), len(tokens) - 1)

    def advance(self, step: SchedulerOutput, now: float) -> None:
        """Note that a step was computed. All its tokens are known now."""
        if step.has_prompts:
            self._pace.computed(step.rows, now - max(step.began, self._advanced))
        self._advanced = now
        running = set(self.running)
        for segment in step.segments:
            if (sequence := segment.sequence) not in running:
                continue
            self._blocks.keep(sequence)
            if segment.chooses:
                if self.rules.policy == "vtc":
                    chosen = sequence.computed - segment.position if segment.drafts else 1
                    self._counters[sequence.tenant] += policy.OUTPUT_COST * chosen
                if segment.end == sequence.prompt_length and sequence.is_first:
                    self._takes = self._takes.after(now - sequence.began)
            if segment.end >= sequence.prompt_length:
                for follower in self._followers.pop(sequence, ()):
                    self._wait(follower)

    def _wait(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=ORDER)
        if self._with_priority:
            # places are exchanged for good: one that was only lent would be its tenant's again and again
            orders = [each.order for each in self.waiting]
            self.waiting = list(policy.by_priority(self.waiting))
            for each, order in zip(self.waiting, orders, strict=True):
                each.order = order
        self._untried.add(sequence)
        self._something_changed = True

    def _make_way(self, now: float) -> None:
        """Let others give way to what still waits: of a tenant that was alone what is beyond its share, and long prompts for short ones."""
        for sequence in policy.giving_way(self.running, self.waiting, self.rules.of_tenant):
            self._evict(sequence)
        if self._something_changed:
            self._join(now)
        prompts = [each for each in self.waiting if not each.has_begun] if policy.longer(self.running, 1) else []
        for sequence in nsmallest(policy.LOOKAHEAD, prompts, key=lambda each: each.uncomputed):
            if not (longer := policy.longer(self.running, sequence.uncomputed)):
                break
            self._overtake(longer, sequence, now)

    def _join(self, now: float) -> None:
        batch = self._batch(self.running, several={each.tenant for each in self.waiting})
        joined = set(policy.admit(self._order(now), batch, partial(self._start, now=now)))
        self.waiting = [each for each in self.waiting if each not in joined]
        self._untried.clear()

    def _batch(self, running: Collection[Sequence], several: Collection[str]) -> policy.StepBatch:
        """Return the batch of these, in which a tenant has a limit if there are several."""
        rules, of_tenant = self.rules, self.rules.of_tenant if len(several) > 1 else None
        versions = {each.version for each in running} - {0}
        tenants = Counter(each.tenant for each in running)
        return policy.StepBatch(len(running), rules.max_batch, versions, rules.adapters_in_batch, tenants, of_tenant)

    def _overtake(self, longer: list[Sequence], sequence: Sequence, now: float) -> None:
        """Let a waiting sequence run in the place of as few of these as can be."""
        passed = self.waiting[: bisect_left(self.waiting, sequence.order, key=ORDER)]
        if any(each.overtaken >= policy.MOST_OVERTAKEN for each in passed):
            return
        if not self._batch(self.running, self._of_tenant).may_take(0, sequence.tenant):
            longer = [each for each in longer if each.tenant == sequence.tenant]
        longer = [each for each in longer if each.tenant != sequence.tenant or each.priority >= sequence.priority]
        if not self._has_room_without(longer, sequence):
            return
        counts = range(len(longer) + 1)
        fewest = bisect_left(counts, True, key=lambda count: self._has_room_without(longer[:count], sequence))
        for each in longer[:fewest]:
            self._evict(each)
            each.overtaken += 1
        if self._start(sequence, now):
            self.waiting.remove(sequence)
            for each in passed:
                each.overtaken += 1

    def _has_room_without(self, others: list[Sequence], sequence: Sequence) -> bool:
        """Whether a sequence has a place and pages when these do not run."""
        batch = self._batch([each for each in self.running if each not in others], self._of_tenant)
        pages = self._blocks.needed(len(sequence.tokens)) + batch.sequences * self._blocks.layers
        if self._residency is not None and sequence.adapter is not None and not self._is_here(sequence.adapter):
            pages += self._residency.pages_of(sequence.adapter)
        has_place = batch.sequences < batch.most_sequences and batch.may_take(sequence.version, sequence.tenant)
        return has_place and pages <= self._blocks.spare() + self._blocks.held_by(others)

    def _prefetch(self, now: float) -> None:
        """Bring adapters of the sequences that are next to the device if nothing else needs the room; each only once, so that they do not come and
        go at every step."""
        if self._residency is not None:
            soon = [each.adapter for each in islice(self._order(now), PREFETCHED) if each.adapter]
            self._residency.prefetch(soon)

    def _order(self, now: float) -> Iterable[Sequence]:
        waiting = list(self.waiting)
        if self.rules.policy == "vtc":
            return policy.by_fairness(waiting, self._counters)
        if self.rules.policy == "abort":
            given_way, new = [each for each in waiting if each.began], [each for each in waiting if not each.began]
            by_deadline = policy.by_deadline(new, self._arrivals.at(now), self._begun.at(now))
            return [*given_way, *policy.by_priority(by_deadline)]
        return waiting

    def _start(self, sequence: Sequence, now: float) -> bool:
        """Let a sequence run if there is room for its adapter, for all its tokens, and for one more block for each sequence that runs
        already. Its adapter is brought only if there is room for the tokens, too. A text that is longer than the memory needs room for what
        its windows show at once."""
        adapter, pages, to_fetch = sequence.adapter, 0, False
        if adapter is not None and self._residency is not None:
            pages, to_fetch = self._residency.pages_of(adapter), not self._is_here(adapter)
            if not to_fetch:
                self._residency.pin(adapter)
        if not sequence.reads_prompt:
            self._blocks.find(sequence)
        upto, held = len(sequence.tokens), len(sequence.blocks) * self._blocks.layers
        wanted = self._blocks.needed(upto)
        if wanted + pages > self._blocks.pool.total and self.piece is not None:
            wanted = max(held, self._blocks.needed(upto, self.piece))
            upto = min(upto, sequence.computed + self.piece)
        wanted += len(self.running) * self._blocks.layers - held + (pages if to_fetch else 0)
        has_room = wanted <= self._blocks.spare() or self._find_room(wanted)
        if not has_room or (to_fetch and not self._fetch(sequence)):
            self._leave(sequence, is_pinned=not to_fetch)
            return False
        if not self._blocks.grow(sequence, upto):
            self._leave(sequence)
            return False
        insort(self.running, sequence, key=ORDER)
        if not sequence.began:
            if self.rules.policy == "abort" and not sequence.has_begun:
                self._begun = self._begun.after(now)
            if self.rules.policy == "vtc":
                rows = sequence.brought - (0 if sequence.is_first else sequence.prompt_length)
                self._counters[sequence.tenant] += policy.INPUT_COST * rows
            sequence.began, sequence.cached = now, sequence.computed
            self.counts.asked += sequence.prompt_length
            self.counts.found += sequence.computed
        return True

    def _fetch(self, sequence: Sequence) -> bool:
        if self._residency is None or not self._residency.fetch(sequence.adapter):
            return False
        self._residency.pin(sequence.adapter)
        return True

    def _compose(self, now: float) -> SchedulerOutput | None:
        """Compose a step: one row of each sequence that decodes, and of prompts what the policy says. The oldest sequence gets room first, and
        the newest loses it first."""
        here = [
            each
            for each in self.running
            if each.uncomputed  # else the step under way has the rest of a text of which a vector is made
            and each.produced < max(1, each.request.sampling.max_tokens)  # else its last token is chosen already
            and (each.adapter is None or self._is_here(each.adapter))
        ]
        prompts = [each for each in here if each.uncomputed > 1]
        wanted: dict[Sequence, int] = {}
        if prompts:
            rows, piece = self.rules.prefill_tokens, self._pace.piece(now, beside=len(prompts) < len(here))
            wanted = policy.prompt_rows(prompts, rows, piece, self._sharer, self.rules.whole_prompts)
        parts: list[tuple[Sequence, int]] = []
        for sequence in here:
            count = wanted.get(sequence, 0) if sequence.uncomputed > 1 else 1
            upto = sequence.computed + count
            if count and (upto <= len(sequence.blocks) * BLOCK or self._has_room(sequence, upto)):
                parts.append((sequence, count))
        drafts = {} if self._speculation is None else self._drafts(self._speculation, [each for each, _ in parts])
        segments: list[ScheduledRequest] = []
        first = 0
        for sequence, count in sorted(parts, key=lambda part: part[0].version):
            is_last = sequence.computed + count == len(sequence.tokens)
            chooses, drafted = is_last and sequence.request.pooling is None, drafts.get(sequence, ())
            count += len(drafted)
            segments.append(ScheduledRequest(sequence, first, count, sequence.computed, chooses, drafted))
            first += count
        return SchedulerOutput(tuple(segments), began=now) if segments else None

    def _drafts(self, speculation: Speculation, running: list[Sequence]) -> dict[Sequence, tuple[int, ...]]:
        """Return the draft tokens of those of these sequences that decode, as far as there are places for them, and pages that no sequence needs for
        its next token."""
        decoding = [each for each in running if each.uncomputed == 1 and len(each.tokens) > each.brought]
        if not decoding:
            return {}
        drafts = speculation.drafts(decoding, policy.draft_tokens(len(decoding), speculation.most))
        for sequence, drafted in drafts.items():
            upto = len(sequence.tokens) + len(drafted)
            more = self._blocks.needed(upto) - len(sequence.blocks) * self._blocks.layers
            if more > 0 and more + len(self.running) * self._blocks.layers <= self._blocks.spare():
                self._blocks.grow(sequence, upto)
            drafts[sequence] = drafted[: len(sequence.blocks) * BLOCK - len(sequence.tokens)]
        return drafts

    def _sharer(self, sequence: Sequence) -> str:
        """Who shares a step's rows of prompts alike with others: tenants, if the policy is fair."""
        return sequence.tenant if self.rules.policy == "vtc" else ""

    def _is_here(self, adapter: Adapter) -> bool:
        return self._residency is None or self._residency.is_here(adapter)

    def _has_room(self, sequence: Sequence, upto: int) -> bool:
        """Whether there is room for a sequence's first `upto` tokens. The newest sequences are evicted for it. It may itself be the
        newest, or evicted already."""
        while sequence in self.running:
            wanted = self._blocks.needed(upto) - len(sequence.blocks) * self._blocks.layers
            if wanted <= self._blocks.spare() or self._find_room(wanted):
                return self._blocks.grow(sequence, upto)
            self._evict(policy.newest(self.running))
        return False

    def _evict(self, sequence: Sequence) -> None:
        if self._is_ahead:
            self._something_changed = True
            raise Unsettled
        self._leave(sequence)
        self._wait(sequence)
        self.counts.evictions += 1

    def _find_room(self, pages: int) -> bool:
        """Find pages for `BlockManager.grow` where it has not so many: those behind windows, and of adapters that nothing uses now. Return
        whether there are enough."""
        self._blocks.trim(self.running)
        spare = self._blocks.spare()
        if pages > spare and self._residency is not None:
            self._residency.make_room(self._blocks.pool.free + pages - spare)
        return pages <= self._blocks.spare()

    def _leave(self, sequence: Sequence, is_pinned: bool = True) -> None:
        """Take back what a sequence holds, be it that it runs or that it cannot begin."""
        if sequence in self.running:
            self.running.remove(sequence)
        self._release(sequence)
        if self._speculation is not None:
            self._speculation.forget(sequence)
        if is_pinned and sequence.adapter is not None and self._residency is not None:
            self._residency.unpin(sequence.adapter)
