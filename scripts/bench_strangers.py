"""One program's calls over tcp:// alone, and beside strangers who attack the executor's port. Does it live, and how much does it hold?

Strangers without a key, at an executor with keys (`keys`) and at one without (`open`, on loopback, where any local user may connect):

    handshakes  200 handshakes a second with unknown keys; without keys as many clients that join and leave
    silent      2,000 connections that say nothing
    half        2,000 connections that stop in the middle of their handshakes
    garbage     connections that send 64 KiB of random bytes, one after another
    large       connections that announce a frame of 1 GiB and send as much of it as is taken
    churn       connections that are opened and closed at once
    frames      (open) one message of a million empty frames after another
    endless     (open) messages that never end, of frames of two bytes
    joins       (open) clients that join and leave, as fast as they can

The attacking process has the lowest priority, because it would run elsewhere.

    python scripts/bench_strangers.py --only keys-half open-endless
"""

import argparse
import os
import resource
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from _processes import executor, prepare, progress, save_llama, together, wait_for, workers
from bench_isolation import HIDDEN, Decoder, give_way, knock, one_after_another

from symbiosis.base.curve_keys import generate
from symbiosis.base.reporting import Report, print_table
from symbiosis.protocol import Bye, Hello, encode_control

CONNECTIONS, FRAMES = 2000, 1_000_000
GREETING = {mechanism: b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32) for mechanism in (b"NULL", b"CURVE")}  # fmt: skip
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
OF_ALL = ("handshakes", "silent", "half", "garbage", "large", "churn")
SITUATIONS = tuple(f"keys-{act}" for act in OF_ALL) + tuple(
    f"open-{act}" for act in (*OF_ALL, "frames", "endless", "joins")
)
P50_BAR, GROWN_BAR = 5.0, 512.0
MOST_MEMORY = 4 << 30  # beyond it an executor dies, as in a cgroup


class Stranger:
    """A process that attacks the endpoint in one way at a time. Each attack returns how often it was made."""

    def __init__(self, endpoint: str) -> None:
        give_way()
        torch.set_num_threads(1)
        place, self._keys, _ = endpoint.removeprefix("tcp://").partition("?")
        host, _, port = place.rpartition(":")
        self._endpoint, self._place = endpoint, (host, int(port))
        self._greeting = GREETING[b"CURVE" if self._keys else b"NULL"]

    def attack(self, act: str, start: float, seconds: float) -> int:
        wait_for(start)
        count, end = 0, time.monotonic() + seconds
        with ExitStack() as kept:
            attack: Callable[[ExitStack, float], int] = getattr(self, act)
            while time.monotonic() < end:
                with suppress(OSError):
                    count += attack(kept, end)
        return count

    def _connect(self) -> socket.socket:
        return socket.create_connection(self._place, timeout=0.5)

    def _greeted(self) -> socket.socket:
        """Return a connection that has begun its handshake; without keys, one that has ended it."""
        one, seen = self._connect(), b""
        one.sendall(self._greeting if self._keys else self._greeting + _frame(4, READY))
        while not self._keys and b"Identity" not in seen and (more := one.recv(1 << 16)):
            seen += more
        return one

    def handshakes(self, kept: ExitStack, end: float) -> int:
        """Each connection stays open for a second."""
        return one_after_another(lambda: knock(self._endpoint) if self._keys else self._joining(), end)

    def _joining(self) -> socket.socket:
        one = self._greeted()
        one.sendall(_frame(0, encode_control(Hello(client="stranger"))))
        return one

    def silent(self, kept: ExitStack, end: float, said: bytes = b"") -> int:
        for number in range(CONNECTIONS):
            with suppress(TimeoutError):
                kept.enter_context(self._connect()).sendall(said)
            if time.monotonic() > end:
                return number + 1
        time.sleep(max(0.0, end - time.monotonic()))
        return CONNECTIONS

    def half(self, kept: ExitStack, end: float) -> int:
        return self.silent(kept, end, self._greeting)

    def garbage(self, kept: ExitStack, end: float) -> int:
        with self._connect() as one:
            one.sendall(os.urandom(64 << 10))
        return 1

    def churn(self, kept: ExitStack, end: float) -> int:
        self._connect().close()
        return 1

    def large(self, kept: ExitStack, end: float) -> int:
        with self._greeted() as one:
            one.sendall(struct.pack(">BQ", 6 if self._keys else 2, 1 << 30))
            return self._pour(one, bytes(1 << 16), end)

    def frames(self, kept: ExitStack, end: float) -> int:
        with self._greeted() as one, suppress(OSError):  # until it is hung up on
            one.sendall(b"\x01\x00" * FRAMES + b"\x00\x00")
            while one.recv(1 << 16):
                pass
        return 1

    def endless(self, kept: ExitStack, end: float) -> int:
        with self._greeted() as one:
            return self._pour(one, b"\x01\x00" * (1 << 15), end)

    def _pour(self, one: socket.socket, block: bytes, end: float) -> int:
        with suppress(OSError):
            while time.monotonic() < end:
                one.sendall(block)
        return 1

    def joins(self, kept: ExitStack, end: float) -> int:
        with self._joining() as one:
            seen = b""
            while b"welcome" not in seen and (more := one.recv(1 << 16)):
                seen += more
            one.sendall(_frame(0, encode_control(Bye())))
        return 1


def _frame(flags: int, content: bytes) -> bytes:
    return struct.pack("BB", flags, len(content)) + content


class Round(NamedTuple):
    """Milliseconds of the program's calls alone and beside the strangers; MiB by which the executor's memory rose; the attacks made."""

    alone_p50: float
    alone_p99: float
    p50: float
    p99: float
    grown: float
    attacks: int


class Bench:
    """An executor, the program, and the stranger."""

    def __init__(self, stack: ExitStack, folder: Path, keys: bool, seconds: float) -> None:
        self._seconds = seconds
        folder.mkdir()
        save_llama(folder / "model", hidden=HIDDEN, layers=1)
        options = ["--listen", "tcp://127.0.0.1:0"]
        if keys:
            for name in ("executor", "decoder", "stranger"):
                generate(name, folder)
            (folder / "tenants").mkdir()
            (folder / "decoder.pub").rename(folder / "tenants" / "decoder.pub")
            options += ["--key", f"{folder}/executor.key", "--tenants", f"{folder}/tenants"]
        self._executor = stack.enter_context(executor(folder / "model", 1, *options))
        resource.prlimit(
            self._executor.pid, resource.RLIMIT_DATA, (MOST_MEMORY, MOST_MEMORY)
        )  # this machine's must last
        by = f"{self._executor.endpoints[0]}?server={folder}/executor.pub&key={folder}" if keys else ""
        decoder, stranger = (
            f"{by}/{name}.key" if keys else self._executor.endpoints[0] for name in ("decoder", "stranger")
        )
        self._decoder = stack.enter_context(workers(Decoder, [(decoder,)]))
        self._stranger = stack.enter_context(workers(Stranger, [(stranger,)]))[0]
        together(self._decoder, "calls", seconds)  # the first calls take longer

    def measure(self, act: str) -> Round:
        alone = together(self._decoder, "calls", self._seconds)[0]
        status = Path(f"/proc/{self._executor.pid}")
        (status / "clear_refs").write_text("5")  # the peak begins anew
        before = _peak_mib(self._executor.pid)
        self._stranger.send("attack", act, time.monotonic() + 0.2, self._seconds + 1.5)
        time.sleep(0.7)
        times = together(self._decoder, "calls", self._seconds)[0]
        attacks = self._stranger.result()
        self._executor.still_runs()
        grown = _peak_mib(self._executor.pid) - before
        time.sleep(2.5)  # what is left of the attack ends
        p50s, p99s = zip(*((np.percentile(calls, (50, 99)) * 1e3).tolist() for calls in (alone, times)), strict=True)
        return Round(p50s[0], p99s[0], p50s[1], p99s[1], grown, attacks)


def _peak_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) / 1024


def report(rounds: dict[str, list[Round]]) -> Report:
    result, rows = Report("bench_strangers"), []
    for situation, measured in rounds.items():
        middle = Round(*(statistics.median(column) for column in zip(*measured, strict=True)))
        rows.append(
            (situation, *(f"{value:.2f}" for value in middle[:4]), f"{middle.grown:.0f}", f"{middle.attacks:,.0f}")
        )
        for name, value in middle._asdict().items():
            result.figure(f"{situation}_{name}", round(value, 3))
        result.bar(f"{situation}_p50_over_alone", middle.p50 / middle.alone_p50, "<=", P50_BAR)
        result.bar(f"{situation}_grown_mib", middle.grown, "<=", GROWN_BAR)
    print_table(("beside", "alone: p50 ms", "p99 ms", "p50 ms", "p99 ms", "grown MiB", "attacks"), rows)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SITUATIONS, nargs="+", help="these situations only")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    args = parser.parse_args()
    prepare(threads=1)
    chosen = args.only or SITUATIONS
    rounds: dict[str, list[Round]] = {situation: [] for situation in chosen}
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("keys", "open"):
            mine = [situation for situation in chosen if situation.startswith(kind)]
            with ExitStack() as stack:
                bench = Bench(stack, Path(folder) / kind, kind == "keys", args.seconds) if mine else None
                for situation in mine * args.rounds:
                    assert bench
                    rounds[situation].append(bench.measure(situation.partition("-")[2]))
                    progress(
                        f"{situation}: "
                        + ", ".join(f"{name} {value:.2f}" for name, value in rounds[situation][-1]._asdict().items())
                    )
    return report(rounds).finish()


if __name__ == "__main__":
    sys.exit(main())
