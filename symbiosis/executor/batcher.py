"""Which calls run next, and together: plain Python over plain data, no torch, no clock of its own.

Calls wait in one queue per key (layer, op, dtype, ...); those of one key may run as one product. The policy says when a
queue is ready:

* `immediate`      every call by itself, at once;
* `lockstep`       when every active session waits for an answer: one that had an answer within the last `idle_s`;
* `opportunistic`  when waiting longer would not pay. It pays to wait for sessions whose rhythm says that their next call is
                   this one, as long as the products that joining saves outweigh the time until they come, and within the
                   provider's budget.

Among ready queues, priority goes first, but not being served raises it (`AGING_S`), and within one priority the sessions that
have used the least of the executor, in steps of `SLACK_S`. So a session can delay another by one slice of `max_rows`, never
starve it. Among equals, those are served first who are furthest behind in the round of calls that models make again and
again: so they catch up with the others, and go on together with them.

Where keys tell who is who, the same goes for tenants first: whose turn it is among them does not depend on how many sessions
each has, nor on how urgent they say that they are. A tenant (without keys: a session) that makes short calls waits for no
other's long one: those run in slices of rows, and products that are still too long in turns, which take no longer than its
own calls, or about `SLICE_S`. Between two turns of a product others run.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from math import inf
from typing import Any, NamedTuple

from symbiosis.config import Policy
from symbiosis.executor.batch import Batch, Item, Queue, Slice
from symbiosis.executor.rhythm import ACTIVE_S, Due, Habits, Rhythm, Share, note, smooth

AGING_S = 0.05  # a call gains one step of priority per this time in which its session is not served
JOIN_BELOW = 256  # rows from which a product is bound by arithmetic: joining two gains nothing and costs copies
SLACK_S = 0.05  # of use more than others that a session may have before it must let them go first
ALONE_S = 0.1  # after this time in which nobody else called, a session is alone
CREDIT_S = 0.1  # of use that a tenant saves up while it does not call
SLICE_S = 2e-3  # of a product that another tenant waits for
TOGETHER = 8  # calls of one tenant in one product that another tenant may wait for
LONG = 2.0  # of a turn, from which a product is cut
USUAL_S = 4e-10  # a multiplication takes, until it is known
READING = 8  # rows take as long to multiply as their matrix to read
WORTH_LEARNING = 1 << 20  # multiplications of a product that shows how long one takes
ROUND_WORTH = 0.5  # of what a round takes, its client's own share included, that another one less would save
SMALLEST_SLICE = 64  # rows: products of fewer cost more for each row


class Awaited(NamedTuple):
    """A queue is worth waiting for until it holds so many calls, if there is no other and it did not begin before `since`."""

    key: Hashable
    calls: int
    until: float
    since: float = -inf


class Batcher:
    """Queues, and the policy over them.

    >>> batcher = Batcher("immediate")
    >>> batcher.join(7)
    >>> batcher.add(Item(session=7, key=("layer", 0), rows=3, priority=0, arrived=0.0))
    >>> [piece.stop for piece in batcher.next_batch(now=0.0).slices]
    [3]
    """

    def __init__(
        self,
        policy: Policy,
        max_wait: float = 0.0,
        max_rows: int = 4096,
        idle_s: float = inf,
        invariant: bool = False,
        spread: float = 1.0,
        patience: float = 1.5,
    ) -> None:
        """`invariant`: what runs together, and how calls are cut, never depends on other sessions. `spread`: those who go together
        are waited for from the first to the last, for as long as so many products take. `patience`: who is late is, for so many times
        its usual pause."""
        if invariant:
            policy = "immediate"
        self._invariant = invariant
        self.policy, self.max_wait, self.max_rows, self.idle_s = policy, max_wait, max_rows, idle_s
        self.join_below = JOIN_BELOW
        self._queues: dict[Hashable, Queue] = {}
        self._sessions: dict[int, Rhythm] = {}
        self._habits: dict[str | None, Habits] = {}  # by tenant
        self._live: dict[int, Rhythm] = {}  # those that have made calls which others can join
        self._cost: dict[Hashable, float] = {}
        self._calls: dict[Hashable, int] = {}  # that an item of the key stands for, if several
        self._least_used = self._least_share = 0.0
        self._shares: dict[str, Share] = {}
        self._per_row: dict[Hashable, float] = {}  # seconds in products of many rows
        self._per_value: dict[Hashable, float] = {}  # ... and for a multiplication of what does not go by rows
        self._usual = USUAL_S
        self._begun: list[Batch] = []  # that have had a turn, and not the last
        self._wake = inf
        self._looked = -inf  # for silent sessions
        self._awaited: Awaited | None = None
        self._caller, self._since = 0, 0.0  # who called last, and since when nobody else
        self._alone_s = max(ALONE_S, idle_s) if policy == "lockstep" else ALONE_S
        self._spread, self._patience = spread, patience
        self.price = 1.0  # what a product costs all together, in its own times

    def __len__(self) -> int:
        return sum(map(len, list(self._queues.values()))) + len(self._begun)  # a copy: other threads ask, too

    @property
    def idle(self) -> bool:
        """Whether no call waits."""
        return not self._queues and not self._begun

    def alone(self, session: int, now: float) -> bool:
        """Whether a call of this session, which need not be added then, can meet no other: nobody else called lately."""
        if session != self._caller:
            self._caller, self._since = session, now
        if not self.idle or (self.policy != "immediate" and now - self._since < self._alone_s):
            return False
        self.unseen(session)
        return True

    def unseen(self, session: int) -> None:
        """A call of this session runs that is not added: what it makes next is no sign of how long it thinks."""
        self._sessions[session].last_key = None

    def away(self, session: int) -> None:
        """... and nobody need wait for it."""
        self.unseen(session)
        if self._live.pop(session, None):
            self._awaited = None

    def join(self, session: int, tenant: str | None = None, watches: bool = False) -> None:
        """`watches`: it makes no calls that others could join, or would have to wait for."""
        share = Share() if tenant is None else self._shares.setdefault(tenant, Share(tenant, self._least_share))
        habits = self._habits.setdefault(tenant, Habits())
        self._sessions[session] = Rhythm(
            share, habits, self._patience, self.max_wait, self._calls, watches, used=self._least_used
        )

    def leave(self, session: int) -> list[Item]:
        """Forget a session; what it still waited for is dropped and returned."""
        rhythm = self._sessions.pop(session, None)
        self._live.pop(session, None)
        if rhythm is None:
            return []
        self._habits[rhythm.share.tenant].adopt(rhythm)
        self._awaited = None
        for item in rhythm.pending:
            self._remove(item)
        self._begun = [batch for batch in self._begun if batch.slices[0].item.session != session]
        return rhythm.pending

    def add(self, item: Item) -> None:
        rhythm = self._sessions[item.session]
        if not rhythm.watches:
            rhythm.share.calls_now(self._foretold(item, item.rows), item.arrived)
        if item.calls > 1:
            note(self._calls, item.key, item.calls)
        if not rhythm.pending:
            rhythm.share.used = max(rhythm.share.used, self._least_share - CREDIT_S)
            rhythm.used = max(rhythm.used, self._least_used)  # idleness earns no credit
            if item.joinable:
                rhythm.learn(item.key, item.arrived, self._cost.get(item.key, 0.0))
                self._live[item.session] = rhythm
        rhythm.pending.append(item)
        item.whole = item.joinable and item.rows < self.join_below
        queue = self._queues.get(item.key)
        if queue is None:
            queue = self._queues[item.key] = Queue()
        queue.put(item)

    def next_batch(self, now: float) -> Batch | None:
        """The batch to run now; None if there is none before `wake_at()` or the next `add`."""
        queues, room = self._ready(now) if self._queues else ([], {})
        if not queues and not self._begun:
            return None
        item = self._first(queues, room, now)
        for batch in self._begun:
            if batch.slices[0].item is item:
                return self._go_on(batch, now)
        return self._take(item, now)

    def _ready(self, now: float) -> tuple[list[Queue], dict[Hashable, int]]:
        """The queues that need not wait any more, and of each call that a session is at, how far the next one is behind."""
        room: dict[Hashable, int] = {}
        if self._still_waits(now):
            return [], room
        self._wake, self._awaited = inf, None
        queues = list(self._queues.values())
        if self.policy == "lockstep":
            if not self._all_wait(now):
                return [queue for queue in queues if self._sessions[queue[0].session].watches], room
            room = self._room_behind(queues[0][0]) if len(queues) > 1 else room
        if self.policy == "opportunistic" and not self._all_here(queues):
            due = self._due(now)
            queues = [queue for queue in queues if self._is_ready(queue, due.get(queue[0].key), now)]
            if queues:
                room = self._room_behind(queues[0][0])
                queues = self._without_leaders(queues, room, now)
        return queues, room

    def wake_at(self) -> float:
        """When the last `next_batch` wants to be asked again; infinity if only an arrival can change its answer."""
        return self._wake if self._queues else inf

    @property
    def awaited(self) -> Awaited | None:
        """What was foreseen when the last product began, as long as no call waits."""
        return self._awaited if not self._queues and self.policy == "opportunistic" else None

    def budget(self, key: Hashable) -> float:
        """How long a call of the key may wait for others."""
        return self.max_wait * self._calls.get(key, 1)

    def lives(self, session: int) -> bool:
        """Whether it is one of those that are foreseen."""
        return session in self._live

    def went(
        self, key: Hashable, calls: Sequence[tuple[int, float, int]], formed: float, seconds: float, now: float
    ) -> None:
        """The calls that were awaited, each a session, when it came, and its rows, were never added and run by themselves as
        one product."""
        rows = sum(rows for _, _, rows in calls)
        cost = self._learn_cost(key, rows, seconds)
        self._caller = 0  # nobody is alone
        for session, arrived, own in calls:
            rhythm = self._sessions[session]
            rhythm.used = max(rhythm.used, self._least_used)
            rhythm.learn(key, arrived, cost)
            rhythm.share.called, rhythm.served, rhythm.share.served = arrived, formed, formed
            rhythm.used += seconds * own / rows
            rhythm.share.used += seconds * own / rows
            rhythm.last_key, rhythm.replied = key, now
        self._least_used = max(self._least_used, min(self._sessions[session].used for session, _, _ in calls))
        self._foresee(now)

    def expected(self, batch: Batch) -> float:
        """The seconds that this turn of a batch will take, as far as is known; what a product of few rows takes besides is not counted."""
        whole = self._per_row.get(batch.key, 0.0) * batch.rows + self._per_value.get(batch.key, 0.0) * batch.price
        return whole * (batch.last - batch.first) / batch.cells

    def done(self, batch: Batch, seconds: float, now: float) -> None:
        """A turn of a batch has run, and its replies, if there are any, are out."""
        rows = batch.rows
        share = seconds / max(1, rows)
        batch.seconds += seconds
        if batch.ends:
            self._learn(batch)
        elif batch.slices[0].item.session in self._sessions:
            self._begun.append(batch)
        for item, start, stop in batch.slices:
            rhythm = self._sessions.get(item.session)
            if rhythm is None:
                continue
            rhythm.used += share * (stop - start)
            rhythm.share.used += share * (stop - start)
            if batch.ends and item.finished:
                rhythm.pending.remove(item)
                if item.joinable:  # what is only asked now and then has no rhythm, and keeps nobody active
                    rhythm.last_key, rhythm.replied = item.key, now
                    coming = rhythm.pending[0].key if rhythm.pending else item.key
                    rhythm.arrive_at(coming, self._cost.get(coming, 0.0))
        if self.idle:
            self._foresee(now)

    def took(self, key: Hashable, seconds: float) -> None:
        """What an item of several calls took, from the first to the last: that is what it costs, beside the others' as it runs."""
        note(self._cost, key, smooth(self._cost.get(key), seconds))

    def _learn(self, batch: Batch) -> None:
        """What a product takes, and what others of its kind will."""
        goes_by_rows = batch.slices[0].item.divisible
        self._learn_cost(batch.key, batch.rows if goes_by_rows else 0, batch.seconds)
        if batch.rows < SMALLEST_SLICE and goes_by_rows:
            return
        price = batch.price
        if price >= WORTH_LEARNING:
            self._usual = smooth(self._usual, batch.seconds / price)
            if not goes_by_rows:
                note(self._per_value, batch.key, smooth(self._per_value.get(batch.key), batch.seconds / price))

    def _learn_cost(self, key: Hashable, rows: int, seconds: float) -> float:
        """What a product of the key costs, as far as is known now."""
        if key in self._calls:
            return self._cost.get(key, seconds)
        if rows >= SMALLEST_SLICE:
            note(self._per_row, key, smooth(self._per_row.get(key), seconds / rows))
        cost = smooth(self._cost.get(key), seconds)
        note(self._cost, key, cost)
        return cost

    def _cost_of(self, key: Hashable) -> float:
        """What one product less would save."""
        worth = ROUND_WORTH if key in self._calls else self.price
        return worth * self._cost.get(key, 0.0)

    def _forget_silent(self, now: float) -> None:
        """Who has long not called, and is not expected to, is not live until the next call."""
        self._looked = now
        for session, rhythm in list(self._live.items()):
            latest = rhythm.due(now).latest if rhythm.next is not None else rhythm.replied
            if not rhythm.pending and now > max(rhythm.replied + ALONE_S, latest):
                del self._live[session]

    def _all_wait(self, now: float) -> bool:
        """Whether every session waits for an answer but those that have long been idle."""
        idle_at = [
            rhythm.replied + self.idle_s for rhythm in self._sessions.values() if rhythm.active and not rhythm.pending
        ]
        waited_for = [at for at in idle_at if now < at]
        self._wake = max(waited_for, default=inf)
        return not waited_for

    def _still_waits(self, now: float) -> bool:
        """Whether the calls that are worth waiting for have not come, and no others either."""
        if self._awaited is None or len(self._queues) > 1 or self.policy != "opportunistic":
            return False
        key, calls, until, since = self._awaited
        queue = self._queues.get(key)
        if queue is None or queue.apart or queue.rows >= self.join_below or len(queue) >= calls:
            return False
        if queue[0].arrived < since:
            return False
        self._wake = min(until, queue[0].arrived + self.budget(key))
        return now < self._wake

    def _foresee(self, now: float) -> None:
        """Decide before they come, while a product runs, whether to wait for all who live: if they go on together, and the last
        is expected soon after the first."""
        self._awaited = None
        if now > self._looked + ALONE_S:
            self._forget_silent(now)
        if self.policy != "opportunistic" or len(self._live) < 2:
            return
        live = self._live.values()
        key = next(iter(live)).next
        if key is None or any(rhythm.next != key or rhythm.pending for rhythm in live):
            return
        coming = [rhythm.due(now) for rhythm in live]
        first, last = min(coming).expected, max(coming).expected
        spread = 1.0 if key in self._calls else self._spread  # what a round takes was measured beside the others
        worth = min(spread * self._cost_of(key), self.budget(key))
        if last - first < worth:
            self._awaited = Awaited(key, len(coming), max(due.latest for due in coming), last - worth)

    def _all_here(self, queues: list[Queue]) -> bool:
        """Whether there is nobody else to wait for."""
        return len(queues) == 1 and len(queues[0]) >= len(self._live)

    def _due(self, now: float) -> dict[Hashable, list[Due]]:
        """By key of those that wait: the sessions whose next call (or next but one) it is."""
        table: dict[Hashable, list[Due]] = {}
        for rhythm in self._live.values():
            if rhythm.next in self._queues and rhythm.comes and now < (due := rhythm.due(now)).latest:
                table.setdefault(rhythm.next, []).append(due)
        return table

    def _is_ready(self, queue: Queue, coming: list[Due] | None, now: float) -> bool:
        """Whether no call that is `coming` to the queue is worth waiting for."""
        head = queue[0]
        deadline = head.arrived + self.budget(head.key)
        if not coming or now >= deadline or not head.joinable or queue.rows >= self.join_below:
            return True
        calls, wake = _worth_waiting(sorted(coming), self._cost_of(head.key), now, deadline)
        if not calls:
            return True
        self._wake = min(self._wake, wake)
        self._awaited = Awaited(head.key, len(queue) + calls, wake)
        return False

    def _room_behind(self, item: Item) -> dict[Hashable, int]:
        """Of each call that a session is at: how many calls lie between it and the next session behind, in the round of `item`'s."""
        ring = self._sessions[item.session].ring()
        taken = sorted({(ring[rhythm.at], rhythm.at) for rhythm in self._live.values() if rhythm.at in ring})
        return {key: (place - taken[i - 1][0]) % len(ring) for i, (place, key) in enumerate(taken)}

    def _without_leaders(self, queues: list[Queue], room: dict[Hashable, int], now: float) -> list[Queue]:
        """While the session that is furthest behind thinks, but for less than a product takes, the others do not run away.
        Calls too large to be joined gain nothing from that."""
        last = max(room, key=lambda key: room[key], default=None)
        if last is None or last in self._queues:
            return queues
        behind = [rhythm for rhythm in self._live.values() if rhythm.at == last]
        expected, latest = min(rhythm.due(now) for rhythm in behind)
        if now >= latest:
            return queues
        ready = []
        for queue in queues:
            head = queue[0]
            deadline = head.arrived + self.budget(head.key)
            if (
                head.key in room
                and head.joinable
                and head.left < self.join_below
                and now < deadline
                and expected - now < self._cost_of(head.key)
            ):
                self._wake = min(self._wake, latest, deadline)
            else:
                ready.append(queue)
        return ready

    def _first(self, queues: list[Queue], room: dict[Hashable, int], now: float) -> Item:
        """The call to run; of a queue that runs as a whole, the one that is most urgent."""
        if len(queues) == 1 and not self._begun and (len(queues[0]) == 1 or self._joins(queues[0])):
            return queues[0][0]
        items = [batch.slices[0].item for batch in self._begun]
        items += [item for queue in queues for item in self._heads(queue)]
        if len(self._shares) > 1:
            items = self._best_of_each(items, room, now)
            return min(items, key=lambda item: self._rank(item, self._sessions[item.session].share, room, now))
        return min(items, key=lambda item: self._rank(item, self._sessions[item.session], room, now))

    def _best_of_each(self, items: list[Item], room: dict[Hashable, int], now: float) -> list[Item]:
        """The call that each tenant would have run next."""
        best: dict[Share, tuple[Any, Item]] = {}
        for item in items:
            rhythm = self._sessions[item.session]
            rank = self._rank(item, rhythm, room, now)
            if rhythm.share not in best or rank < best[rhythm.share][0]:
                best[rhythm.share] = rank, item
        return [item for _, item in best.values()]

    def _heads(self, queue: Queue) -> Iterable[Item]:
        """The calls of a queue that are to be compared: of one that runs as a whole, each tenant's most urgent."""
        if not self._joins(queue):
            return queue
        if len(self._shares) < 2:
            return [min(queue, key=_urgency)]
        first: dict[str | None, Item] = {}
        for item in sorted(queue, key=_urgency):
            first.setdefault(self._sessions[item.session].share.tenant, item)
        return first.values()

    def _joins(self, queue: Queue) -> bool:
        """Whether the whole queue can run as one product."""
        return self.policy != "immediate" and not queue.apart and queue.rows <= self.max_rows

    def _rank(
        self, item: Item, caller: "Rhythm | Share", room: dict[Hashable, int], now: float
    ) -> tuple[int, int, int, float, float]:
        """Among sessions, or among tenants: of these nobody knows whether what they say of their calls is true."""
        waited = int((now - max(item.arrived, caller.served)) / AGING_S)
        last = room.get(item.key, 0) * len(self._queues.get(item.key, ()))
        urgency, used = max(0, item.priority - waited), int(caller.used / SLACK_S)
        first, second = (used, urgency) if isinstance(caller, Share) else (urgency, used)
        return first, second, -last, caller.used, item.arrived

    def _take(self, head: Item, now: float) -> Batch:
        """`head`, and of its queue what may join it."""
        queue = self._queues[head.key]
        most = TOGETHER if self._others_call(head) else len(queue)
        most_rows = self._most_rows(head, queue)
        if len(queue) <= most and queue.rows <= most_rows and self._joins(queue):
            return self._take_all(queue, now)
        pieces = [self._slice(head, most_rows)]
        rows = pieces[0].stop - pieces[0].start
        if len(queue) > 1 and self.policy != "immediate" and head.joinable and rows < self.join_below:
            passed: set[int] = set()  # no call of a session overtakes an earlier one
            taken = Counter([self._sessions[head.session].share])
            for item in [item for item in queue if item is not head]:
                fits = item.whole and rows + item.rows <= most_rows
                share = self._sessions[item.session].share
                if fits and item.session not in passed and taken[share] < most:
                    taken[share] += 1
                    pieces.append(self._slice(item, most_rows))
                    rows += item.rows
                else:
                    passed.add(item.session)
        for piece in pieces:
            if piece.last:
                self._remove(piece.item)
        for piece in pieces:
            rhythm = self._sessions[piece.item.session]
            rhythm.served = rhythm.share.served = now
        self._least_used = max(self._least_used, self._sessions[head.session].used)
        self._least_share = max(self._least_share, self._sessions[head.session].share.used)
        return self._begin(Batch(head.key, self._in_order(pieces), now), now)

    def _take_all(self, queue: Queue, now: float) -> Batch:
        del self._queues[queue[0].key]
        least = least_share = inf
        for item in queue:
            item.start = item.rows
            rhythm = self._sessions[item.session]
            rhythm.served = rhythm.share.served = now
            least, least_share = min(least, rhythm.used), min(least_share, rhythm.share.used)
        self._least_used = max(self._least_used, least)
        self._least_share = max(self._least_share, least_share)
        return self._begin(Batch(queue[0].key, self._in_order([Slice(item, 0, item.rows) for item in queue]), now), now)

    def _begin(self, batch: Batch, now: float) -> Batch:
        """With its first turn: all of it, if others can wait for that. Calls of several run whole, for none of them is kept waiting by
        another."""
        if len(batch.slices) == 1:
            batch.cells = batch.last = batch.slices[0].item.cells
            if batch.cells > 1:
                self._set_turn(batch, now)
        return batch

    def _go_on(self, batch: Batch, now: float) -> Batch:
        """... with the next one."""
        self._begun.remove(batch)
        rhythm = self._sessions[batch.slices[0].item.session]
        rhythm.served = rhythm.share.served = now
        batch.first, batch.last = batch.last, batch.cells
        self._set_turn(batch, now)
        return batch

    def _set_turn(self, batch: Batch, now: float) -> None:
        item, start, stop = batch.slices[0]
        left = batch.cells - batch.first
        turns = item.turns * left / batch.cells
        seconds = batch.seconds / batch.first * left if batch.first else self._foretold(item, stop - start)
        if not self._invariant and seconds > LONG * SLICE_S:
            turn_s = self._turn_s({self._sessions[item.session].share}, now)
            turns = max(turns, seconds / turn_s if seconds > LONG * turn_s else 1.0)
        batch.last = batch.first + max(1, int(left / max(1.0, turns)))

    def _in_order(self, pieces: list[Slice]) -> list[Slice]:
        """Who has the fewest in a product is answered first: replies take time, too."""
        if len(self._shares) < 2 or len(pieces) < 2:
            return pieces
        shares = [self._sessions[piece.item.session].share for piece in pieces]
        count = Counter(shares)
        order = sorted(range(len(pieces)), key=lambda number: count[shares[number]])
        return [pieces[number] for number in order]

    def _slice(self, item: Item, most: int) -> Slice:
        start, stop = item.start, item.rows
        if item.divisible and item.left > most:
            stop = start + most
        self._queues[item.key].cut(item, stop)
        return Slice(item, start, stop)

    def _most_rows(self, head: Item, queue: Queue) -> int:
        """Of one slice, or of a product: fewer while tenants call that have no part in it."""
        if self._invariant or not head.divisible or queue.rows <= SMALLEST_SLICE:
            return self.max_rows
        row_s = self._row_s(head)
        if queue.rows * row_s <= SLICE_S:
            return self.max_rows
        turn_s = self._turn_s(
            {self._sessions[item.session].share for item in queue if item.whole or item is head}, head.arrived
        )
        return int(min(self.max_rows, max(SMALLEST_SLICE, turn_s / max(row_s, 1e-12))))

    def _turn_s(self, own: set[Share], since: float) -> float:
        """How long others may wait: not for longer than they make others wait."""
        shares = {rhythm.share for rhythm in self._sessions.values()} - own
        return max(SLICE_S, min((share.brief for share in shares if share.called > since - ACTIVE_S), default=inf))

    def _row_s(self, item: Item) -> float:
        """The seconds that one row among many takes; a guess, if nothing is known of its key."""
        return self._per_row.get(item.key) or self._usual * item.price / item.rows

    def _foretold(self, item: Item, rows: int) -> float:
        """The seconds that so many rows of a call will take, in the same way."""
        if not item.divisible:
            return self._per_value.get(item.key, self._usual) * item.price
        if rows < SMALLEST_SLICE and item.key in self._cost:
            return self._cost[item.key]
        return self._row_s(item) * (rows + READING)

    def _others_call(self, item: Item) -> bool:
        """Whether tenants other than the one of this call have called lately."""
        own = self._sessions[item.session].share
        return any(share is not own and share.called > item.arrived - ACTIVE_S for share in self._shares.values())

    def _remove(self, item: Item) -> None:
        queue = self._queues.get(item.key)
        if queue is not None and item in queue:
            queue.drop(item)
            if not queue:
                del self._queues[item.key]


def _urgency(item: Item) -> tuple[int, float]:
    return item.priority, item.arrived


def _worth_waiting(coming: list[Due], cost: float, now: float, deadline: float) -> tuple[int, float]:
    """For how many calls to wait, the earliest first, and until when, so that the products saved outweigh the time by most."""
    best, until, calls, wake = 0.0, now, 0, inf
    for number, (expected, latest) in enumerate(coming, 1):
        if expected > deadline:
            break
        until = max(until, latest)
        gain = number * cost - max(0.0, expected - now)
        if gain > best:
            best, calls, wake = gain, number, min(until, deadline)
    return calls, wake
