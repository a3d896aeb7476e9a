"""A service of several ranks: starts a process for each, watches them, starts one again that died, and ends all together. It loads no torch.

Clients join the ranks themselves. A rank that is away is waited for by the clients that need it, as any executor is.
"""

import logging
import math
import os
import selectors
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from subprocess import PIPE
from typing import BinaryIO

import msgspec
from msgspec.structs import replace

from symbiosis.base.logs import set_up_logging
from symbiosis.base.ownership import check_socket
from symbiosis.base.procs import MOST_STARTS, Child, program, when_told_to_end, while_needed
from symbiosis.errors import ConfigError
from symbiosis.executor import mps
from symbiosis.executor.observe.log import log
from symbiosis.executor.observe.pages import Pages
from symbiosis.executor.options import Options
from symbiosis.executor.ranks.orders import Order, Ready
from symbiosis.executor.ranks.rank_figures import RankFigures, health_of
from symbiosis.protocol.endpoints import socket_path

END_S = 60.0  # that ranks may take to answer what has come, and to end after their last word; those left are killed, as one is that hangs
LOOK_S = 0.5  # between two looks whether that time is over
ANOTHER_RANK_ENDED = "a rank ended before it was ready, so the service ends"


class Rank(Child):
    """One rank, as the service sees it."""

    def __init__(self, order: Order) -> None:
        self.order, self.number = order, order.rank
        self.ready: Ready | None = None
        words = program("symbiosis.executor.ranks.rank:main", hears=True)
        super().__init__(words, stdout=PIPE, first=msgspec.json.encode(order) + b"\n")


class Service:
    """The ranks of one model. `run` may be called once; the pages ask for `health` from their own thread."""

    turned_s, clients, fingerprint = 0.0, 0, ""

    def __init__(self, model: str, options: Options, file: str) -> None:
        self._model, self._options, self.shares_weights = model, options, options.shares_weights
        self._orders = [Order(model, options, rank, file) for rank in range(len(options.places))]
        self._ranks: dict[int, Rank] = {}
        self.ports: dict[int, int] = {}  # of the pages of ranks that are ready
        self._parts: dict[int, BinaryIO] = {}  # of all tensors, which outlive the ranks that made them
        self._starts = Counter[int]()  # of each rank since it was ready last
        self._told = self._ending = False
        self._status = 0
        self._kill_at = math.inf
        self._selector = selectors.DefaultSelector()

    def run(self) -> int:
        """Serve until `end`, and return the exit status."""
        try:
            for order in self._orders:
                self._start(order)
            while self._ranks:
                for key, _ in self._selector.select(LOOK_S):
                    key.data(key)
                if time.monotonic() > self._kill_at:
                    self._kill_at = math.inf
                    self._kill(self._ranks.values())
        finally:
            for rank in self._ranks.values():  # of a service that failed
                rank.kill()
                remove_sockets(rank.order)
        return self._status

    def signal(self, number: int) -> None:
        """Pass a signal on to all ranks."""
        for rank in list(self._ranks.values()):
            rank.signal(number)

    def end(self) -> None:
        """Let each rank answer what has come, and end. Callable from a signal handler."""
        self._kill_at = min(self._kill_at, time.monotonic() + END_S)
        self._ending = True
        self.signal(signal.SIGTERM)

    def end_at_once(self) -> None:
        """Wait for no rank any more."""
        self._kill_at = 0.0
        self.end()

    def is_needed(self) -> bool:
        """Whether clients are joined, as far as the pages of ranks tell."""
        self.health(math.inf)
        return self.clients > 0

    def health(self, stalled_s: float) -> str:
        """Return the worst status of the ranks (`Server.health`). Each of them knows by itself when it is stalled."""
        if self._ending:
            return "draining"
        status, self.turned_s, self.clients = health_of(self.ports, len(self._orders))
        return status

    def _start(self, order: Order) -> None:
        if len(self._parts) == len(self._orders):
            files = [self._parts[rank].fileno() for rank in range(len(self._orders))]
            order = replace(order, parts=tuple(f"/proc/{os.getpid()}/fd/{file}" for file in files))
        if self._ending:
            return
        self._starts[order.rank] += 1
        rank = self._ranks[order.rank] = Rank(order)
        self._selector.register(rank.stdout, selectors.EVENT_READ, lambda _: self._heard(rank))
        if self._ending:  # since it was being made, when nobody could tell it
            rank.signal(signal.SIGTERM)

    def _heard(self, rank: Rank) -> None:
        """Read what a rank says: that it is ready, or, by its end, nothing more."""
        line = rank.stdout.readline()
        if not line:
            self._selector.unregister(rank.stdout)
            rank.stdout.close()
            self.ports.pop(rank.number, None)
            status = self._end_of(rank)
            del self._ranks[rank.number]
            self._ended(rank, status)
            return
        rank.ready = ready = msgspec.json.decode(line, type=Ready)
        self.fingerprint = ready.fingerprint
        self._starts[rank.number] = 0
        log(logging.INFO, "rank ready", rank=rank.number, pid=rank.pid, layers=ready.layers, mib=ready.nbytes >> 20)
        if ready.port is not None:
            self.ports[rank.number] = ready.port
        if ready.part is not None and rank.number not in self._parts:
            with suppress(FileNotFoundError):  # it has died since, as its next line will tell
                part = os.open(f"/proc/{rank.pid}/fd/{ready.part}", os.O_RDONLY | os.O_CLOEXEC)
                self._parts[rank.number] = os.fdopen(part, "rb", buffering=0)
        told = [rank.ready for rank in self._ranks.values() if rank.ready]
        if len(told) == len(self._orders) and not (self._told or self._ending):
            self._told = True
            print(ready_line(self._model, self._options, told), flush=True)

    def _end_of(self, rank: Rank) -> int:
        """Wait until a rank that says nothing more has ended, and return its exit status. One that hangs is killed."""
        kill_at = time.monotonic() + END_S
        while not rank.wait(LOOK_S):
            if time.monotonic() > min(kill_at, self._kill_at):
                self._kill([rank])
        return rank.status or 0

    def _kill(self, ranks: Iterable[Rank]) -> None:
        """Kill ranks that have not ended."""
        if self._ending:
            self._status = self._status or 1
        for rank in ranks:
            log(logging.ERROR, "a rank has not ended, and is killed", rank=rank.number, pid=rank.pid)
            rank.signal(signal.SIGKILL)

    def _ended(self, rank: Rank, status: int) -> None:
        """Start a rank again that was ready and died, or was killed while it was started again. Any other will not be ready the next time
        either."""
        if self._ending:
            self._status = self._status or max(0, status)
            remove_sockets(rank.order)
            return
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        if rank.ready is not None or (self._told and status < 0 and self._starts[rank.number] < MOST_STARTS):
            log(logging.ERROR, "a rank died, and is started again", rank=rank.number, pid=rank.pid, ended=how)
            self._start(rank.order)
            return
        log(logging.ERROR, ANOTHER_RANK_ENDED, rank=rank.number, ended=how)
        self._status = status if status > 0 else 1
        self.end()


def remove_sockets(order: Order) -> None:
    """Remove the sockets that a rank has left behind, unless somebody else answers there by now."""
    for path in map(socket_path, order.options.of_rank(order.rank).listen):
        if path is not None:
            with suppress(ConfigError, OSError):
                check_socket(path)
                path.unlink(missing_ok=True)


def ready_line(model: str, options: Options, told: Sequence[Ready]) -> str:
    """Return what is printed when all ranks are ready, from what each has told."""
    each = [one.layers for one in told]
    layers = sum(each) if options.shard == "layers" else max(each)
    what = f"{layers} layers, {sum(one.nbytes for one in told) / 2**20:.0f} MiB, {len(told)} ranks"
    return f"symbiosis-executor ready: {model} ({what}) at {' '.join(options.listen)}"


def serve(model: str, options: Options) -> int:
    """Serve a model by several ranks until SIGTERM or SIGINT, and return the exit status."""
    set_up_logging(options.log_format)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # until there are ranks: stop MPS
    with _mps(options), os.fdopen(os.memfd_create("symbiosis-ranks"), "rb") as board:
        pages = Pages(options.metrics_host, options.metrics_port) if options.metrics_port is not None else None
        service = Service(model, replace(options, mps=False), f"/proc/{os.getpid()}/fd/{board.fileno()}")
        when_told_to_end(service.end, service.end_at_once)
        while_needed(service.is_needed)
        if options.audit_log:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)  # each line goes to the file that lies there by then
        if pages:
            log(logging.INFO, "pages", health=pages.url("/health"), metrics=pages.url("/metrics"))
            pages.show(service, RankFigures(service.ports))
        return service.run()


@contextmanager
def _mps(options: Options) -> Iterator[None]:
    """Run CUDA MPS for the block, if the options ask for it."""
    with mps.running() if options.mps else nullcontext() as pipes:
        if pipes is not None:
            log(logging.INFO, mps.how_to_join(pipes))
        yield
