"""What the first rank has told the others of sequences and adapters, so that a step tells only what is new."""

from collections import deque
from weakref import WeakKeyDictionary, finalize

from torch import Tensor

from symbiosis.serving.lora.adapter_kinds import LoadedAdapter
from symbiosis.serving.scheduler.scheduler_output import Block, SchedulerOutput, Sequence
from symbiosis.serving.tensor_parallel.rank_messages import AdapterGone, AdapterPages, FedRows, RankStep, SequenceRows


class StepLog:
    """Makes messages of steps.

    >>> from symbiosis.serving.request import Request
    >>> from symbiosis.serving.scheduler.scheduler_output import ScheduledRequest
    >>> one = Sequence(Request(id=0, prompt=(5, 6)), 0, [5, 6], None, 0.0, blocks=[Block((3,))])
    >>> log, kept = StepLog(), Tensor([1])
    >>> log.message(SchedulerOutput((ScheduledRequest(one, 0, 2, 0, True),)), kept).parts[0].blocks
    [(3,)]
    >>> one.tokens.append(7)
    >>> log.message(SchedulerOutput((ScheduledRequest(one, 0, 1, 2, True),)), kept).parts[0].blocks
    []
    """

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Sequence, tuple[int, list[Block]]] = WeakKeyDictionary()
        self._sequences = 0  # that were ever told of
        self._released: list[int] = []
        self._events: list[AdapterPages | AdapterGone] = []
        self._numbers: WeakKeyDictionary[LoadedAdapter, int] = WeakKeyDictionary()
        self._unwanted = deque[int]()  # numbers of adapters; garbage is collected in any thread

    def message(self, step: SchedulerOutput, kept: Tensor) -> RankStep:
        """Return a step with all that is new."""
        parts = [self._rows(each.sequence, each.position, each.rows) for each in step.segments]
        released, self._released = self._released, []
        events, self._events = self._events, []
        unwanted = [self._unwanted.popleft() for _ in range(len(self._unwanted))]
        fed = None if step.fed is None else FedRows(step.fed.rows, step.fed.sources, len(step.fed.chosen))
        return RankStep(parts, [int(row) for row in kept.tolist()], fed, released, events, unwanted)

    def _rows(self, sequence: Sequence, position: int, rows: int) -> SequenceRows:
        known = self._known.get(sequence)
        if known is None:
            self._sequences += 1
            known = self._sequences, []
        number, blocks = known
        now, same = sequence.blocks, len(blocks)
        if blocks != now[:same]:
            same = next(
                (at for at, (old, new) in enumerate(zip(blocks, now, strict=False)) if old is not new),
                min(same, len(now)),
            )
        self._known[sequence] = number, list(now)
        adapter = 0 if sequence.adapter is None else self._numbers[sequence.adapter]  # type: ignore[index]
        tokens = sequence.tokens[position : position + rows]
        return SequenceRows(number, adapter, position, tokens, same, [block.pages for block in now[same:]])

    def release(self, sequence: Sequence) -> None:
        """Note that a sequence has nothing any more."""
        if (known := self._known.pop(sequence, None)) is not None:
            self._released.append(known[0])

    def note_adapter(self, adapter: LoadedAdapter, number: int) -> None:
        """Note by which number ranks know an adapter."""
        self._numbers[adapter] = number
        finalize(adapter, self.unwanted, number)

    def unwanted(self, number: int) -> None:
        """Note that nobody has this adapter any more."""
        self._unwanted.append(number)

    def put(self, adapter: LoadedAdapter, pages: list[int]) -> None:
        """Note that an adapter has come to these pages."""
        self._events.append(AdapterPages(self._numbers[adapter], pages))

    def gone(self, version: int) -> None:
        """Note that a version is on the device no more."""
        self._events.append(AdapterGone(version))

    def forget_told(self) -> None:
        """Nobody knows of what was told: sequences and adapters' pages are told anew."""
        self._known.clear()
        self._released, self._events = [], []
        self._unwanted.clear()
