"""The processes of all ranks but the first, as the first one sees them: it starts them, tells each step to all, and notices when one dies or hangs."""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

import msgspec

from symbiosis.base import procs
from symbiosis.base.pulse import BEAT_S, SILENT_S, Pulse
from symbiosis.errors import AdapterError
from symbiosis.serving.runner.model_runner import RanksLost
from symbiosis.serving.tensor_parallel import rank_messages
from symbiosis.serving.tensor_parallel.rank_messages import (
    AdapterPiece,
    EndRank,
    PieceRefused,
    PieceTaken,
    RankBeat,
    RankFailed,
    RankOrder,
    RankReady,
)

logger = logging.getLogger("symbiosis")

ENTRY = "symbiosis.serving.tensor_parallel.follower:main"
STOP_S = 10.0  # for a rank, when the engine closes
NOTICED_S = 1.0  # within which a rank's death is
LOOK_S = 0.1  # between two looks whether one is lost
Result = TypeVar("Result")


class Follower:
    """One rank's process, and the two sockets to it: of steps, and of adapters."""

    def __init__(self, order: RankOrder, on_lost: Callable[[str], None]) -> None:
        self.rank, self._on_lost = order.rank, on_lost
        self.steps, steps = socket.socketpair()
        self.adapters, adapters = socket.socketpair()
        self._pulse, self._ready = Pulse(), threading.Event()
        self.told: RankReady | None = None
        self._closing = False
        with steps, adapters:
            descriptors = steps.fileno(), adapters.fileno()
            order = msgspec.structs.replace(order, steps=descriptors[0], adapters=descriptors[1])
            words = procs.program(ENTRY, name=f"rank {order.rank}", hears=True)
            self._child = procs.Child(
                words,
                descriptors=descriptors,
                environment=_environment(order),
                first=msgspec.json.encode(order) + b"\n",
            )
        self.pid = self._child.pid
        for run in (self._listen, self._watch):
            threading.Thread(target=run, name=f"symbiosis-rank-{order.rank}", daemon=True).start()

    def ready(self) -> RankReady:
        """Wait until the rank has its part, or is lost."""
        self._ready.wait()
        if self.told is None:
            raise RanksLost(f"rank {self.rank} has not come up")
        return self.told

    def load(self, piece: AdapterPiece, memory: int) -> int:
        """Give it a piece of an adapter, and return how many pages that takes there. Raises `AdapterError` if it cannot take it."""
        try:
            rank_messages.send(self.adapters, piece, (memory,))
            answer, _ = rank_messages.receive(self.adapters, rank_messages.from_rank)
        except OSError as error:
            raise AdapterError(f"rank {self.rank} is gone, and started again: send it again") from error
        if isinstance(answer, PieceTaken):
            return answer.pages
        if isinstance(answer, PieceRefused):
            raise AdapterError(f"rank {self.rank} cannot take its piece: {answer.why}")
        raise AdapterError(f"rank {self.rank} is gone, and started again: send it again") from OSError("hung up")

    def close(self, at_once: bool) -> None:
        self._closing = True
        if not at_once:
            with suppress(OSError):
                rank_messages.send(self.steps, EndRank())
            self._child.wait(STOP_S)
        self._child.kill()
        for each in (self.steps, self.adapters):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _listen(self) -> None:
        why = ""
        with suppress(OSError, msgspec.MsgspecError):
            while (message := rank_messages.receive(self.steps, rank_messages.from_rank)[0]) is not None:
                self._pulse.beat()
                if isinstance(message, RankReady):
                    self.told = message
                    self._ready.set()
                elif isinstance(message, RankFailed):
                    why = message.why
                else:
                    assert isinstance(message, RankBeat)
        if not self._closing:
            self._child.wait(BEAT_S)
            self._lost(why or f"rank {self.rank} died (status {self._child.status})")
        self._ready.set()

    def _watch(self) -> None:
        while not self._closing and self._child.status is None:
            time.sleep(BEAT_S)
            if self._pulse.seems_lost() and not self._closing:
                self._lost(f"rank {self.rank} has said nothing for {SILENT_S:g} s")
                return

    def _lost(self, why: str) -> None:
        self._child.kill()
        self._on_lost(why)


class Followers:
    """All of them, in one life: when one is lost, all are."""

    def __init__(self, orders: Sequence[RankOrder], on_lost: Callable[[], None]) -> None:
        self.lost = ""  # why, once they are
        self._is_lost = threading.Event()
        self._on_lost, self._losing = on_lost, threading.Lock()
        self._all: list[Follower] = []
        for order in orders:
            self._all.append(Follower(order, self.lose))

    @property
    def pids(self) -> list[int]:
        """The processes of these ranks."""
        return [each.pid for each in self._all]

    def ready(self) -> list[RankReady]:
        """Wait until all have their parts. Raises `RanksLost` if one has not come up."""
        try:
            return [each.ready() for each in self._all]
        except RanksLost as error:
            raise RanksLost(self.lost or str(error)) from None

    def tell(self, message: msgspec.Struct) -> int:
        """Tell all of them something; return how many bytes that takes."""
        try:
            return max(rank_messages.send(each.steps, message) for each in self._all)
        except OSError as error:
            self.lose(f"a rank cannot be reached: {error}")
            raise RanksLost(self.lost) from error

    def unless_lost(self, wait: Callable[[], Result]) -> Result:
        """Return what `wait` returns, which waits for all of them. Raises `RanksLost` as soon as one is lost, and leaves the wait to its thread."""
        found: Future[Result] = Future()

        def run() -> None:
            try:
                found.set_result(wait())
            except BaseException as error:
                found.set_exception(error)

        threading.Thread(target=run, name="symbiosis-meeting", daemon=True).start()
        while not self.lost:
            if futures.wait([found], LOOK_S).done:
                try:
                    return found.result()
                except RuntimeError as error:
                    self.lose_by(error)
        raise RanksLost(self.lost)

    def load(self, pieces: Sequence[AdapterPiece], memories: Sequence[int]) -> int:
        """Give each its piece of an adapter, and return how many pages that takes at most. Raises `AdapterError` if one cannot take it."""
        return max(each.load(piece, memory) for each, piece, memory in zip(self._all, pieces, memories, strict=True))

    def lose_by(self, error: Exception) -> None:
        """Note that they cannot go on, because the first rank has failed. If it failed because another one died, that is about to be noticed."""
        self._is_lost.wait(NOTICED_S)
        self.lose(f"the first rank failed: {type(error).__name__}: {error}")

    def lose(self, why: str) -> None:
        """Note that they cannot go on, and end all. Steps that wait for one of them fail then."""
        with self._losing:
            if self.lost:
                return
            self.lost = why
        self._is_lost.set()
        self.close(at_once=True)
        self._on_lost()

    def close(self, at_once: bool = False) -> None:
        for each in self._all:
            each.close(at_once)


def _environment(order: RankOrder) -> dict[str, str]:
    """Return the environment of a rank."""
    threads = {} if order.device != "cpu" else {"OMP_NUM_THREADS": str(threads_of_a_rank(order.ranks))}
    return threads | dict(os.environ)


def threads_of_a_rank(ranks: int) -> int:
    """Return how many threads compute for each rank on a CPU, whose cores they share."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)
