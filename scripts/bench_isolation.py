"""One tenant's calls over tcp:// with keys, alone and beside another tenant who behaves badly.

    flood    50 connections that send calls without waiting for answers, and come back when they are hung up on
    crowd    50 connections that each make one call after another, as 50 programs would
    frozen   large replies are on their way to a client that is stopped (SIGSTOP) and reads nothing
    trainer  calls of very many rows, one after another, that claim to be urgent
    strangers  200 handshakes a second with keys that are not among the 1,000 tenants (bench_strangers.py: all that they can do)
    rows     four sessions with calls of 8,192 rows
    costly   of each op the call that costs most for what is sent: seeds, stacks, groups, wide columns, reads, norms
    watchers 20 connections of observers that have large payloads sent back, and read late
    dgrad-DTYPE  one gradient after another of 512 rows through a matrix with 14,336 rows, in each dtype that an executor takes
    joined-DTYPE  the same from four sessions, of 16 rows each, which run as one product

The other tenant's processes have the lowest priority of the scheduler, because they would run on other machines: what is
measured is the executor. Before each of these the first tenant is measured alone, and compared with that. Afterwards it is measured
beside processes that call nobody, and use as much of the processors as the other tenant's did: what that alone does is no fault of the executor.

    python scripts/bench_isolation.py --quick     # about a minute
    python scripts/bench_isolation.py
"""

import argparse
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import zmq
from _processes import cpu_seconds, executor, prepare, progress, pss_bytes, save_llama, together, wait_for, workers
from zmq.utils import z85

from symbiosis.base.curve_keys import generate
from symbiosis.base.reporting import Report, print_table
from symbiosis.client.session import Session
from symbiosis.errors import CallError, Code, ConnectionLost
from symbiosis.protocol import (
    MAGIC_REPLY,
    SEED_BYTES,
    Call,
    Hello,
    Op,
    Priority,
    Refusal,
    View,
    decode_from_executor,
    encode_call,
    encode_control,
)
from symbiosis.transport.tcp.address import Address
from symbiosis.transport.tcp.sockets import cut

HIDDEN = 128
CONNECTIONS = 50
LAYER = "model.layers.0.self_attn.q_proj"
LARGE_ROWS = 16 << 11  # of 512 bytes: 16 MB
MLP = "model.layers.0.mlp.gate_proj"
DTYPES = ("float32", "float64", "bfloat16", "float16", "int32", "int64")
WIDE, WIDE_ROWS, JOINED_ROWS = 14_336, 512, 16
NARROW_SITUATIONS = ("flood", "crowd", "frozen", "trainer", "rows", "costly", "watchers", "strangers")
WIDE_SITUATIONS = tuple(f"{act}-{dtype}" for act in ("dgrad", "joined") for dtype in DTYPES)
SITUATIONS = NARROW_SITUATIONS + WIDE_SITUATIONS
SESSIONS, ROWS = 4, 8192
WATCHERS = 20
TENANTS, HANDSHAKES_PER_S = 1_000, 200
COPIED, BURST_S, LEAST_CORES = 1 << 17, 2e-3, 0.01
COMES_S = 60.0  # the longest wait for one message: other programs may have the processors
P50_BAR, P99_BAR, REPLIES_BAR = 3.0, 5.0, 4.0


def layer_number(session: Session, name: str = LAYER) -> int:
    return next(number for number, layer in enumerate(session.manifest) if layer.name == name)


class Decoder:
    """The tenant who is to be left in peace: calls of 4 rows, one after another."""

    def __init__(self, endpoint: str) -> None:
        torch.set_num_threads(1)
        self._session = Session(endpoint)
        self._layer = layer_number(self._session)
        self._x = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(0))
        self._y = self._call()

    def _call(self) -> torch.Tensor:
        return self._session.call(Op.FORWARD, self._layer, self._x, priority=Priority.DECODE)

    def calls(self, start: float, seconds: float) -> list[float]:
        """The seconds of each call; every result must be the first one's but for rounding."""
        wait_for(start)
        times, now = [], time.perf_counter()
        end = now + seconds
        while now < end:
            y = self._call()
            before, now = now, time.perf_counter()
            times.append(now - before)
            torch.testing.assert_close(y, self._y, rtol=1e-4, atol=1e-5)
        assert self._session.stats.reconnects == 0, "the innocent tenant lost its connection"
        return times


class Raw:
    """A connection without manners."""

    def __init__(self, endpoint: str, rcvhwm: int = 1000, observer: bool = False) -> None:
        place = Address.parse(endpoint.removeprefix("tcp://"))
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.sndhwm, self.socket.rcvhwm = 16, rcvhwm
        place.keys().unlock(self.socket)
        self.socket.connect(f"tcp://{place.where}")
        self._hello = encode_control(Hello(client="raw", observer=observer))
        self.hello()

    def hello(self) -> None:
        with suppress(zmq.Again):
            self.socket.send(self._hello, zmq.NOBLOCK)

    def send(self, frames: list[bytes]) -> bool:
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def next(self, what: str) -> None:
        """Take the next message, and say what it should have been if none comes."""
        if not self.socket.poll(COMES_S * 1e3):
            raise TimeoutError(f"{what} did not come within {COMES_S:g} s")
        self.socket.recv_multipart()

    def read(self) -> int:
        """Take all that came; join again if we were thrown out. How many results there were."""
        results = 0
        with suppress(zmq.Again):
            while True:
                head, *_ = self.socket.recv_multipart(zmq.NOBLOCK)
                results += head[:4] == MAGIC_REPLY
                answer = None if head[:4] == MAGIC_REPLY else decode_from_executor(head)
                if isinstance(answer, Refusal) and answer.code == Code.NOT_JOINED:
                    self.hello()
        return results


def knock(endpoint: str) -> zmq.Socket:
    """Begin a handshake at `endpoint` with a key that nobody knows."""
    place = Address.parse(endpoint.removeprefix("tcp://"))
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.linger, socket.reconnect_ivl = 0, -1
    place.keys().unlock(socket)
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.connect(f"tcp://{place.where}")
    return socket


def one_after_another(begun: Callable[[], Any], end: float) -> int:
    """Begin so many connections a second until then, each of which stays open for a second. Return how many."""
    count, first, those_open = 0, time.monotonic(), deque[Any]()
    while (now := time.monotonic()) < end:
        if count > (now - first) * HANDSHAKES_PER_S:
            time.sleep(1e-3)
            continue
        those_open.append(begun())
        count += 1
        if len(those_open) > HANDSHAKES_PER_S:
            those_open.popleft().close()
    for one in those_open:
        one.close()
    return count


def give_way() -> None:
    """Give this process the lowest priority. Linux may divide the processors among sessions first (autogroups), and what `nice` says
    counts only within one: so it becomes a session of its own, of the lowest priority."""
    os.setsid()
    with suppress(OSError):  # this kernel has no autogroups
        Path("/proc/self/autogroup").write_text("19")
    os.nice(19)


class Nuisance:
    """The other tenant."""

    def __init__(self, endpoint: str) -> None:
        give_way()
        torch.set_num_threads(1)
        self._endpoint = endpoint
        session = Session(endpoint)
        self._layer = layer_number(session)
        session.close()

    def flood(self, start: float, seconds: float) -> int:
        """Calls as fast as they go out, whatever comes back."""
        raws = [Raw(self._endpoint) for _ in range(CONNECTIONS)]
        call = Call(Op.FORWARD, self._layer, "float32", (4, HIDDEN))
        wait_for(start)
        sent, end = 0, time.monotonic() + seconds
        while time.monotonic() < end:
            for raw in raws:
                sent += raw.send([encode_call(call, sent), bytes(call.nbytes)])
                raw.read()
        for raw in raws:
            raw.socket.close()
        return sent

    def crowd(self, start: float, seconds: float) -> int:
        """One call of each connection at a time."""
        raws = [Raw(self._endpoint) for _ in range(CONNECTIONS)]
        call = Call(Op.FORWARD, self._layer, "float32", (4, HIDDEN))
        frames = [encode_call(call, 1), bytes(call.nbytes)]
        poller, by_socket = zmq.Poller(), {raw.socket: raw for raw in raws}
        for raw in raws:
            raw.send(frames)
            poller.register(raw.socket, zmq.POLLIN)
        wait_for(start)
        answers, end = 0, time.monotonic() + seconds
        while time.monotonic() < end:
            for socket, _ in poller.poll(100):
                for _ in range(by_socket[socket].read()):
                    by_socket[socket].send(frames)
                    answers += 1
        for raw in raws:
            raw.socket.close()
        return answers

    def large_calls(self, read: bool) -> int:
        """The bytes of each of some large calls, of which all are on their way; if not `read`, the next thing is that we are
        stopped."""
        self._raw = raw = Raw(self._endpoint, rcvhwm=1)
        raw.next("the answer to our hello")
        call = Call(Op.ECHO, 0, "float32", (LARGE_ROWS, HIDDEN))
        for number in range(8):
            raw.socket.send_multipart([encode_call(call, number), *cut(memoryview(bytes(call.nbytes)), encrypted=True)])
        time.sleep(1.0)
        if read:
            for number in range(8):
                raw.next(f"reply {number + 1} of 8 to calls of {call.nbytes >> 20} MiB")
            raw.socket.close()
        return call.nbytes

    def thawed(self) -> None:
        self._raw.socket.close()

    def trainer(self, start: float, seconds: float, rows: int) -> int:
        """Calls of so many rows, one after another."""
        session = Session(self._endpoint)
        x = torch.ones(rows, HIDDEN)
        wait_for(start)
        calls, end = 0, time.monotonic() + seconds
        while time.monotonic() < end:
            with suppress(ConnectionLost, CallError):
                session.call(Op.FORWARD, self._layer, x, priority=Priority.DECODE)
                calls += 1
        session.close()
        return calls

    def strangers(self, start: float, seconds: float) -> int:
        """Handshakes by keys that nobody knows, each by a connection of its own that is closed a second later."""
        wait_for(start)
        return one_after_another(lambda: knock(self._endpoint), time.monotonic() + seconds)

    def rows(self, start: float, seconds: float) -> int:
        """Calls of many rows from several sessions."""
        x = torch.ones(ROWS, HIDDEN)
        return self._all_at_once([lambda session: session.call(Op.FORWARD, self._layer, x)] * SESSIONS, start, seconds)

    def costly(self, start: float, seconds: float) -> int:
        """Of each op what costs most, each from a session of its own."""
        session = Session(self._endpoint)
        mlp = layer_number(session, MLP)
        width = session.manifest[mlp].shape[0]
        session.close()
        few, many = torch.ones(64, 512, HIDDEN), torch.ones(64 * 512, HIDDEN)
        ends = torch.tensor([16_000, 32_768], dtype=torch.int32)
        stack = View((64, HIDDEN, width), (0, 1, HIDDEN), 0)
        seed = Call(Op.FORWARD, mlp, "int32", (40_000, HIDDEN), seeded=True)
        calls: list[Callable[[Session], object]] = [
            lambda session: session.send(seed, (torch.ones(SEED_BYTES, dtype=torch.uint8),)),
            lambda session: session.call(Op.PRODUCT, mlp, few, view=stack),
            lambda session: session.call(Op.GROUPED, mlp, many, view=View((2, HIDDEN, 128), (HIDDEN * 128, 128, 1), 0), ends=ends),
            lambda session: session.call(Op.LEFT, mlp, many.t().contiguous(), view=View((width, HIDDEN), (HIDDEN, 1), 0)),
            lambda session: session.call(Op.READ, 0, dtype=torch.float64),
            lambda session: session.call(Op.NORMS, mlp, dtype=torch.float64),
            lambda session: session.call(Op.FORWARD, mlp, many.double()),
            lambda session: session.call(Op.ECHO, 0, many),
        ]  # fmt: skip
        return self._all_at_once(calls, start, seconds)

    def dgrad(self, start: float, seconds: float, dtype: str) -> int:
        """Gradients of rows through a wide matrix, one after another."""
        return self._gradients(1, WIDE_ROWS, start, seconds, dtype)

    def joined(self, start: float, seconds: float, dtype: str) -> int:
        """Gradients of few rows through a wide matrix, from several sessions."""
        return self._gradients(SESSIONS, JOINED_ROWS, start, seconds, dtype)

    def _gradients(self, sessions: int, rows: int, start: float, seconds: float, dtype: str) -> int:
        session = Session(self._endpoint)
        mlp = layer_number(session, MLP)
        session.close()
        dy = torch.ones(rows, WIDE, dtype=getattr(torch, dtype))
        return self._all_at_once([lambda session: session.call(Op.DGRAD, mlp, dy)] * sessions, start, seconds)

    def _all_at_once(self, calls: Sequence[Callable[[Session], object]], start: float, seconds: float) -> int:
        """Each again and again, in a session and a thread of its own; how many were answered."""

        def again_and_again(call: Callable[[Session], object]) -> int:
            session = Session(self._endpoint)
            wait_for(start)
            made, end = 0, time.monotonic() + seconds
            while time.monotonic() < end:
                call(session)
                made += 1
            session.close()
            return made

        with ThreadPoolExecutor(len(calls)) as pool:
            return sum(pool.map(again_and_again, calls))

    def burn(self, start: float, seconds: float, cores: float) -> int:
        """Use so many cores, by copying memory, and call nobody."""
        threads = max(1, math.ceil(cores))

        def burn_one(_: int) -> int:
            source, target, copies = np.ones(COPIED), np.empty(COPIED), 0
            wait_for(start)
            end = time.monotonic() + seconds
            while (now := time.monotonic()) < end:
                used = time.thread_time()
                while time.thread_time() < used + BURST_S:
                    np.copyto(target, source)
                    copies += 1
                time.sleep(max(0.0, now + BURST_S * threads / cores - time.monotonic()))
            return copies

        with ThreadPoolExecutor(threads) as pool:
            return sum(pool.map(burn_one, range(threads)))

    def watchers(self, start: float, seconds: float) -> int:
        """Observers, who ask for more than they read."""
        raws = [Raw(self._endpoint, observer=True) for _ in range(WATCHERS)]
        call = Call(Op.ECHO, 0, "float32", (ROWS // 32, HIDDEN))
        wait_for(start)
        sent, end, payload = 0, time.monotonic() + seconds, bytes(call.nbytes)
        while time.monotonic() < end:
            for raw in raws:
                sent += raw.send([encode_call(call, sent), payload])
            time.sleep(0.05)
            for raw in raws:
                raw.read()
        for raw in raws:
            raw.socket.close()
        return sent


class Round(NamedTuple):
    """Milliseconds of the innocent tenant's calls: alone, beside a program that only uses the processors, and in the situation; the
    cores that the other tenant's process used; and what it got done."""

    alone_p50: float
    alone_p99: float
    burnt_p50: float
    burnt_p99: float
    p50: float
    p99: float
    slowest: float
    cores: float
    other: int


class Bench:
    """The processes, and a measurement of one situation."""

    def __init__(
        self, stack: ExitStack, folder: Path, seconds: float, rows: int, situations: Sequence[str], inner: int = 0
    ) -> None:
        self._seconds, self._rows, self.kept = seconds, rows, 0.0
        save_llama(folder / "model", hidden=HIDDEN, layers=1, inner=inner)
        tenants = folder / "tenants"
        for name in ("executor", "decoder", *situations):  # a tenant for each: one that was barred would disturb nobody
            _, public = generate(name, folder)
            if name != "executor":
                tenants.mkdir(exist_ok=True)
                public.rename(tenants / public.name)
        for number in range(TENANTS):
            (tenants / f"tenant-{number}.pub").write_text(f"public {z85.encode(os.urandom(32)).decode()}\n")
        keys = ["--key", f"{folder}/executor.key", "--tenants", str(tenants)]
        options = ["--allow-read", "--integers", "8", "--integers", "16", "--listen", "tcp://127.0.0.1:0", *keys]
        served = stack.enter_context(executor(folder / "model", 1, *options))
        self._executor = served.pid
        endpoint = f"{served.endpoints[0]}?server={folder}/executor.pub&key={folder}"
        self._decoder = stack.enter_context(workers(Decoder, [(f"{endpoint}/decoder.key",)]))
        others = stack.enter_context(workers(Nuisance, [(f"{endpoint}/{name}.key",) for name in situations]))
        self._others = dict(zip(situations, others, strict=True))

    def measure(self, situation: str) -> Round:
        alone = self._calls()
        if situation == "frozen":
            burnt, times, cores, other = alone, self._beside_a_frozen_client(), 0.0, 0
        else:
            act, _, dtype = situation.partition("-")
            extra = [self._rows] if act == "trainer" else [dtype] if dtype else []
            times, cores, other = self._beside(situation, act, *extra)
            burnt, _, _ = self._beside(situation, "burn", max(cores, LEAST_CORES))
        alone_p50, alone_p99 = (np.percentile(alone, (50, 99)) * 1e3).tolist()
        burnt_p50, burnt_p99 = (np.percentile(burnt, (50, 99)) * 1e3).tolist()
        p50, p99, slowest = (np.percentile(times, (50, 99, 100)) * 1e3).tolist()
        return Round(alone_p50, alone_p99, burnt_p50, burnt_p99, p50, p99, slowest, cores, other)

    def _beside(self, situation: str, act: str, *extra: float | str) -> tuple[list[float], float, int]:
        """The innocent tenant's calls while the other one's process does something, the cores that it used, and what it got done."""
        process = self._others[situation]
        process.send(act, time.monotonic() + 1.0, self._seconds + 1.0, *extra)
        time.sleep(1.5)
        used, begun = cpu_seconds(process.pid), time.monotonic()
        times = self._calls()
        cores = (cpu_seconds(process.pid) - used) / (time.monotonic() - begun)
        return times, cores, process.result()

    def _calls(self) -> list[float]:
        times: list[float] = together(self._decoder, "calls", self._seconds)[0]
        return times

    def _beside_a_frozen_client(self) -> list[float]:
        other = self._others["frozen"]
        other.call("large_calls", True)  # what their memory is kept in by the allocator is not the reader's fault
        before = pss_bytes(self._executor)
        reply = other.call("large_calls", False)
        os.kill(other.pid, signal.SIGSTOP)
        try:
            self.kept = max(self.kept, (pss_bytes(self._executor) - before) / reply)
            return self._calls()
        finally:
            os.kill(other.pid, signal.SIGCONT)
            other.call("thawed")


def show(rounds: dict[str, list[Round]]) -> None:
    rows = []
    for situation, measured in rounds.items():
        *times, other = (statistics.median(column) for column in zip(*measured, strict=True))
        rows.append((situation, *(f"{value:.2f}" for value in times), f"{other:,.0f}"))
    head = (
        "beside", "alone: p50 ms", "p99 ms", "burnt: p50 ms", "p99 ms", "p50 ms", "p99 ms", "slowest ms", "the other's cores", "its calls"
    )  # fmt: skip
    print_table(head, rows)


def report(rounds: dict[str, list[Round]], kept: float) -> Report:
    """The bars are of medians over rounds, each round compared within itself."""
    result = Report("bench_isolation")
    for situation, measured in rounds.items():
        for name, values in zip(Round._fields, zip(*measured, strict=True), strict=True):
            result.figure(f"{situation}_{name}", round(statistics.median(values), 3))
        result.figure(
            f"{situation}_p99_burnt_over_alone",
            round(statistics.median(r.burnt_p99 / r.alone_p99 for r in measured), 3),
        )
        result.bar(
            f"{situation}_p50_over_alone", statistics.median(r.p50 / r.alone_p50 for r in measured), "<=", P50_BAR
        )
        result.bar(
            f"{situation}_p99_over_alone", statistics.median(r.p99 / r.alone_p99 for r in measured), "<=", P99_BAR
        )
    result.bar("frozen_replies_kept", kept, "<=", REPLIES_BAR)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="3 rounds of 2 s with 250,000 rows instead of 5 of 8 s with 10^6"
    )
    parser.add_argument("--only", choices=SITUATIONS, nargs="+", help="these situations only")
    args = parser.parse_args()
    prepare(threads=1)
    chosen = args.only or SITUATIONS
    rounds: dict[str, list[Round]] = {situation: [] for situation in chosen}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        seconds, rows, count = (2.0, 250_000, 3) if args.quick else (8.0, 1_000_000, 5)
        benches: dict[str, Bench] = {}
        for situations, inner in ((NARROW_SITUATIONS, 0), (WIDE_SITUATIONS, WIDE)):
            if mine := [situation for situation in chosen if situation in situations]:
                place = Path(folder) / str(inner)
                place.mkdir()
                benches.update(dict.fromkeys(mine, Bench(stack, place, seconds, rows, mine, inner)))
        for number in range(count):
            for situation in chosen:
                progress(f"round {number + 1} of {count}: {situation}")
                rounds[situation].append(benches[situation].measure(situation))
        kept = max(bench.kept for bench in benches.values())
    show(rounds)
    return report(rounds, kept).finish()


if __name__ == "__main__":
    sys.exit(main())
