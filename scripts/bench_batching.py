"""Eight generators of different batch sizes and adapters under each batching policy: throughput and time per token.

Each generator is a process; it stays for all policies and joins the executor of the one whose turn it is. The policies take
turns in every round, on executors that are alike in everything else.

    python scripts/bench_batching.py --quick     # about three minutes
    python scripts/bench_batching.py
"""

import argparse
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from _processes import LoraClient, Pace, Worker, executor, prepare, progress, save_llama, together, workers

from symbiosis.base.reporting import Report, print_table
from symbiosis.client.session import Session
from symbiosis.protocol import Op

POLICIES = ("immediate", "lockstep", "opportunistic")
PROMPT, TOKENS = 16, 64
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Generator:
    """How many sequences it decodes at a time, and its adapter."""

    batch: int
    rank: int
    targets: tuple[str, ...]


GENERATORS = (
    Generator(1, 8, ("q_proj", "v_proj")),
    Generator(2, 16, ATTENTION),
    Generator(1, 4, ATTENTION + MLP),
    Generator(3, 8, ("q_proj", "v_proj")),
    Generator(4, 32, ATTENTION),
    Generator(2, 8, MLP),
    Generator(1, 64, ("q_proj",)),
    Generator(4, 16, ATTENTION + MLP),
)


class PolicyClient:
    """A generator with a client for each policy's executor."""

    def __init__(self, endpoints: dict[str, str], generator: Generator) -> None:
        self._batch = generator.batch
        self._clients = {
            policy: LoraClient(endpoint, generator.rank, generator.targets) for policy, endpoint in endpoints.items()
        }
        for client in self._clients.values():
            client.leave()

    def generate(self, start: float, seconds: float, policy: str) -> Pace:
        """Decode, then leave: policies that wait for everybody must not wait for a generator that has ended."""
        client = self._clients[policy]
        try:
            return client.decode(start, seconds, self._batch, PROMPT, TOKENS)
        finally:
            client.leave()


@dataclass
class Round:
    """One policy in one round."""

    tokens_per_s: float
    latency_s: float  # mean over the generators of each one's mean time per token
    p50_s: float
    p99_s: float
    mean_batch: float


def run(generators: Sequence[Worker], policy: str, endpoint: str, seconds: float) -> Round:
    before = batch_sizes(endpoint)
    paces: list[Pace] = together(generators, "generate", seconds, policy)
    sizes = batch_sizes(endpoint) - before
    tokens = [
        len(pace.steps) * generator.batch / pace.elapsed for pace, generator in zip(paces, GENERATORS, strict=True)
    ]
    p50, p99 = np.percentile(np.concatenate([pace.steps for pace in paces]), (50, 99)).tolist()
    return Round(
        sum(tokens), statistics.mean(statistics.mean(pace.steps) for pace in paces), p50, p99,
        sum(size * count for size, count in sizes.items()) / sizes.total(),
    )  # fmt: skip


def batch_sizes(endpoint: str) -> Counter[int]:
    """How many products of how many calls the executor has run."""
    session = Session(endpoint, observer=True)
    try:
        snapshot = msgspec.msgpack.decode(bytes(session.call(Op.STATS, 0).numpy()))
    finally:
        session.close()
    return Counter({int(size): count for size, count in snapshot["batch_sizes"].items()})


def show(rounds: dict[str, list[Round]]) -> None:
    rows = []
    for policy, measured in rounds.items():
        tokens, latency, p50, p99, batch = (
            statistics.median(getattr(r, name) for r in measured) for name in Round.__dataclass_fields__
        )
        times = (f"{seconds * 1e3:.1f}" for seconds in (latency, p50, p99))
        rows.append((policy, f"{tokens:.1f}", *times, f"{batch:.2f}"))
    head = ("policy (median of rounds)", "tokens/s", "mean ms/token", "p50", "p99", "calls per product")
    print_table(head, rows, title=f"{len(GENERATORS)} generators, {sum(g.batch for g in GENERATORS)} sequences")


def report(rounds: dict[str, list[Round]], args: argparse.Namespace, parameters: int) -> Report:
    """The bars compare within each round, with the better of the two other policies; their medians count."""
    result = Report("bench_batching")
    result.figure("parameters", parameters)
    result.figure("threads", args.threads)
    result.figure("executor_threads", args.executor_threads)
    for policy, measured in rounds.items():
        for name in Round.__dataclass_fields__:
            result.figure(f"{policy}_{name}", statistics.median(getattr(r, name) for r in measured))
    mine = rounds["opportunistic"]
    others = list(zip(rounds["immediate"], rounds["lockstep"], strict=True))
    faster = [m.tokens_per_s / max(o.tokens_per_s for o in other) for m, other in zip(mine, others, strict=True)]
    sooner = [m.latency_s / min(o.latency_s for o in other) for m, other in zip(mine, others, strict=True)]
    result.bar("opportunistic_throughput_ratio", statistics.median(faster), ">=", 1.0)
    result.bar("opportunistic_latency_ratio", statistics.median(sooner), "<=", 1.0)
    return result


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 rounds of 6 s for each policy instead of 5 of 20 s")
    parser.add_argument("--hidden", type=int, default=1024, help="hidden size, a multiple of 128")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1, help="threads of every generator")
    parser.add_argument("--executor-threads", type=int, default=1, help="threads of every executor")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    prepare(args.threads)
    seconds, count = (6.0, 2) if args.quick else (20.0, 5)
    rounds: dict[str, list[Round]] = {policy: [] for policy in POLICIES}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = Path(folder) / "model"
        parameters = save_llama(model, args.hidden, args.layers)
        endpoints = {}
        for policy in POLICIES:
            options = ("--listen", f"local://{folder}/{policy}.sock", "--policy", policy, "--no-share-weights")
            endpoints[policy] = stack.enter_context(executor(model, args.executor_threads, *options)).endpoints[0]
        generators = stack.enter_context(workers(PolicyClient, [(endpoints, generator) for generator in GENERATORS]))
        for policy in POLICIES:  # memory is allocated, and the executor learns
            progress(f"warm-up, {policy}")
            run(generators, policy, endpoints[policy], 1.0)
        for number in range(count):
            for policy in POLICIES:
                progress(f"{policy}, round {number + 1} of {count}")
                rounds[policy].append(run(generators, policy, endpoints[policy], seconds))
    show(rounds)
    return report(rounds, args, parameters).finish()


if __name__ == "__main__":
    sys.exit(main())
