"""Punica's placement against round robin and least loaded, over servers that are modelled by measured steps. No GPU, no server: events.

    python scripts/simulate_cluster.py --quick             # half a minute
    python scripts/simulate_cluster.py --plot FOLDER

A decoding step takes what `bench_serve.py step` took on an H100 (Llama-7B's shapes, an adapter of rank 16 for each request): a part for the
weights, one for each sequence, and one for each token whose keys and values are read. A prompt stops the others for as long as it takes, which
was not measured: 35 µs a token. Lengths and adapters are those of Punica's load (`_punica.py`).

The hour: requests come to 16 GPUs faster and faster for half an hour, up to 1.1 times what the GPUs can do, and slower and slower for another.
The crowd: 10^5 requests a minute come to 1,000 GPUs. Full: a fifth more requests than the GPUs can do. Calm: 30 % of what they can do. All GPUs are
there at the start. Tokens count that are made until a minute after the last request has come.
"""

import argparse
import heapq
import itertools
import math
import random
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import NamedTuple

from _punica import lengths_like_sharegpt, popularity

from symbiosis.base.reporting import Report, print_table
from symbiosis.cluster.placement import Fleet, PlacedServer, RoutingRequest, State, admit
from symbiosis.cluster.scaling import consolidate, scale

# 9.68 and 18.35 ms for the base at 512 and 2,048 tokens of 32 sequences each, 11.17 and 20.33 with 32 adapters
PER_TOKEN_S = (20.33e-3 - 11.17e-3) / (32 * (2048 - 512))
PER_SEQUENCE_S = (11.17e-3 - 9.68e-3) / 32
WEIGHTS_S = 11.17e-3 - 32 * PER_SEQUENCE_S - 32 * 512 * PER_TOKEN_S
PROMPT_S = 35e-6  # a token: assumed
START_S, TICK_S = 30.0, 1.0  # until a GPU that was asked for serves: assumed; between two looks at the whole
IDLE_S = 20.0  # a GPU that has nothing to do for so long is given back
GRACE_S = 60.0  # for what is under way when no more requests come
BATCH, BLOCK, BLOCKS = 32, 16, 7000  # sequences; tokens; as many as 56 GiB hold
DRAWN, LONGEST = 100_000, 4096  # requests, then again from the first; tokens
MODEL = "llama"


@dataclass(eq=False)
class Request:
    """A request and what became of it."""

    number: int
    arrived: float
    prompt: int
    output: int
    adapter: str
    produced: int = 0
    finished: float = math.inf
    first: float = math.inf

    @property
    def wish(self) -> RoutingRequest:
        blocks = math.ceil((self.prompt + self.output) / BLOCK)
        return RoutingRequest(model=MODEL, pages=blocks, adapter=self.adapter)


@dataclass(eq=False)
class Machine:
    """One GPU: all sequences advance by one token a step, and prompts stop them."""

    number: int
    requests: dict[int, tuple[Request, float]] = field(default_factory=dict)  # with the step at which each ends
    ends: list[tuple[float, int]] = field(default_factory=list)
    now: float = 0.0
    steps: float = 0.0
    tokens: float = 0.0  # in all contexts
    stopped: float = 0.0  # seconds of prompts to come
    version: int = 0  # of what is foreseen

    def advance(self, to: float) -> None:
        """Compute until then. In `s` steps contexts grow, so they take `a s + b s²` seconds."""
        left, self.now = to - self.now, to
        held = min(left, self.stopped)
        self.stopped -= held
        if (left := left - held) > 0 and self.requests:
            a, b = self._pace()
            steps = (math.sqrt(a * a + 4 * b * left) - a) / (2 * b)
            self.steps += steps
            self.tokens += steps * len(self.requests)

    def add(self, request: Request, now: float) -> None:
        self.advance(now)
        self.stopped += PROMPT_S * (request.prompt + request.produced)
        end = self.steps + request.output - request.produced
        self.requests[request.number] = request, end
        heapq.heappush(self.ends, (end, request.number))
        self.tokens += request.prompt + request.produced
        request.first = min(request.first, now + self.stopped + sum(self._pace()))

    def remove(self, number: int, now: float) -> Request:
        """Take a request off, whether or not it has ended."""
        self.advance(now)
        request, end = self.requests.pop(number)
        request.produced = request.output - max(0, round(end - self.steps))
        self.tokens = self.tokens - request.prompt - request.produced if self.requests else 0.0
        return request

    def next_end(self) -> tuple[float, int] | None:
        """When the next request ends, and which."""
        while self.ends and self.requests.get(self.ends[0][1], (None, math.nan))[1] != self.ends[0][0]:
            heapq.heappop(self.ends)
        if not self.ends:
            return None
        end, number = self.ends[0]
        steps = max(0.0, end - self.steps)
        a, b = self._pace()
        return self.now + self.stopped + a * steps + b * steps * steps, number

    def _pace(self) -> tuple[float, float]:
        sequences = len(self.requests)
        return WEIGHTS_S + PER_SEQUENCE_S * sequences + PER_TOKEN_S * self.tokens, PER_TOKEN_S * sequences / 2


class Cluster:
    """The machines, and the events of one run."""

    def __init__(self, gpus: int) -> None:
        self.machines = [Machine(number) for number in range(gpus)]
        self.events: list[tuple[float, int, int, int]] = []  # when, a number, the machine, its version
        self.decisions: list[float] = []  # seconds
        self.moved = 0
        self._numbers = count()

    def run(self, requests: Iterator[Request], until: float) -> list[Request]:
        """Return all requests that have come, when the time is over."""
        came: list[Request] = []
        coming, tick = next(requests, None), TICK_S
        while True:
            ending = self.events[0][0] if self.events else math.inf
            now = min(coming.arrived if coming else math.inf, ending, tick)
            if now > until:
                return came
            if now == ending:
                self._end(now)
            elif coming and now == coming.arrived:
                came.append(coming)
                self.arrive(coming, now)
                coming = next(requests, None)
            else:
                self.tick(now)
                tick += TICK_S

    def arrive(self, request: Request, now: float) -> None:
        raise NotImplementedError

    def left(self, machine: Machine, request: Request, now: float) -> None:
        raise NotImplementedError

    def tick(self, now: float) -> None:
        """Look at the whole."""

    @property
    def in_use(self) -> int:
        return len(self.machines)

    def put(self, machine: Machine, request: Request, now: float) -> None:
        machine.add(request, now)
        self.foresee(machine)

    def foresee(self, machine: Machine) -> None:
        machine.version += 1
        if (found := machine.next_end()) is not None:
            heapq.heappush(self.events, (found[0], next(self._numbers), machine.number, machine.version))

    def _end(self, now: float) -> None:
        _, _, number, version = heapq.heappop(self.events)
        machine = self.machines[number]
        if machine.version != version or (found := machine.next_end()) is None:
            return
        request = machine.remove(found[1], now)
        request.produced, request.finished = request.output, now
        self.left(machine, request, now)
        self.foresee(machine)


class Ours(Cluster):
    """Placement, consolidation and scaling as in `symbiosis.cluster`."""

    def __init__(self, gpus: int) -> None:
        super().__init__(gpus)
        self.fleet = Fleet(self._fresh(number) for number in range(gpus))
        self.waiting: deque[Request] = deque()
        self.starting: dict[int, float] = {}
        self.use: list[int] = []
        self.worked = [0.0] * gpus  # when each was last seen at work

    def _fresh(self, number: int, state: State = State.READY) -> PlacedServer:
        return PlacedServer(number=number, model=MODEL, batch=BATCH, pages=BLOCKS, free=BLOCKS, state=state)

    def arrive(self, request: Request, now: float) -> None:
        self.waiting.append(request)
        if len(self.waiting) == 1:
            self._admit(now)

    def _admit(self, now: float) -> None:
        """Place what waits: the first ones, as long as they fit."""
        while self.waiting:
            begun = time.perf_counter()
            placed = admit([self.waiting[0].wish], self.fleet, Counter(), {})
            self.decisions.append(time.perf_counter() - begun)
            if not placed:
                return
            self.put(self.machines[placed[0][1].number], self.waiting.popleft(), now)

    def left(self, machine: Machine, request: Request, now: float) -> None:
        self.fleet.put(self.fleet[machine.number].holds(-1, -request.wish.pages))
        self._admit(now)

    def tick(self, now: float) -> None:
        for number in [number for number, at in self.starting.items() if at <= now]:
            del self.starting[number]
            self.fleet.put(self._fresh(number))
        self._admit(now)
        for server in self.fleet.servers:
            if server.running or server.state is State.STARTING:
                self.worked[server.number] = now
        idle = {server.number for server in self.fleet.servers if now - self.worked[server.number] >= IDLE_S}
        change = scale(self.fleet.servers, len(self.waiting), 1, len(self.machines), idle)
        for number in change.release:
            self.fleet.drop(number)
        for number in [m.number for m in self.machines if m.number not in self.fleet][: change.start]:
            self.fleet.put(self._fresh(number, State.STARTING))
            self.starting[number] = now + START_S
        self._consolidate(now)
        self.use.append(self.in_use)

    def _consolidate(self, now: float) -> None:
        light = (server for server in self.fleet.servers if server.running and server.is_light)
        wishes = {s.number: {n: r.wish for n, (r, _) in self.machines[s.number].requests.items()} for s in light}
        if (moves := consolidate(self.fleet.servers, wishes)) is None:
            return
        for number, target in moves.requests.items():
            request = self.machines[moves.server].remove(number, now)
            self.fleet.put(self.fleet[moves.server].holds(-1, -request.wish.pages))
            self.fleet.put(self.fleet[target].holds(1, request.wish.pages, request.adapter))
            self.put(self.machines[target], request, now)
            self.moved += 1
        self.foresee(self.machines[moves.server])

    @property
    def in_use(self) -> int:
        return len(self.fleet.servers)


class Peer(Cluster):
    """Every GPU has a queue of its own, and a request goes to one at once."""

    def __init__(self, gpus: int) -> None:
        super().__init__(gpus)
        self.queues: list[deque[Request]] = [deque() for _ in self.machines]

    def choose(self) -> Machine:
        raise NotImplementedError

    def arrive(self, request: Request, now: float) -> None:
        begun = time.perf_counter()
        machine = self.choose()
        self.decisions.append(time.perf_counter() - begun)
        self.queues[machine.number].append(request)
        self._admit(machine, now)

    def left(self, machine: Machine, request: Request, now: float) -> None:
        self._admit(machine, now)

    def _admit(self, machine: Machine, now: float) -> None:
        queue = self.queues[machine.number]
        while queue and len(machine.requests) < BATCH:
            self.put(machine, queue.popleft(), now)


class RoundRobin(Peer):
    """One after the other."""

    def __init__(self, gpus: int) -> None:
        super().__init__(gpus)
        self._turn = count()

    def choose(self) -> Machine:
        return self.machines[next(self._turn) % len(self.machines)]


class LeastLoaded(Peer):
    """The one with the fewest requests."""

    def choose(self) -> Machine:
        return min(self.machines, key=lambda each: len(each.requests) + len(self.queues[each.number]))


KINDS: dict[str, Callable[[int], Cluster]] = {"punica": Ours, "round robin": RoundRobin, "least loaded": LeastLoaded}


def requests_at(rate: Callable[[float], float], most: float, seed: int = 1) -> Iterator[Request]:
    """Requests that come at `rate(now)` a second, at most `most`: a Poisson process that is thinned."""
    chance, now = random.Random(seed), 0.0
    kinds = zip(lengths_like_sharegpt(DRAWN, LONGEST), popularity("skewed", DRAWN), strict=True)
    for number, ((prompt, output), adapter) in enumerate(itertools.cycle(kinds)):
        while True:
            now += chance.expovariate(most)
            if chance.random() * most < rate(now):
                break
        yield Request(number, now, prompt, output, f"adapter-{adapter}")


def capacity() -> float:
    """Requests per second of one GPU that always runs a whole batch."""
    machine, ended = Machine(0), 0
    waiting = requests_at(lambda _: 1.0, 1.0)
    now = 0.0
    for _ in range(4000):
        while len(machine.requests) < BATCH:
            machine.add(next(waiting), now)
        found = machine.next_end()
        assert found
        now = found[0]
        machine.remove(found[1], now)
        ended += 1
    return ended / now


class Outcome(NamedTuple):
    """What a run shows."""

    tokens_per_s: float
    gpus: float  # in use, on average of the second half
    first_s: float  # the median of those that began
    decision_us: float  # 99 of 100
    moved: int
    came: list[Request]
    use: list[int]


def run(kind: str, gpus: int, requests: Iterator[Request], seconds: float) -> Outcome:
    """Simulate so many seconds of requests."""
    cluster, ends = KINDS[kind](gpus), seconds + GRACE_S
    came = cluster.run(itertools.takewhile(lambda request: request.arrived < seconds, requests), ends)
    for machine in cluster.machines:
        for number in list(machine.requests):
            machine.remove(number, ends)
    use = cluster.use[: int(seconds)] if isinstance(cluster, Ours) else [gpus]
    steady = use[len(use) // 2 :]  # at the start all are there
    firsts = [request.first - request.arrived for request in came if request.first < math.inf]
    slow = statistics.quantiles(cluster.decisions, n=100)[98]
    made = sum(request.produced for request in came)
    return Outcome(
        made / seconds, statistics.fmean(steady), statistics.median(firsts), slow * 1e6, cluster.moved, came, use
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the hour, and 100 GPUs for 1,000")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="where to draw the hour")
    arguments = parser.parse_args()
    hour, minutes, many = (360.0, 180.0, 100) if arguments.quick else (3600.0, 300.0, 1000)
    full, report, rows = capacity(), Report("simulate_cluster"), []
    report.figure("requests_per_s_of_one_gpu", full)
    peak, busy = 16 * full * 1.1, 1e5 / 60 * many / 1000
    loads = {
        "hour": (16, hour, lambda now: peak * max(0.02, 1 - abs(2 * now / hour - 1)), peak),
        "crowd": (many, minutes, lambda now: busy, busy),
        "full": (16, minutes, lambda now: 1.2 * 16 * full, 1.2 * 16 * full),
        "calm": (16, minutes, lambda now: 0.3 * 16 * full, 0.3 * 16 * full),
        "calm crowd": (many, minutes, lambda now: 0.3 * many * full, 0.3 * many * full),
    }  # fmt: skip
    for load, (gpus, seconds, rate, most) in loads.items():
        found: dict[str, Outcome] = {}
        for kind in KINDS:
            one = found[kind] = run(kind, gpus, requests_at(rate, most), seconds)
            rows.append([load, kind, f"{one.tokens_per_s:.0f}", f"{one.gpus:.1f} of {gpus}", f"{one.first_s:.2f}",
                         f"{one.decision_us:.0f}", one.moved])  # fmt: skip
        best = max(found[kind].tokens_per_s for kind in KINDS if kind != "punica")
        ours = found["punica"]
        over = f"{load}: tokens/s over those of the better peer"
        if load in ("hour", "crowd"):
            report.bar(over, ours.tokens_per_s / best, ">=", 1.0)
        elif load == "full":
            report.figure(over, ours.tokens_per_s / best)
        else:
            report.bar(f"{load}: GPUs released", 1 - ours.gpus / gpus, ">=", 0.5)
        if gpus == many:
            report.bar(f"{load}: microseconds of a decision, 99 of 100", ours.decision_us, "<=", 100.0)
        if arguments.plot and load == "hour":
            (arguments.plot / "simulate-cluster-hour.svg").write_text(drawn(found, seconds))
    head = ["load", "placement", "tokens/s", "GPUs in use", "first token, s", "decision, µs", "moved"]
    print_table(head, rows)
    return report.finish()


def drawn(found: dict[str, Outcome], seconds: float) -> str:
    """Return a chart of GPUs in use and of requests that come, by time, as SVG."""
    width, height = 640, 200
    ours = found["punica"]
    coming = Counter(int(60 * request.arrived / seconds) for request in ours.came)
    most = max(coming.values())

    def line(values: list[float], colour: str) -> str:
        points = " ".join(
            f"{40 + width * n / max(1, len(values) - 1):.1f},{20 + height * (1 - value):.1f}"
            for n, value in enumerate(values)
        )
        return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'

    use = line([each / 16 for each in ours.use], "#2b8a5e")
    load = line([coming[n] / most for n in range(60)], "#4a6fa5")
    text = '<text x="40" y="14" font-family="sans-serif" font-size="12">'
    told = (
        f"{text}GPUs in use of 16 (green) and requests that come (blue, of the most), over {seconds / 60:.0f} minutes"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width + 60}" height="{height + 40}">{told}</text>'
        f'<rect x="40" y="20" width="{width}" height="{height}" fill="none" stroke="#999"/>{load}{use}</svg>\n'
    )


if __name__ == "__main__":
    sys.exit(main())
