"""What HTTP costs an engine: its pace with streaming clients over its pace alone, on a CPU, with the demo model.

The engine runs in this process, with the weights of an executor in another, as in `symbiosis serve`. HTTP has a third, and the clients a fourth, which
reads events and does nothing else with them. `load` is the part of a core that the clients took.

    python scripts/bench_api.py --quick     # about a minute
    python scripts/bench_api.py
    python scripts/bench_api.py --cluster   # what the front end of `symbiosis cluster` costs, over the one server behind it
"""

import argparse
import asyncio
import json
import multiprocessing
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _processes import executor, prepare, progress

import symbiosis
from symbiosis.base.procs import python
from symbiosis.base.reporting import Report, print_table
from symbiosis.protocol.cluster_state import told_by
from symbiosis.server.ipc.engine_ipc import EngineReady, FrontOptions
from symbiosis.server.ipc.engine_server import EngineServer
from symbiosis.server.launch.serve_processes import RestartingChild, http_words
from symbiosis.serving import Engine
from symbiosis.serving.request import Output, Request, Sampling

PROMPT = b"def average(numbers):"
DEMO = Path(symbiosis.__file__).parent / "demo_model"
COUNTS = (32, 256)
LEAST = 0.9


class Clients(NamedTuple):
    """What the process of the clients found out."""

    tokens: int
    seconds: float
    cpu: float


def alone(engine: Engine, clients: int, tokens: int) -> float:
    """Tokens per second of requests that are made in the engine's process."""
    left, over, lock = [clients], threading.Event(), threading.Lock()

    def told(output: Output) -> None:
        if output.finish is not None:
            with lock:
                left[0] -= 1
                if not left[0]:
                    over.set()

    sampling = Sampling(max_tokens=tokens, ignore_eos=True, seed=1)
    begun = time.perf_counter()
    for _ in range(clients):
        engine.submit(Request(id=engine.next_id(), prompt=tuple(PROMPT), sampling=sampling), told)
    assert over.wait(600)
    return clients * tokens / (time.perf_counter() - begun)


async def _stream(port: int, tokens: int) -> int:
    """The events of one completion."""
    body = {
        "model": "demo",
        "prompt": PROMPT.decode(),
        "max_tokens": tokens,
        "ignore_eos": True,
        "seed": 1,
        "stream": True,
    }
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        % len(data)
        + data
    )
    told = await reader.read()
    writer.close()
    assert told.startswith(b"HTTP/1.1 200") and b"[DONE]" in told, told[:200]
    return tokens


def run_clients(port: int, clients: int, tokens: int, results: Any) -> None:
    async def together() -> int:
        return sum(await asyncio.gather(*(_stream(port, tokens) for _ in range(clients))))

    begun, before = time.perf_counter(), time.process_time()
    count = asyncio.run(together())
    results.put(Clients(count, time.perf_counter() - begun, time.process_time() - before))


def over_http(port: int, clients: int, tokens: int) -> Clients:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=run_clients, args=(port, clients, tokens, results), daemon=True)
    process.start()
    found: Clients = results.get(timeout=600)
    process.join()
    return found


def start_http(engine: Engine, stack: ExitStack) -> int:
    """Its port."""
    ours, theirs = socket.socketpair()
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    http = RestartingChild("the HTTP process")
    options = FrontOptions(model="demo", folder=str(DEMO))
    with theirs:
        http.start(http_words(listener, theirs, options), (listener.fileno(), theirs.fileno()))
    stack.callback(http.kill)
    welcome = EngineReady(
        model="demo", longest=engine.longest, most_tokens=engine.most_tokens, vocabulary=engine.vocabulary
    )
    link = EngineServer(engine, ours, welcome)
    stack.callback(link.close)
    return int(listener.getsockname()[1])


FILE = """
name: bench
port: 0
frozen_s: 60
models:
  demo: {server: {max-batch: 256, memory: 512MiB, max-requests: 512}}
"""


@contextmanager
def cluster() -> Iterator[tuple[int, int]]:
    """Run a cluster of one server; the ports of the server and of the front end."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bench.yaml"
        file.write_text(FILE)
        words = python("-m", "symbiosis", "cluster", "up", str(file))
        with (Path(folder) / "log").open("w") as log:
            process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout
            line = process.stdout.readline()
            if not line:
                raise RuntimeError((Path(folder) / "log").read_text())
            (server,) = told_by("bench").of_kind("server")
            yield int(server.url.rpartition(":")[2]), int(line.rpartition(":")[2].partition("/")[0])
        finally:
            process.terminate()
            process.wait(60)


async def _first(port: int) -> float:
    """Milliseconds until the first event of a stream."""
    data = json.dumps({"model": "demo", "prompt": PROMPT.decode(), "max_tokens": 4, "seed": 1, "stream": True}).encode()
    begun = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    writer.write(head % len(data) + data)
    await reader.readuntil(b"data: {")
    found = time.perf_counter() - begun
    await reader.read()
    writer.close()
    return found * 1e3


def first_tokens(ports: tuple[int, int], times: int) -> list[tuple[float, float]]:
    """Such times at both ports, taking turns, after some that do not count."""

    async def taking_turns() -> list[tuple[float, float]]:
        return [(await _first(ports[0]), await _first(ports[1])) for _ in range(times + 10)]

    return asyncio.run(taking_turns())[10:]


def front_end(rounds: int, tokens: int, report: Report) -> None:
    """Compare the front end of a cluster with the server behind it."""
    most, paces = max(COUNTS), []
    with cluster() as ports:
        firsts = first_tokens(ports, 50 * rounds)
        for number in range(
            -1, rounds
        ):  # the first one does not count: a server gets faster when it has seen such a batch
            progress(f"{most} clients, round {number + 1} of {rounds}")
            found = {port: over_http(port, most, tokens) for port in ports[:: 1 if number % 2 else -1]}
            paces.append(tuple(found[port].tokens / found[port].seconds for port in ports))
        del paces[0]
    first = [statistics.median(one) for one in zip(*firsts, strict=True)]
    pace = [statistics.median(one) for one in zip(*paces, strict=True)]
    ratio = statistics.median(through / there for there, through in paces)
    print_table(
        ["", "first token, ms", f"tokens/s of {most}"],
        [
            [name, f"{ms:.2f}", f"{each:.0f}"]
            for name, ms, each in zip(("server", "front end"), first, pace, strict=True)
        ],
    )
    report.bar("milliseconds that the front end adds to p50 of a first token", first[1] - first[0], "<=", 2.0)
    report.bar(f"pace of {most} streams through the front end over the server's", ratio, ">=", 0.95)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer tokens and rounds")
    parser.add_argument("--cluster", action="store_true", help="the front end of a cluster over its server")
    arguments = parser.parse_args()
    rounds, tokens = (2, 64) if arguments.quick else (5, 200)
    prepare(threads=1)
    torch.set_num_threads(1)
    report, rows = Report("bench_api"), []
    if arguments.cluster:
        front_end(rounds, tokens, report)
        return report.finish()
    with ExitStack() as stack:
        served = stack.enter_context(executor(DEMO, 1))
        engine = stack.enter_context(Engine(served.endpoints[0], DEMO, max_batch=max(COUNTS), memory=1 << 29))
        port = start_http(engine, stack)
        over_http(port, 4, 8)  # until it is ready
        for clients in COUNTS:
            pairs = []
            for number in range(rounds):
                progress(f"{clients} clients, round {number + 1} of {rounds}")
                pairs.append((alone(engine, clients, tokens), over_http(port, clients, tokens)))
            by_itself = statistics.median(pace for pace, _ in pairs)
            served = statistics.median(found.tokens / found.seconds for _, found in pairs)
            load = statistics.median(found.cpu / found.seconds for _, found in pairs)
            ratio = statistics.median(found.tokens / found.seconds / pace for pace, found in pairs)
            rows.append([str(clients), f"{by_itself:.0f}", f"{served:.0f}", f"{ratio:.2f}", f"{load:.2f}"])
            report.bar(f"pace of {clients} clients over the engine's alone", ratio, ">=", LEAST)
    print_table(["clients", "tokens/s alone", "tokens/s by HTTP", "of it", "load"], rows)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
