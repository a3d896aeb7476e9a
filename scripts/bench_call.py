"""Round trip of a call with no arithmetic, by transport, payload and number of clients, beside a bare Unix-socket echo.

Every client is a process of its own, and so is the executor (but for `inproc`, where one process is both). What is compared
takes turns within every round, so that noise hits all alike; a cell of the table is the median over the rounds.

    python scripts/bench_call.py --quick     # about a minute
    python scripts/bench_call.py
"""

import argparse
import os
import socket
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from _processes import Worker, executor, prepare, progress, save_llama, together, wait_for, workers

import symbiosis
from symbiosis.base.reporting import Report, print_table
from symbiosis.client.session import Session
from symbiosis.protocol import Op

SMALL, LARGE = 8 << 10, 1 << 20
COUNTS = (1, 2, 4, 8)
WARM_UP = 20
ROW = 2048  # float32 values in 8 KB


class EchoClient:
    """Calls executors, by a session for each endpoint."""

    def __init__(self, endpoints: list[str]) -> None:
        torch.set_num_threads(1)
        self._sessions = {endpoint.partition("://")[0]: Session(endpoint) for endpoint in endpoints}
        for session in self._sessions.values():
            assert session.welcome

    def echo(self, start: float, seconds: float, transport: str, nbytes: int) -> list[float]:
        """The seconds of each round trip from `start` on."""
        call = self._sessions[transport].call
        rows = torch.rand(nbytes // (4 * ROW), ROW)
        for _ in range(WARM_UP):
            assert torch.equal(call(Op.ECHO, 0, rows), rows)
        wait_for(start)
        times, now = [], time.perf_counter()
        end = now + seconds
        while now < end:
            call(Op.ECHO, 0, rows)
            before, now = now, time.perf_counter()
            times.append(now - before)
        return times


class EmbeddedClient(EchoClient):
    """... and this one has the executor in its own process."""

    def __init__(self, model: str) -> None:
        self._executor = symbiosis.Executor(model)
        super().__init__([self._executor.endpoint])


class BareServer:
    """Sends back what comes over a Unix socket, and nothing else."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(path)
        self._socket.listen()
        self._socket.settimeout(30)

    def serve(self, nbytes: int) -> None:
        """One connection, until it is closed."""
        connection, _ = self._socket.accept()
        buffer = bytearray(nbytes)
        with connection:
            while receive(connection, buffer):
                connection.sendall(buffer)


class BareClient:
    """Its other end."""

    def __init__(self, path: str) -> None:
        self._path = path

    def echo(self, start: float, seconds: float, nbytes: int) -> list[float]:
        sent, received = os.urandom(nbytes), bytearray(nbytes)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(self._path)
            for _ in range(WARM_UP):
                connection.sendall(sent)
                receive(connection, received)
            assert sent == received
            wait_for(start)
            times, now = [], time.perf_counter()
            end = now + seconds
            while now < end:
                connection.sendall(sent)
                receive(connection, received)
                before, now = now, time.perf_counter()
                times.append(now - before)
        return times


def receive(connection: socket.socket, buffer: bytearray) -> bool:
    """Fill `buffer`; False at the end of the stream."""
    view, got = memoryview(buffer), 0
    while got < len(buffer):
        count = connection.recv_into(view[got:])
        if not count:
            return False
        got += count
    return True


class Cell(NamedTuple):
    """What is measured at a time."""

    transport: str
    nbytes: int
    clients: int

    @property
    def name(self) -> str:
        return f"{self.transport} {self.nbytes >> 10} KB, {self.clients} client" + "s" * (self.clients > 1)


class Round(NamedTuple):
    """Microseconds, and calls per second of all clients together."""

    p50: float
    p90: float
    p99: float
    rate: float


CELLS = [
    Cell(transport, nbytes, clients)
    for nbytes in (SMALL, LARGE)
    for clients in COUNTS
    for transport in ("bare", "inproc", "local", "tcp")
    if clients == 1 or transport in ("local", "tcp")
]


class Bench:
    """The processes, and a measurement of one cell."""

    def __init__(self, stack: ExitStack, folder: Path, seconds: float) -> None:
        self._seconds = seconds
        model = folder / "model"
        save_llama(model, hidden=256, layers=1)
        sockets = ["--listen", f"local://{folder}/executor.sock", "--listen", "tcp://127.0.0.1:0"]
        served = stack.enter_context(executor(model, 1, *sockets))
        bare = f"{folder}/bare.sock"
        self._clients = stack.enter_context(workers(EchoClient, [(served.endpoints,)] * max(COUNTS)))
        self._embedded = stack.enter_context(workers(EmbeddedClient, [(str(model),)]))
        self._bare_server = stack.enter_context(workers(BareServer, [(bare,)]))[0]
        self._bare_client = stack.enter_context(workers(BareClient, [(bare,)]))

    def measure(self, cell: Cell) -> Round:
        if cell.transport == "bare":
            self._bare_server.send("serve", cell.nbytes)
            times = together(self._bare_client, "echo", self._seconds, cell.nbytes)
            self._bare_server.result()
        else:
            clients: list[Worker] = self._embedded if cell.transport == "inproc" else self._clients[: cell.clients]
            times = together(clients, "echo", self._seconds, cell.transport, cell.nbytes)
        p50, p90, p99 = (np.percentile(np.concatenate(times), (50, 90, 99)) * 1e6).tolist()
        return Round(p50, p90, p99, sum(map(len, times)) / self._seconds)


def show(rounds: dict[Cell, list[Round]]) -> None:
    rows = []
    for cell, measured in rounds.items():
        p50, p90, p99, rate = (statistics.median(column) for column in zip(*measured, strict=True))
        rows.append((cell.name, f"{p50:.0f}", f"{p90:.0f}", f"{p99:.0f}", f"{rate:,.0f}"))
    print_table(("round trip", "p50 us", "p90 us", "p99 us", "calls/s"), rows)


def report(rounds: dict[Cell, list[Round]]) -> Report:
    """The bars are of medians over rounds, each round compared within itself."""
    result = Report("bench_call")
    for cell, measured in rounds.items():
        for field, values in zip(Round._fields, zip(*measured, strict=True), strict=True):
            name = f"{cell.transport}_{cell.nbytes >> 10}KB_{cell.clients}_{field}"
            result.figure(name, round(statistics.median(values), 1))
    bare, local, tcp = ([r.p50 for r in rounds[Cell(name, SMALL, 1)]] for name in ("bare", "local", "tcp"))
    over = statistics.median(mine - plain for mine, plain in zip(local, bare, strict=True))
    result.bar("local_8KB_over_bare_us", over, "<=", 25)
    result.bar("tcp_over_local_8KB", statistics.median(a / b for a, b in zip(tcp, local, strict=True)), ">=", 4)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 rounds of 0.3 s for each cell instead of 9 of 1 s")
    args = parser.parse_args()
    prepare(threads=1)
    rounds: dict[Cell, list[Round]] = {cell: [] for cell in CELLS}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        bench = Bench(stack, Path(folder), seconds=0.3 if args.quick else 1.0)
        count = 3 if args.quick else 9
        for number in range(count):
            progress(f"round {number + 1} of {count}")
            for cell in CELLS:
                rounds[cell].append(bench.measure(cell))
    show(rounds)
    return report(rounds).finish()


if __name__ == "__main__":
    sys.exit(main())
