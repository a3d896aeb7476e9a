"""Decides how much of a call runs at a time, and what runs with it.

A tenant (without keys: a session) that makes short calls does not wait for another's long call. A long call runs in slices of rows. A
product that is still too long runs in turns: each computes some of its cells, and takes no longer than the others' own calls, or about
`TURN_S`. Between two turns others run. Cells are no finer than that needs: finer ones cost more, and may round differently.

Who is alone is cut, too, but only into turns of `ALONE_S`, so that nobody who comes waits for minutes.
"""

from collections import Counter
from math import inf

from symbiosis.executor.scheduling.callers import Callers
from symbiosis.executor.scheduling.costs import FEW_ROWS, UNSEEN_S, Costs
from symbiosis.executor.scheduling.queue import Batch, Item, Queue, Queues, Slice
from symbiosis.executor.scheduling.ranking import Ranking
from symbiosis.executor.scheduling.rules import Rules
from symbiosis.executor.scheduling.tenant_use import TenantUse

TURN_S = 5e-4  # a turn that another tenant waits for takes about so long
SHORT = TURN_S / UNSEEN_S  # multiplications that take no longer than a turn, whatever they are
ALONE_S = 0.25  # one for which nobody is known to wait
SLICE_S = 2e-3  # on a GPU, where only slices of rows are cut: one that another tenant waits for
TOGETHER = 8  # most calls of one tenant in a product that another tenant waits for
FEWEST = 8  # rows of a slice, if it can be more
LONG = 1.5  # a product is cut if it takes more than so many times what a turn should take
GROWTH = 4  # a turn has at most so many times the cells of the one before, because cells may differ in what they cost


class Cutting:
    """Makes the next batch from the call that ranks first, and sets how much of it runs."""

    def __init__(self, rules: Rules, queues: Queues, callers: Callers, costs: Costs, ranking: Ranking) -> None:
        self._rules, self._queues, self._callers, self._costs = rules, queues, callers, costs
        self._ranking = ranking

    def take(self, head: Item, now: float) -> Batch:
        """Return a batch of `head` and the calls of its queue that may run with it. Its first turn is the whole batch if others can wait
        for that."""
        queue = self._queues[head.key]
        if len(queue) == 1 and head.turns == 1 and head.rows <= self._rules.max_rows:  # as most calls are
            rhythm = self._callers.sessions[head.session]
            seconds = 0.0 if 0 < head.price <= SHORT else self._costs.at_most(head, head.rows)
            if seconds <= TURN_S or seconds <= self._turn_s(head, {rhythm.tenant}, head.arrived):  # no turn is shorter
                del self._queues[head.key]
                piece, head.start = Slice(head, head.start, head.rows), head.rows
                self._callers.served([rhythm], now)
                return Batch(head.key, [piece], now)
        most = TOGETHER if len(queue) > 1 and self._callers.other_tenants_call(head) else len(queue)
        most_rows = self._most_rows(head, queue)
        alone = len(queue) == 1 and (queue.rows <= most_rows or not head.divisible)
        if alone or (len(queue) <= most and queue.rows <= most_rows and self._ranking.runs_whole(queue)):
            del self._queues[head.key]
            pieces, first = [], None
            for item in queue:
                pieces.append(Slice(item, item.start, item.rows))
                item.start = item.rows
        else:
            pieces, first = self._some(head, queue, most, most_rows), self._callers[head]
        self._callers.served([self._callers.sessions[item.session] for item, _, _ in pieces], now, first)
        batch = Batch(head.key, self._in_order(pieces) if len(pieces) > 1 else pieces, now)
        batched_long = len(pieces) > 1 and head.divisible and self._costs.at_most(head, batch.rows) > TURN_S
        if head.grains[0][1] > 1 and (batched_long or len(pieces) == 1):
            self._set_grain(batch, now)
            self._set_turn(batch, now)
        return batch

    def go_on(self, batch: Batch, now: float) -> None:
        """Set the batch's next turn."""
        for rhythm in self._callers.of(batch):
            rhythm.served = rhythm.tenant.served = now
        most = batch.last + GROWTH * (batch.last - batch.first)
        batch.first, batch.last = batch.last, batch.cells
        self._set_turn(batch, now)
        batch.last = min(batch.last, most)

    def _some(self, head: Item, queue: Queue, most: int, most_rows: int) -> list[Slice]:
        """Take a slice of `head` and the calls of its queue that fit beside it: at most `most` of a tenant, and `most_rows` in all."""
        pieces = self._beside(head, queue, most, most_rows)
        for item, _, stop in pieces:
            queue.cut(item, stop)
            if stop == item.rows:
                queue.drop(item)
        if not queue:
            del self._queues[head.key]
        return pieces

    def _beside(self, head: Item, queue: Queue, most: int, most_rows: int) -> list[Slice]:
        stop = self._stop(head, most_rows) if head.divisible else head.rows
        pieces, rows = [Slice(head, head.start, stop)], stop - head.start
        if len(queue) == 1 or not self._rules.policy.batches or not head.batchable or rows >= self._rules.batch_below:
            return pieces
        passed: set[int] = set()  # no call of a session overtakes an earlier one
        taken = Counter([self._callers[head].tenant])
        for item in queue:
            tenant = self._callers[item].tenant
            if item is head:
                continue
            if item.whole and rows + item.rows <= most_rows and item.session not in passed and taken[tenant] < most:
                taken[tenant] += 1
                pieces.append(Slice(item, 0, item.rows))
                rows += item.rows
            else:
                passed.add(item.session)
        return pieces

    def _stop(self, head: Item, most_rows: int) -> int:
        """Return where the next slice of a call ends. It leaves no few rows by themselves, for which libraries have other kernels."""
        stop = min(head.rows, head.start + most_rows)
        left = head.rows - stop
        if not 0 < left < FEWEST or most_rows < FEWEST:
            return stop
        if head.left <= min(2 * FEWEST, self._rules.max_rows):
            return head.rows
        return max(head.start + 1, stop - (FEWEST - left))

    def _in_order(self, pieces: list[Slice]) -> list[Slice]:
        """Put the tenants with the fewest calls first: replies take time, too."""
        if not self._callers.are_tenants:
            return pieces
        tenants = [self._callers[item].tenant for item, _, _ in pieces]
        count = Counter(tenants)
        order = sorted(range(len(pieces)), key=lambda number: count[tenants[number]])
        return [pieces[number] for number in order]

    def _most_rows(self, head: Item, queue: Queue) -> int:
        """Return how many rows a slice or a product may have: fewer while tenants call that have no part in it."""
        most = self._rules.max_rows
        short = queue.rows <= FEW_ROWS and head.grains[0][1] == 1
        if self._rules.invariant or (short if head.divisible else len(queue) == 1):
            return most
        seconds = self._costs.at_most(head, queue.rows if head.divisible else head.rows)
        if not head.divisible:
            seconds *= queue.rows / head.rows
        if seconds <= TURN_S:
            return most
        own = {self._callers[item].tenant for item in queue if item.whole or item is head}
        turn_s = self._turn_s(head, own, head.arrived)
        least, row_s = 1, seconds / queue.rows
        if head.divisible and seconds > turn_s:
            least, _ = head.grains[self._grain(head, queue.rows, turn_s)]
            row_s = max(self._costs.at_most(head, least) / least, 2 * self._costs.of_preparing(head))
        return int(min(most, max(least, turn_s / max(row_s, 1e-12))))

    def _grain(self, item: Item, rows: int, turn_s: float) -> int:
        """Return the coarsest grain of which a cell takes about as long as a turn may, or less, for a slice of `rows`."""
        for grain, (least, cells) in enumerate(item.grains):
            taken = min(rows, least)
            cell_s = max(self._costs.at_most(item, taken) / cells, self._costs.of_preparing(item) * taken)
            if cell_s <= LONG * turn_s:
                return grain
        return len(item.grains) - 1

    def _set_grain(self, batch: Batch, now: float) -> None:
        item = batch.slices[0].item
        if not self._rules.invariant:
            batch.grain = self._grain(item, batch.rows, self._turn_s(item, self._own(batch), now))
        batch.cells = batch.last = item.grains[batch.grain][1]

    def _set_turn(self, batch: Batch, now: float) -> None:
        item = batch.slices[0].item
        left = batch.cells - batch.first
        turns = max(piece.item.turns for piece in batch.slices) * left / batch.cells
        if batch.first:
            seconds = (batch.seconds - batch.prepared_s) / batch.first * left
        else:
            seconds = self._costs.at_most(item, batch.rows)
        if not self._rules.invariant and seconds > LONG * TURN_S:
            turn_s = self._turn_s(item, self._own(batch), now)
            turns = max(turns, seconds / turn_s if seconds > LONG * turn_s else 1.0)
        batch.last = batch.first + max(1, int(left / max(1.0, turns)))

    def _own(self, batch: Batch) -> set[TenantUse]:
        return {rhythm.tenant for rhythm in self._callers.of(batch)}

    def _turn_s(self, item: Item, own: set[TenantUse], since: float) -> float:
        """Return how long a turn may take: no longer than the shortest recent calls of the other tenants, within bounds."""
        # on a GPU, kernels differ by the number of rows: who is alone there is not cut
        least_s, turn_s = (TURN_S, ALONE_S) if len(item.grains) > 1 else (SLICE_S, inf)
        for tenant in self._callers.others(own, since):
            turn_s = min(turn_s, tenant.brief)
            if turn_s <= least_s:
                return least_s
        return turn_s
