"""A model that several ranks hold, against one executor: memory of each rank, a training step and a decoding step.

One program trains or decodes at a time, at one executor and at services of ranks: whole layers on each, parts of every tensor on each, and the
latter with few rows spread over all. They take turns, so that what else the machine does meets all of them.

    python scripts/bench_shard.py --tiny      # on a CPU, about a minute and a half on two cores
    python scripts/bench_shard.py --called    # clients map no weights: every product is a call
    python scripts/bench_shard.py --gpus 0-1  # products of 4096 × 11008, one after another, at ranks on these GPUs
    python scripts/bench_shard.py --gpus 0 --ranks 2  # ... at two ranks that share one
    python scripts/bench_shard.py --gpus 0-1 --trainers --layers 40  # eight LoRA trainers on Llama-13B's shapes, and FSDP jobs
    python scripts/bench_shard.py --gpus 0-1 --clients 2-3 --layers 46  # Gemma2-27B's shapes; four trainers, then four decoders, on other GPUs
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from _processes import LoraClient, Worker, executor, idle_workers, prepare, progress, save_llama, together, workers

from symbiosis.base.reporting import Report, print_table
from symbiosis.executor import mps

LORA = (8, ("q_proj", "k_proj", "v_proj", "o_proj"))
SHAPE = {"train": (2, 64), "decode": (1, 16, 32)}  # sequences, tokens of each; and of those that follow
ONE = "one executor"
SPREAD_ROWS = 16
STEP_BAR = 1.15  # over one executor's
WEIGHTS_BAR = 1.02  # of a rank, over its equal share: parts are cut at pages
LAYERS_BAR = 1.15  # the same of whole layers, of which one rank may have one more
OTHER_BAR = 1.1  # of a rank, beside its weights, over that of one executor
SERVED = "--no-share-weights", "--serve=*gate_proj", "--serve=*up_proj"  # on GPUs: products of one shape
PAGES = "symbiosis-weights", "symbiosis-commons"


@dataclass
class Side:
    """One way to hold the model, and what was measured of it."""

    name: str
    options: tuple[str, ...]
    judged: bool = True
    weights: list[int] = field(default_factory=list)  # bytes of each rank
    others: list[int] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


def sides(ranks: int) -> list[Side]:
    several = f"--ranks={ranks}"
    spread = ("--shard=fsdp", several, f"--spread-rows={SPREAD_ROWS}")
    return [
        Side(ONE, ()),
        Side("layers", ("--shard=layers", several)),
        Side("fsdp", ("--shard=fsdp", several)),
        Side("fsdp, few rows spread", spread, judged=False),  # which pays where ranks have memory or cores of their own
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small model, and few steps")
    parser.add_argument("--called", action="store_true", help="clients map no weights")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gpus", help="measure products at ranks on these GPUs instead")
    parser.add_argument("--hidden", type=int, default=4096, help="one side of these products")
    parser.add_argument("--inner", type=int, default=11008, help="the other; Llama-13B: 5120 and 13824")
    parser.add_argument("--trainers", action="store_true", help="measure eight trainers there, against FSDP jobs")
    parser.add_argument(
        "--clients", metavar="GPUS", help="measure trainers and decoders on these, which are not those of the base"
    )
    parser.add_argument("--layers", type=int, default=40, help="of the base of trainers or clients")
    options = parser.parse_args()
    if (options.clients or options.trainers) and not options.gpus:
        parser.error("--clients and --trainers need --gpus: where the base lies")
    prepare(threads=1)
    if options.gpus and options.clients:
        return elsewhere(options.gpus, options.clients, options.layers, 1.0 if options.tiny else 4.0).finish()
    if options.gpus and options.trainers:
        return trainers(options.gpus, options.layers, 1.0 if options.tiny else 6.0).finish()
    if options.gpus:
        return on_gpus(
            options.gpus, options.ranks, (1024, 2048, 2) if options.tiny else (options.hidden, options.inner, 3)
        ).finish()
    hidden, layers, seconds = (512, 8, 0.8) if options.tiny else (1024, 16, 3.0)
    found = sides(options.ranks)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        nbytes = 4 * save_llama(Path(folder) / "model", hidden, layers)
        clients = [served(stack, Path(folder), number, side, options.called) for number, side in enumerate(found)]
        pool = stack.enter_context(workers(LoraClient, [(url, *LORA) for url in clients]))
        for number in range(options.rounds + 1):
            progress(f"round {number} of {options.rounds}")
            for side, worker in zip(found, pool, strict=True):
                # in the first, memory is allocated, and executors learn
                measure(side, worker, seconds, counts=number > 0)
    return report(found, options.ranks, nbytes).finish()


def served(stack: ExitStack, folder: Path, number: int, side: Side, called: bool) -> str:
    """Start the executor or the service, note what memory it takes, and return its endpoint."""
    words = [f"--listen=local://{folder}/{number}.sock", "--batch-invariant", *side.options]
    if side.name == "fsdp, few rows spread":
        words.remove("--batch-invariant")
    child = stack.enter_context(executor(folder / "model", 1, *words, *(("--no-share-weights",) if called else ())))
    processes = ranks_of(child.pid) or [child.pid]
    for pid in processes:
        weights, whole = memory_of(pid)
        side.weights.append(weights)
        side.others.append(whole - weights)
    return child.endpoints[0]


def measure(side: Side, worker: Worker, seconds: float, counts: bool) -> None:
    for what, shape in SHAPE.items():
        pace = together([worker], what, seconds, *shape)[0]
        if counts:
            side.seconds[what].append(statistics.median(pace.steps))


def ranks_of(pid: int) -> list[int]:
    """The processes of a service's ranks."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def memory_of(pid: int) -> tuple[int, int]:
    """Bytes of memory that a process holds: weights that it shares, and all that is no file's. What n processes map counts 1/n each."""
    weights = whole = 0
    name = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            name = rest[4] if len(rest) > 4 else ""
        elif first == "Pss:" and (not name.startswith("/") or name.startswith("/memfd")):
            nbytes = 1024 * int(rest[0])
            whole += nbytes
            weights += nbytes if any(page in name for page in PAGES) else 0
    return weights, whole


def report(found: Sequence[Side], ranks: int, nbytes: int) -> Report:
    made, (one, *others) = Report("bench_shard"), found
    rows = []
    for side in found:
        ratios = {what: statistics.median(side.seconds[what]) / statistics.median(one.seconds[what]) for what in SHAPE}
        rows.append((
            side.name, " ".join(f"{n / 2**20:.1f}" for n in side.weights), " ".join(f"{n / 2**20:.0f}" for n in side.others),
            *(f"{1e3 * statistics.median(side.seconds[what]):.1f} ({ratios[what]:.2f})" for what in SHAPE),
        ))  # fmt: skip
    print_table(("held by", "weights, MiB each", "other memory, MiB", "training step, ms", "token, ms"), rows)
    for side in others:
        key = side.name.partition(",")[0] + ("_spread" if "spread" in side.name else "")
        for what in SHAPE:
            ratio = round(statistics.median(side.seconds[what]) / statistics.median(one.seconds[what]), 3)
            if side.judged:
                made.bar(f"{key}_{what}_over_one", ratio, "<=", STEP_BAR)
            else:
                made.figure(f"{key}_{what}_over_one", ratio)
        if "fsdp" in key:  # where clients' own tensors lie in the parts, too
            made.bar(f"{key}_weights_over_share", round(max(side.weights) * ranks / nbytes, 4), "<=", WEIGHTS_BAR)
        elif side.weights[0]:
            made.bar(
                f"{key}_weights_over_share", round(max(side.weights) * ranks / one.weights[0], 4), "<=", LAYERS_BAR
            )
        made.bar(f"{key}_other_memory_over_one", round(max(side.others) / one.others[0], 3), "<=", OTHER_BAR)
    made.figure("ranks", ranks)
    made.figure("cores", len(os.sched_getaffinity(0)))
    return made


def on_gpus(devices: str, ranks: int, sizes: tuple[int, int, int]) -> Report:
    """Products at one executor, and at ranks that hold whole layers or parts of all, called from the first GPU. `ranks`: how many share the GPU, if
    there is but one. `sizes`: hidden, inner, layers."""
    from _shard_gpu import LayerByLayer, save_wide

    hidden, inner, layers = sizes
    layers_on = (f"--devices={devices}", *((f"--ranks={ranks}",) if devices.isdecimal() else ()))
    parts = (*layers_on, "--shard=fsdp")
    first = f"cuda:{devices.partition('-')[0].partition(',')[0]}"
    found = {
        ONE: (f"--device={first}",),
        "layers": layers_on,
        "fsdp, in place": parts,
        "fsdp, gathered": (*parts, f"--gather-buffers={6 * 2 * hidden * inner}"),
        "fsdp, on shards": (*parts, "--spread-rows=1024"),
    }
    made, rows = Report("bench_shard"), []
    best: dict[tuple[str, int, bool], float] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        mps.running(),
        idle_workers(LayerByLayer, len(found)) as clients,
        ExitStack() as stack,
    ):
        save_wide(Path(folder) / "model", hidden, inner, layers)
        progress("starting")
        urls = [f"local://{folder}/{number}.sock" for number in range(len(found))]
        for url, words in zip(urls, found.values(), strict=True):  # those that are not called sleep
            stack.enter_context(executor(Path(folder) / "model", 1, f"--listen={url}", *SERVED, *words))
        for name, url, client in zip(found, urls, clients, strict=True):
            client.begin(url, first)
            client.result()
            for captured, count in product((False, True), (8, 1024)):
                how = "captured" if captured else "eager"
                best[name, count, captured] = us = client.call("layer_us", count, captured, 20)
                progress(f"{name}, {count} rows, {how}: {us:.1f} us")
    for name in found:
        rows.append(
            (name, *(f"{best[name, count, captured]:.1f}" for captured in (False, True) for count in (8, 1024)))
        )
    print_table(("us a product", "eager: 8 rows", "1,024", "captured: 8 rows", "1,024"), rows)
    for (name, count, captured), us in best.items():
        made.figure(f"{name}_{count}_{'captured' if captured else 'eager'}_us", round(us, 1))
    for count, bar in ((8, 2.0), (1024, 1.3)):
        better = min(us for (name, rows, _), us in best.items() if name.startswith("fsdp") and rows == count)
        one = min(us for (name, rows, _), us in best.items() if name == ONE and rows == count)
        made.bar(f"fsdp_{count}_rows_over_one", round(better / one, 3), "<=", bar)
    made.figure("hidden", hidden)
    made.figure("inner", inner)
    return made


def trainers(devices: str, layers: int, seconds: float) -> Report:
    """Trainers on these GPUs, each of which joins the rank on its own, and as many FSDP jobs as bring most."""
    from _shard_trainers import llama_13b, measure

    from symbiosis.executor.options import gpus_of

    load = llama_13b(layers, gpus_of(devices), seconds)
    with mps.running():
        return measure(load, {"layers": (f"--devices={devices}", "--share-weights")})


def elsewhere(devices: str, homes: str, layers: int, seconds: float) -> Report:
    """Trainers, then decoders, on GPUs that hold nothing of the base, so that every product is a call to another GPU."""
    from _gpu import Job
    from _shard_trainers import gemma_27b, measure_elsewhere

    from symbiosis.executor.options import gpus_of

    load = gemma_27b(layers, gpus_of(devices), gpus_of(homes), seconds)
    layers_on = (f"--devices={devices}",)
    parts = (*layers_on, "--shard=fsdp")
    ways = {"layers": layers_on, "parts": parts, "parts, few rows spread": (*parts, f"--spread-rows={SPREAD_ROWS}")}
    if devices.isdecimal():
        ways = {ONE: layers_on}
    with mps.running():
        return measure_elsewhere(load, [load.job, Job("decode", 1, 128)], ways)


if __name__ == "__main__":
    sys.exit(main())
