"""Split against unsplit on a GPU, eager and captured, alone and in company: Llama-2-7B shapes with random bfloat16 weights.

* `step`      a LoRA training step at 2 × 512 and 2 × 64 tokens, and
* `decode`    a token, of one program: the sides take turns.
* `models`    the same of models of other families and sizes, and whether bits are equal.
* `compiled`  a step that is compiled and captured, over the unsplit one that is captured only.
* `many`      1 to 8 programs at once, captured (or `--eager`), against as many unsplit ones: decoders, trainers, trainers with long sequences.
* `fit`       programs that do the same, one more at a time, until there is no memory for the next.
* `mixed`     8 decoders, then 6 decoders beside 2 trainers.
* `policies`  8 generators of different batch sizes and adapters under each batching policy.
* `call`      a call of one layer by each way there is to the executor.
* `cost`      what a call takes of the executor's CPU, and what for.
* `integers`  products of private clients' integers against those of floats.
* `long`      a token after 16K to 64K others, their keys and values in the host's memory: by `offload_cache`, and by transformers' offloaded cache.

The processes share the GPU by CUDA MPS, which is started if it does not run.

    python scripts/bench_gpu.py step decode
    python scripts/bench_gpu.py many --layers 16

With --eager, --batch-invariant, --no-mps or --tiny nothing is judged.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _gpu import (
    ATTENTION,
    MLP,
    Gauge,
    Job,
    Lora,
    OneLayer,
    Products,
    Program,
    Serving,
    ServingOneLayer,
    Shape,
    TimedServing,
)
from _long import LongContext, Read
from _processes import TOGETHER_S, Pace, Worker, idle_workers, prepare, progress, same_cores, together, workers

from symbiosis.base.reporting import Report, print_table
from symbiosis.executor import mps

# by all workers, and no more of it: CUDA must not have begun where processes are forked
IMPORTED = ("torch", "transformers", "peft")
LONGEST_S = 120.0  # that a measurement may take
GROUPED = "split, grads grouped"
CORES = 2  # of programs that are compared: one for the steps, one for autograd's thread
STARTED_AT_ONCE = 4
MOST_PROGRAMS = 40  # MPS serves 48 processes
OUT_OF_MEMORY = "OutOfMemoryError", "out of memory", "OUT_OF_MEMORY"  # as torch, CUDA and its driver call it
POLICY_STEPS = 300  # the same for all: `lockstep` waits for who has ended
DECODE = Job("decode", 1, 128)
SHORT, LONG = Job("train", 2, 64), Job("train", 2, 512)
JOBS = {"decode": DECODE, "2x64": SHORT, "2x512": LONG}
GENERATORS = (
    (1, Lora(8, ("q_proj", "v_proj"))),
    (2, Lora(16, ATTENTION)),
    (1, Lora(4, ATTENTION + MLP)),
    (3, Lora(8, ("q_proj", "v_proj"))),
    (4, Lora(32, ATTENTION)),
    (2, Lora(8, MLP)),
    (1, Lora(64, ("q_proj",))),
    (4, Lora(16, ATTENTION + MLP)),
)


@dataclass(frozen=True)
class Setting:
    """What is run, and on what."""

    shape: Shape
    device: str
    seconds: float
    rounds: int
    programs: int
    folder: Path
    report: Report
    judged: bool
    jobs: Sequence[Job]
    options: dict[str, Any]  # of every executor
    eager: bool  # what several programs do
    lengths: Sequence[int] = ()  # of long contexts

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def captured(self) -> bool:
        """Whether several programs run captured steps."""
        return self.on_gpu and not self.eager

    def rows(self, count: int) -> int:
        """... of a call: few on a CPU."""
        return count if self.on_gpu else min(count, 32)

    @contextmanager
    def serving(self, kind: type[Serving] = Serving, shape: Shape | None = None, **options: Any) -> Iterator[Worker]:
        """A new executor."""
        with workers(kind, [self.served(shape or self.shape, **options)]) as started:
            yield started[0]

    def served(self, shape: Shape, **options: Any) -> tuple[Any, ...]:
        """What an executor of that model is made of."""
        return shape, self.device, f"local://{self.folder}/executor.sock", self.options | options

    @contextmanager
    def executor(self, **options: Any) -> Iterator[str]:
        """The endpoint of a new one."""
        with self.serving(Serving, **options) as server:
            yield server.call("endpoints")[0]

    def bar(self, name: str, value: float, relation: Any, bar: float) -> None:
        if self.judged:
            self.report.bar(name, value, relation, bar)
        else:
            self.report.figure(name, value)


def tokens_per_s(paces: Sequence[Pace], jobs: Sequence[Job]) -> float:
    return sum(len(pace.steps) * job.tokens / pace.elapsed for pace, job in zip(paces, jobs, strict=True))


def median_ms(pace: Pace) -> float:
    return statistics.median(pace.steps) * 1e3


# ---------------------------------------------------------------- one program


BARS = {  # eager split / eager unsplit; captured split / eager unsplit; captured split / captured unsplit
    LONG: (1.10, 0.70, 1.10),
    SHORT: (1.15, 0.26, 1.10),
    DECODE: (1.10, 0.30, 1.15),
}


def alone(setting: Setting, jobs: Sequence[Job]) -> None:
    """One split and one unsplit program, taking turns."""
    rows = []
    with ExitStack() as stack:
        endpoint = stack.enter_context(setting.executor())
        programs = {
            "split": (endpoint, setting.shape, setting.device),
            GROUPED: (endpoint, setting.shape, setting.device, Lora(), False),
            "unsplit": (None, setting.shape, setting.device),
        }
        with same_cores(CORES):
            started = stack.enter_context(workers(Program, list(programs.values())))
        everybody = dict(zip(programs, started, strict=True))
        for job in jobs:
            sides = {side: worker for side, worker in everybody.items() if job.kind == "train" or side != GROUPED}
            times: dict[tuple[str, bool], float] = {}
            for captured in (False, True) if setting.on_gpu else (False,):
                progress(f"{name_of(job)}, {'captured' if captured else 'eager'}")
                measured: dict[str, list[float]] = {side: [] for side in sides}
                for worker in sides.values():
                    worker.call("prepare", job, captured)
                for _ in range(setting.rounds):
                    for side, worker in sides.items():
                        measured[side].append(median_ms(together([worker], "run", setting.seconds, job, captured)[0]))
                for side in sides:
                    times[side, captured] = statistics.median(measured[side])
            peaks = {side: worker.call("peak_bytes") / 2**30 for side, worker in sides.items()}
            for side, worker in sides.items():
                rows.append(row_of(job, side, times, peaks[side]))
                worker.call("forget")
            judge(setting, job, times, peaks)
    print_table(("one program", "eager ms", "captured ms", "eager / eager", "captured / captured", "peak GiB"), rows)


def row_of(job: Job, side: str, times: dict[tuple[str, bool], float], peak: float) -> tuple[str, ...]:
    cells = [f"{times[side, captured]:.2f}" if (side, captured) in times else "-" for captured in (False, True)]
    ratios = [
        f"{times[side, captured] / times['unsplit', captured]:.3f}" if (side, captured) in times else "-"
        for captured in (False, True)
    ]
    return f"{name_of(job)}, {side}", *cells, *ratios, f"{peak:.2f}"


def judge(setting: Setting, job: Job, times: dict[tuple[str, bool], float], peaks: dict[str, float]) -> None:
    name = name_of(job).replace(" ", "_")
    for side, peak in peaks.items():
        setting.report.figure(f"{name}_peak_gib_{side}", peak)
    for (side, captured), value in times.items():
        setting.report.figure(f"{name}_{'captured' if captured else 'eager'}_ms_{side}", value)
    bars = BARS.get(job, (1.15, 1.0, 1.15))
    eager = times["unsplit", False]
    setting.bar(f"{name}_eager_over_eager", times["split", False] / eager, "<=", bars[0])
    if ("split", True) in times:
        setting.bar(f"{name}_captured_over_eager", times["split", True] / eager, "<=", bars[1])
        setting.bar(f"{name}_captured_over_captured", times["split", True] / times["unsplit", True], "<=", bars[2])


def name_of(job: Job) -> str:
    return "decode" if job.kind == "decode" else f"train {job.batch}x{job.length}"


# ---------------------------------------------------------------- models of other families

QWEN3 = ("num_key_value_heads", 8), ("head_dim", 128)
EXPERTS = (
    ("num_key_value_heads", 4), ("head_dim", 128), ("num_experts", 128), ("num_experts_per_tok", 8),
    ("moe_intermediate_size", 768),
)  # fmt: skip
MODELS = {  # with fewer layers than the real ones have
    "Llama-7B": Shape(16),
    "Llama-13B": Shape(16, 5120, 13824, 40),
    "Gemma2-9B": Shape(16, 3584, 14336, 16, 256000, "gemma2", (("num_key_value_heads", 8), ("head_dim", 256))),
    "GPT2-XL": Shape(24, 1600, 6400, 25, 50257, "gpt2"),
    "Qwen3-MoE": Shape(8, 2048, 6144, 32, 151936, "qwen3_moe", EXPERTS),
    "Qwen3-8B": Shape(16, 4096, 12288, 32, 151936, "qwen3", QWEN3),
}
OF_EACH = Job("decode", 1, 128), Job("decode", 2, 128), SHORT, Job("train", 1, 384), LONG
EAGER_BAR, CAPTURED_BAR = 1.08, 1.03


def models(setting: Setting) -> None:
    """One split and one unsplit program of each model, taking turns."""
    rows: list[tuple[str, ...]] = []
    shapes = MODELS if setting.on_gpu else {"tiny": setting.shape}
    with ExitStack() as stack:
        (server,) = stack.enter_context(idle_workers(Serving, 1))
        with same_cores(CORES):
            split, unsplit = stack.enter_context(idle_workers(Program, 2))
        for number, (model, shape) in enumerate(shapes.items()):
            load(server, number > 0, *setting.served(shape))
            endpoint = server.call("endpoints")[0]
            for worker, where in ((split, endpoint), (unsplit, None)):
                load(worker, number > 0, where, shape, setting.device)
            rows += [
                measured(setting, model, split, unsplit, job, captured)
                for captured in ((False, True) if setting.on_gpu else (False,))
                for job in OF_EACH
            ]
    print_table(("one program", "unsplit ms", "split / unsplit", "bits", "direct so far", "calls"), rows)


def load(worker: Worker, again: bool, *arguments: Any) -> None:
    """Build what the worker holds; `again`: once it has let go of what it holds now."""
    if again:
        worker.call("close")
        worker.again(*arguments)
    else:
        worker.begin(*arguments)
        worker.result()


def measured(setting: Setting, model: str, split: Worker, unsplit: Worker, job: Job, captured: bool) -> tuple[str, ...]:
    """What a step takes, and whether its bits are equal. If they are not, another unsplit run tells whether bits repeat at all."""
    name = f"{model}, {job.kind} {job.batch}x{job.length}, {'captured' if captured else 'eager'}"
    progress(name)
    ratio, took = ratio_of(setting, split, unsplit, job, captured)
    mine, others = (worker.call("bits", job, captured) for worker in (split, unsplit))
    same = "equal"
    if mine != others:
        same = "differ" if others == unsplit.call("bits", job, captured) else "do not repeat"
    key = name.replace(",", "").replace(" ", "_")
    setting.bar(f"{key}_ratio", ratio, "<=", CAPTURED_BAR if captured else EAGER_BAR)
    setting.report.bar(f"{key}_bits_equal", int(same == "equal"), ">=", 1)
    direct, calls = split.call("direct")
    progress(f"... {took:.2f} ms unsplit, split / unsplit {ratio:.3f}, bits {same}")
    return name, f"{took:.2f}", f"{ratio:.3f}", same, f"{direct}", f"{calls}"


TURNS = 8  # in which a measurement of one program is divided, so that both sides see the same machine


def ratio_of(setting: Setting, split: Worker, unsplit: Worker, job: Job, captured: bool) -> tuple[float, float]:
    """What a step of one takes over that of the other, and what the other's takes, in milliseconds; they take turns."""
    steps: dict[Worker, list[float]] = {split: [], unsplit: []}
    for worker in steps:
        worker.call("prepare", job, captured)
    for _ in range(setting.rounds * TURNS):
        for worker, found in steps.items():
            found += worker.call("run", 0.0, setting.seconds / TURNS, job, captured).steps
    for worker in steps:
        worker.call("forget")
    mine, others = (statistics.median(found) * 1e3 for found in steps.values())
    return mine / others, others


def compiled(setting: Setting) -> None:
    """A split step that is compiled and captured, over the unsplit step that is captured."""
    rows = []
    with ExitStack() as stack:
        endpoint = stack.enter_context(setting.executor())
        arguments = [(endpoint, setting.shape, setting.device), (None, setting.shape, setting.device)]
        with same_cores(CORES):
            split, unsplit = stack.enter_context(workers(Program, arguments))
        split.call("compile")
        for job, bar in ((DECODE, 0.8), (SHORT, 0.9)):
            progress(f"{name_of(job)}, compiled")
            ratio, took = ratio_of(setting, split, unsplit, job, setting.on_gpu)
            setting.bar(f"compiled_{name_of(job).replace(' ', '_')}_ratio", ratio, "<=", bar)
            progress(f"... {took:.2f} ms unsplit, ratio {ratio:.3f}")
            rows.append((name_of(job), f"{took:.2f}", f"{ratio:.3f}"))
    print_table(("one program", "unsplit, captured ms", "split, compiled and captured / that"), rows)


# ---------------------------------------------------------------- many programs


def many(setting: Setting) -> None:
    """1, 2, 4, ... programs that do the same; split, then unsplit."""
    counts, jobs = [n for n in (1, 2, 4, 8, 16, 32) if n <= setting.programs], setting.jobs
    rates: dict[tuple[Job, int, str], float] = {}
    memory: dict[tuple[Job, str], int] = {}
    room: dict[tuple[Job, str], int] = {}
    batch: dict[tuple[Job, int], float] = {}
    for side in ("split", "unsplit"):
        with ExitStack() as stack:
            gauge = stack.enter_context(workers(Gauge, [(setting.device,)]))[0]
            before = gauge.call("used_bytes")
            endpoint = stack.enter_context(setting.executor()) if side == "split" else None
            shared, free = gauge.call("used_bytes") - before, gauge.call("free_bytes")
            arguments = (endpoint, setting.shape, setting.device)
            crowd = stack.enter_context(workers(Program, [arguments] * counts[-1]))
            for job in jobs:
                for worker in crowd:  # one after the other: each finds its products by itself
                    worker.call("prepare", job, setting.captured)
                for count in counts:
                    progress(f"{count} {side} programs, {name_of(job)}")
                    some = crowd[:count]
                    # they meet, and are recorded
                    together(some, "run", min(1.0, setting.seconds), job, setting.captured)
                    paces = together(some, "run", setting.seconds, job, setting.captured)
                    rates[job, count, side] = tokens_per_s(paces, [job] * count)
                    progress(f"... {rates[job, count, side]:.1f} tokens/s")
                    if side == "split":
                        batch[job, count] = statistics.mean(worker.call("mean_batch") for worker in some)
                memory[job, side] = gauge.call("used_bytes") - before
                each = (memory[job, side] - shared) / counts[-1]
                room[job, side] = int(free / each) if each else 0
                for worker in crowd:
                    worker.call("forget")
    show_many(setting, jobs, counts, rates, memory, room, batch)


EARLY_S = 2.0  # in which programs that begin at once find out what the others do
MEETING = 30  # steps after which the executor has recorded the products of those who meet
MANY = {
    DECODE: 2.0,
    SHORT: 1.0,
    LONG: 1.0,
}  # of 2 x 64 the products are a fourth of a step: joined or not, no more than 1.1 can come


def show_many(
    setting: Setting, jobs: Sequence[Job], counts: list[int], rates: Any, memory: Any, room: Any, batch: Any
) -> None:
    """`room`: for so many programs there would be, if each took what each of these did."""
    rows, sizes = [], []
    for job in jobs:
        name = name_of(job).replace(" ", "_")
        for count in counts:
            split, unsplit = rates[job, count, "split"], rates[job, count, "unsplit"]
            rows.append((f"{count} × {name_of(job)}", f"{split:.1f}", f"{unsplit:.1f}", f"{split / unsplit:.2f}", f"{batch[job, count]:.2f}"))  # fmt: skip
            setting.report.figure(f"{name}_{count}_tokens_per_s_split", split)
            setting.report.figure(f"{name}_{count}_tokens_per_s_unsplit", unsplit)
        last = counts[-1]
        setting.bar(f"{name}_{last}_ratio", rates[job, last, "split"] / rates[job, last, "unsplit"], ">=", MANY.get(job, 1.0))  # fmt: skip
        for side in ("split", "unsplit"):
            setting.report.figure(f"{name}_{last}_gib_{side}", memory[job, side] / 2**30)
            setting.report.figure(f"{name}_room_for_{side}", room[job, side])
        sizes.append((f"{last} × {name_of(job)}", *(f"{memory[job, side] / 2**30:.1f}" for side in ("split", "unsplit")), *(str(room[job, side]) for side in ("split", "unsplit"))))  # fmt: skip
        if memory[job, "unsplit"]:
            setting.bar(f"{name}_{last}_memory_ratio", memory[job, "split"] / memory[job, "unsplit"], "<=", 0.35)
    print_table(("programs", "split tokens/s", "unsplit", "ratio", "calls per product so far"), rows)
    print_table(("memory", "split GiB", "unsplit", "room for so many split", "unsplit"), sizes)


FIT_BAR = 1.8  # programs over unsplit ones: as many as when every product was a call


def fit(setting: Setting) -> None:
    """How many programs there is memory for, and what they do all together; split, then unsplit."""
    rows = []
    for job in setting.jobs:
        name, counts = name_of(job).replace(" ", "_"), []
        for side in ("split", "unsplit"):
            with ExitStack() as stack:
                endpoint = stack.enter_context(setting.executor()) if side == "split" else None
                crowd = as_many_as_fit(setting, stack, endpoint, job)
                progress(f"{len(crowd)} {side} programs, {name_of(job)}")
                together(crowd, "run", min(1.0, setting.seconds), job, setting.captured)  # they meet, and are recorded
                rate = tokens_per_s(together(crowd, "run", setting.seconds, job, setting.captured), [job] * len(crowd))
                for worker in crowd:  # all at once: each takes a second or two
                    worker.hang_up()
            counts.append(len(crowd))
            setting.report.figure(f"{name}_fit_{side}", len(crowd))
            setting.report.figure(f"{name}_fit_{side}_tokens_per_s", rate)
            rows.append((f"{name_of(job)}, {side}", str(len(crowd)), f"{rate:.1f}"))
        setting.bar(f"{name}_fit_ratio", counts[0] / counts[1], ">=", FIT_BAR)
    print_table(("programs", "fit", "tokens/s, all together"), rows)


def as_many_as_fit(setting: Setting, stack: ExitStack, endpoint: str | None, job: Job) -> list[Worker]:
    """Programs that are ready for the job: one was too many, or there are `MOST_PROGRAMS` (on a CPU: `--programs`)."""
    crowd: list[Worker] = []
    most = MOST_PROGRAMS if setting.on_gpu else setting.programs
    while len(crowd) < most:
        for worker in stack.enter_context(idle_workers(Program, min(STARTED_AT_ONCE, most - len(crowd)))):
            try:
                worker.begin(endpoint, setting.shape, setting.device)
                worker.result()
                worker.call("prepare", job, setting.captured)
            except RuntimeError as error:
                if not crowd or not any(words in str(error) for words in OUT_OF_MEMORY):
                    raise
                return crowd
            crowd.append(worker)
    return crowd


def mixed(setting: Setting, trainer: Job) -> None:
    """Decoders only, then two of them replaced by trainers."""
    count = setting.programs
    with ExitStack() as stack:
        endpoint = stack.enter_context(setting.executor())
        crowd = stack.enter_context(workers(Program, [(endpoint, setting.shape, setting.device)] * count))
        for number, worker in enumerate(crowd):
            worker.call("prepare", DECODE, setting.captured)
            if number >= count - 2:
                worker.call("prepare", trainer, setting.captured)
        jobs = [DECODE] * (count - 2) + [trainer] * 2
        found = []
        for kinds in ([DECODE] * count, jobs):
            progress(", ".join(f"{number} × {name_of(job)}" for job, number in Counter(kinds).items()))
            run_jobs(setting, crowd, kinds, MEETING)
            found.append(run_jobs(setting, crowd, kinds, early_s=EARLY_S if setting.on_gpu else 0.0))
            p50, p99 = percentiles_ms(found[-1][: count - 2])
            slowest = max(max(pace.early, default=0.0) for pace in found[-1][: count - 2]) * 1e3
            progress(
                f"... {tokens_per_s(found[-1], kinds):.1f} tokens/s, p50 {p50:.2f} ms, p99 {p99:.2f} ms; at first up to {slowest:.1f} ms"
            )
        before, after = found
    percentiles = [percentiles_ms(paces[: count - 2]) for paces in (before, after)]
    totals = [tokens_per_s(before, [DECODE] * count), tokens_per_s(after, jobs)]
    rows = [
        (name, f"{total:.1f}", f"{p50:.2f}", f"{p99:.2f}")
        for name, total, (p50, p99) in zip((f"{count} decoders", f"{count - 2} + 2 trainers"), totals, percentiles, strict=True)
    ]  # fmt: skip
    print_table(("mixed", "tokens/s", "p50 ms of decoders", "p99"), rows)
    for name, total, (p50, p99) in zip(("before", "after"), totals, percentiles, strict=True):
        for what, value in (("tokens_per_s", total), ("p50_ms", p50), ("p99_ms", p99)):
            setting.report.figure(f"mixed_{name}_{what}", value)
    setting.bar("mixed_tokens_ratio", totals[1] / totals[0], ">=", 2.0)
    setting.bar("mixed_p50_ratio", percentiles[1][0] / percentiles[0][0], "<=", 1.15)
    setting.bar("mixed_p99_ratio", percentiles[1][1] / percentiles[0][1], "<=", 1.5)


def together_do(crowd: Sequence[Worker], method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """At once in all: a policy that waits for everybody must not wait for one that is not asked yet."""
    for worker, args in zip(crowd, arguments, strict=True):
        worker.send(method, *args)
    return [worker.result(LONGEST_S) for worker in crowd]


def run_jobs(
    setting: Setting, crowd: Sequence[Worker], jobs: Sequence[Job], steps: int | None = None, early_s: float = 0.0
) -> list[Pace]:
    """Each worker does its job, for the setting's time or for a number of steps, once `early_s` seconds are over."""
    start = time.monotonic() + 0.3
    seconds = setting.seconds if steps is None else 0.0
    return together_do(crowd, "run", [(start, seconds, job, setting.captured, steps or 1, early_s) for job in jobs])


def percentiles_ms(paces: Sequence[Pace]) -> tuple[float, float]:
    p50, p99 = np.percentile(np.concatenate([pace.steps for pace in paces]), (50, 99)) * 1e3
    return float(p50), float(p99)


def policies(setting: Setting) -> None:
    """Generators of different batch sizes and adapters, for each policy on an executor of its own."""
    found: dict[str, tuple[float, float, float]] = {}
    generators = GENERATORS[: setting.programs]
    jobs = [Job("decode", batch, DECODE.length) for batch, _ in generators]
    for policy in ("immediate", "lockstep", "opportunistic"):
        progress(policy)
        with ExitStack() as stack:
            endpoint = stack.enter_context(setting.executor(policy=policy))
            arguments = [(endpoint, setting.shape, setting.device, lora) for _, lora in generators]
            crowd = stack.enter_context(workers(Program, arguments))
            together_do(crowd, "prepare", [(job, setting.captured) for job in jobs])
            run_jobs(setting, crowd, jobs, MEETING)
            paces = run_jobs(setting, crowd, jobs, POLICY_STEPS if setting.captured else 5)
            batch = statistics.mean(worker.call("mean_batch") for worker in crowd)
        latency = statistics.mean(statistics.mean(pace.steps) for pace in paces) * 1e3
        tokens = sum(len(pace.steps) * job.tokens for pace, job in zip(paces, jobs, strict=True))
        found[policy] = tokens / max(pace.elapsed for pace in paces), latency, batch
        progress(f"... {found[policy][0]:.1f} tokens/s, {latency:.2f} ms a token")
    rows = [(policy, f"{rate:.1f}", f"{ms:.2f}", f"{batch:.2f}") for policy, (rate, ms, batch) in found.items()]
    print_table(("policy", "tokens/s", "mean ms/token", "calls per product so far"), rows)
    for policy, (rate, ms, _) in found.items():
        setting.report.figure(f"{policy}_tokens_per_s", rate)
        setting.report.figure(f"{policy}_ms_per_token", ms)
    mine = found.pop("opportunistic")
    setting.bar("policies_throughput_ratio", mine[0] / max(rate for rate, _, _ in found.values()), ">=", 1.0)
    setting.bar("policies_latency_ratio", mine[1] / min(ms for _, ms, _ in found.values()), "<=", 1.0)


# ---------------------------------------------------------------- one call


CALL_BARS = {  # microseconds, by the way, the rows, and whether captured
    ("local", 1, True): 25.0,
    ("other GPU", 1, True): 38.0, ("other GPU", 1024, True): 121.0,
    ("NCCL", 1, False): 150.0, ("NCCL", 1024, False): 230.0,
}  # fmt: skip


def call(setting: Setting) -> None:
    width, rounds = setting.shape.hidden, 10 * setting.rounds
    urls = [f"local://{setting.folder}/call.sock", "tcp://127.0.0.1:0"]
    rows = []
    with ExitStack() as stack:
        server = stack.enter_context(workers(ServingOneLayer, [(width, setting.device, urls)]))[0]
        local, tcp = server.call("endpoints")
        ways = {"no executor": (None, setting.device), "local": (local, setting.device), "tcp": (tcp, setting.device)}
        if setting.on_gpu:
            ways["CPU client"] = (local, "cpu")
        if setting.on_gpu and torch.cuda.device_count() > 1:
            ways["other GPU"] = (local, "cuda:1")
            ways["NCCL"] = (tcp, "cuda:1")
        clients = stack.enter_context(idle_workers(OneLayer, len(ways)))
        for worker, (way, (endpoint, device)) in zip(clients, ways.items(), strict=True):
            worker.begin(endpoint, width, device)
            worker.result()
            for count in (1, 1024):
                for captured in (False, True) if device != "cpu" and endpoint != tcp else (False,):
                    progress(f"{way}, {count} rows, {'captured' if captured else 'eager'}")
                    few = device == "cpu" or way == "tcp"  # such calls take milliseconds
                    took = worker.call("call_us", setting.rows(count), captured, 5 if few else rounds)
                    name = f"call_{way.replace(' ', '_')}_{count}_{'captured' if captured else 'eager'}_us"
                    if bar := CALL_BARS.get((way, count, captured)):
                        setting.bar(name, took, "<=", bar)
                    else:
                        setting.report.figure(name, took)
                    rows.append((way, str(count), "captured" if captured else "eager", f"{took:.1f}"))
    print_table(("way", "rows", "", "µs"), rows, title=f"a call of {width} × {width}")


# ---------------------------------------------------------------- the executor's own time

STAGES = ("bells", "batches", "launches", "figures")


def cost(setting: Setting) -> None:
    """What a call takes of the executor's CPU, of one program and of many."""
    rows = []
    with ExitStack() as stack:
        server = stack.enter_context(setting.serving(TimedServing, share_weights=False))
        endpoint = server.call("endpoints")[0]
        crowd = stack.enter_context(workers(Program, [(endpoint, setting.shape, setting.device)] * setting.programs))
        for job, captured in itertools.product(setting.jobs, (False, True) if setting.on_gpu else (False,)):
            for worker in crowd:
                worker.call("prepare", job, captured)
            for count in (1, setting.programs):
                name = f"{count} × {name_of(job)}, {'captured' if captured else 'eager'}"
                progress(name)
                together(crowd[:count], "run", min(1.0, setting.seconds), job, captured)  # they meet, and are recorded
                calls, seconds = server.call("spent")
                begun = time.perf_counter()
                together(crowd[:count], "run", setting.seconds, job, captured)
                elapsed = time.perf_counter() - begun - TOGETHER_S
                calls_then, seconds_then = server.call("spent")
                made = calls_then - calls
                spent = [(seconds_then.get(stage, 0.0) - seconds.get(stage, 0.0)) / made * 1e6 for stage in STAGES]
                busy = sum(spent) * 1e-6 * made / elapsed
                rows.append((name, f"{made / elapsed:.0f}", *(f"{us:.1f}" for us in spent), f"{sum(spent):.1f}", f"{busy:.0%}"))  # fmt: skip
                key = f"cost_{count}_{name_of(job).replace(' ', '_')}_{'captured' if captured else 'eager'}"
                setting.report.figure(f"{key}_us", sum(spent))
                setting.report.figure(f"{key}_busy", busy)
            for worker in crowd:
                worker.call("forget")
    print_table(("programs", "calls/s", *STAGES, "µs of a call", "busy"), rows, title="the executor's CPU")


# ---------------------------------------------------------------- integers


def integers(setting: Setting) -> None:
    """Products of private clients' integers against the same in floats."""
    rows = []
    widths = setting.shape.hidden, setting.shape.inner
    with workers(Products, [(setting.shape.hidden, outputs, setting.device) for outputs in widths]) as both:
        for outputs, worker in zip(widths, both, strict=True):
            for count, bar in ((32, 3.0), (2048, 5.0)):
                plain = worker.call("product_us", setting.rows(count), None, 10)
                for bits in (8, 16):
                    progress(f"{count} rows, {outputs} columns, {bits} bits")
                    took = worker.call("product_us", setting.rows(count), bits, 10)
                    name = f"integers_{bits}_bits_{outputs}_columns_{count}_rows"
                    if bits == 8:
                        setting.bar(name, took / plain, "<=", bar)
                    else:
                        setting.report.figure(name, took / plain)
                    rows.append((f"{bits} bits", f"{setting.shape.hidden} x {outputs}", str(count), f"{took:.1f}", f"{plain:.1f}", f"{took / plain:.2f}"))  # fmt: skip
    print_table(("integers", "weight", "rows", "µs", "bfloat16", "ratio"), rows)


# ---------------------------------------------------------------- long contexts

LENGTHS = (1 << 14, 1 << 15, 1 << 16)
LONG_BARS = {1 << 15: 1.0, 1 << 16: 0.75}  # a token, over transformers' offloaded cache
GROUPED_HEADS = ("num_key_value_heads", 8)


def long(setting: Setting) -> None:
    """A split program with its cache in the host's memory, and an unsplit one with transformers' caches; for two kinds of heads."""
    rows = []
    few = Shape(setting.shape.layers, 4096, 14336, 32, 128256, "llama", (GROUPED_HEADS,))  # of Llama-3-8B
    for model, shape in (
        {"Llama-7B": setting.shape, "8 heads of keys": few}.items() if setting.on_gpu else [("tiny", setting.shape)]
    ):
        with ExitStack() as stack:
            endpoint = stack.enter_context(setting.executor(shape=shape))
            split, unsplit = stack.enter_context(
                workers(LongContext, [(side, shape, setting.device) for side in (endpoint, None)])
            )
            for length in setting.lengths if setting.on_gpu else (40,):
                progress(f"{model}, {length} tokens")
                found = {}
                for name, worker, kind in (
                    ("host", split, "host"), ("offloaded", unsplit, "offloaded"), ("on_gpu", unsplit, "device"),
                ):  # fmt: skip
                    found[name] = worker.call("read", kind, length)
                    worker.call("forget")
                rows += [compared(setting, f"{model}, {length}", name, found) for name in found]
                name = f"long_{model.replace(' ', '_')}_{length}"
                ratio = token_ms(found["host"]) / token_ms(found["offloaded"])
                progress(
                    f"... {token_ms(found['host']):.1f} ms a token, over transformers' offloaded cache {ratio:.3f}"
                )
                if length in LONG_BARS:
                    setting.bar(f"{name}_token_ratio", ratio, "<=", LONG_BARS[length])
                else:
                    setting.report.figure(f"{name}_token_ratio", ratio)
                mine, others = found["host"], found["on_gpu"]
                differ = sum(a != b for a, b, clear in zip(mine.best, others.best, others.clear, strict=True) if clear)
                setting.report.figure(f"{name}_tokens_compared", sum(others.clear))
                setting.report.bar(f"{name}_tokens_that_differ", differ, "==", 0)
    print_table(("context", "cache", "ms a token", "tokens/s of the prompt", "GiB on the GPU"), rows)


def compared(setting: Setting, context: str, name: str, found: dict[str, Read]) -> tuple[str, ...]:
    """The table's row of one cache, and its figures."""
    read, length = found[name], int(context.rpartition(" ")[2])
    key = f"long_{context.replace(',', '').replace(' ', '_')}_{name}"
    setting.report.figure(f"{key}_ms", token_ms(read))
    setting.report.figure(f"{key}_prompt_s", read.prompt_s)
    return context, name, f"{token_ms(read):.1f}", f"{length / read.prompt_s:.0f}", f"{read.cache_gib:.2f}"


def token_ms(read: Read) -> float:
    return statistics.median(read.token_s) * 1e3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "suites", nargs="*", choices=(*SUITES, []), help=f"of {', '.join(SUITES)}; all if none is named"
    )
    parser.add_argument("--layers", type=int, default=32, help="of the model")
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, help="of the contexts of `long`, in tokens")
    parser.add_argument(
        "--jobs", nargs="+", choices=JOBS, default=list(JOBS), help="what `many` programs do, or as many as `fit`"
    )
    parser.add_argument("--programs", type=int, default=8, help="at most at once")
    parser.add_argument("--seconds", type=float, default=3.0, help="that each measurement takes")
    parser.add_argument("--rounds", type=int, default=3, help="of each measurement of one program")
    parser.add_argument("--eager", action="store_true", help="programs in company run eager code")
    parser.add_argument(
        "--serve", nargs="+", default=(), help="what executors share, such as '*_proj' lm_head; default: theirs"
    )
    parser.add_argument("--batch-invariant", action="store_true", help="start executors with --batch-invariant")
    parser.add_argument("--no-rounds", action="store_true", help="start executors with --no-rounds")
    parser.add_argument("--no-share-weights", action="store_true", help="start executors with --no-share-weights")
    parser.add_argument("--models", nargs="+", choices=MODELS, help="that `models` measures; default: all")
    parser.add_argument("--no-mps", action="store_true", help="let the processes take turns on the GPU")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU: whether all runs, not how fast")
    return parser.parse_args()


SUITES: dict[str, Callable[[Setting], None]] = {
    "step": lambda setting: alone(setting, [LONG, SHORT]),
    "decode": lambda setting: alone(setting, [DECODE]),
    "models": models,
    "compiled": compiled,
    "many": many,
    "fit": fit,
    "mixed": lambda setting: mixed(setting, LONG),
    "policies": policies,
    "call": call,
    "cost": cost,
    "integers": integers,
    "long": long,
}


def main() -> int:
    args = arguments()
    prepare(threads=1 if args.tiny else 2, once=IMPORTED)
    report = Report("bench_gpu")
    with ExitStack() as stack:
        stack.enter_context(nullcontext() if args.no_mps or args.tiny else mps.running())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if args.tiny:
            shape, device, seconds, rounds = Shape(2, 128, 256, 4, 512), "cpu", 0.1, 1
        else:
            shape, device, seconds, rounds = Shape(args.layers), "cuda", args.seconds, args.rounds
        jobs = [JOBS[name] for name in args.jobs]
        options = {
            "rounds": not args.no_rounds, "serve": args.serve, "batch_invariant": args.batch_invariant,
            "share_weights": not args.no_share_weights,
        }  # fmt: skip
        for name in MODELS.keys() - set(args.models or MODELS):
            del MODELS[name]
        judged = not (args.tiny or args.eager or args.batch_invariant or args.no_mps)
        setting = Setting(
            shape,
            device,
            seconds,
            rounds,
            args.programs,
            folder,
            report,
            judged,
            jobs,
            options,
            args.eager,
            args.lengths,
        )
        report.figure("rounds", not args.no_rounds)
        report.figure("share_weights", not args.no_share_weights)
        report.figure("layers", shape.layers)
        report.figure("batch_invariant", args.batch_invariant)
        report.figure("serves_head", "lm_head" in args.serve)
        report.figure("mps", not (args.no_mps or args.tiny))
        for suite in args.suites or SUITES:
            SUITES[suite](setting)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
