"""A LoRA training step and a decoding step, split against unsplit: alone, and four programs at once on one machine.

* Alone: an executor and one client beside one unsplit program, all with `--threads` threads, taking turns.
* Four: an executor and four clients, then four unsplit programs, then again, every time in fresh processes. Four unsplit
  programs compute on as many cores as there are; so does this executor, with as many workers: `--workers`.

The checkpoint holds bfloat16, as published ones do, and everything computes in float32, so that every unsplit program makes
its own copy of the weights. (Programs that use a checkpoint as it lies on disk share its pages on a CPU even unsplit:
`--checkpoint-dtype float32` shows that case.)

    python scripts/bench_step.py --quick     # about four minutes
    python scripts/bench_step.py --hidden 2048
    python scripts/bench_step.py --called    # clients map no weights: every product is a call, as over tcp://
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from _processes import (
    LoraClient,
    Pace,
    Worker,
    cpu_seconds,
    executor,
    prepare,
    progress,
    pss_bytes,
    save_llama,
    together,
    workers,
)

from symbiosis.base.reporting import Report, print_table

PROGRAMS = 4
LORA = (8, ("q_proj", "k_proj", "v_proj", "o_proj"))
SHAPE = {
    "train": (2, 128),  # sequences, tokens of each
    "decode": (1, 32, 64),  # sequences, tokens of the prompt, tokens that follow
}
SIDES = ("split", "unsplit")


@dataclass(frozen=True)
class Setting:
    """What is run, on which machine."""

    folder: Path
    threads: int
    workers: int
    hidden: int
    called: bool
    rounds: int
    decode_s: float
    crowd_rounds: int
    crowd_train_s: float
    crowd_decode_s: float

    @property
    def bars(self) -> dict[str, float]:
        """What a step may cost over the unsplit one's, and what four programs must do beside four unsplit ones."""
        if self.called:
            return {"train": 1.10, "decode": 1.25, "four_decode": 1.5, "four_train": 0.9}
        return {"train": 1.03, "decode": 1.05, "four_decode": 1.5 if self.hidden >= 2048 else 1.0, "four_train": 1.0}

    @property
    def checkpoint(self) -> str:
        return str(self.folder / "model")

    def serve(self, stack: ExitStack, workers: int) -> tuple[int, str]:
        """The process id and the endpoint of a new executor."""
        options = ["--listen", f"local://{self.folder}/executor.sock", "--dtype", "float32", "--workers", str(workers)]
        options += ["--no-share-weights"] if self.called else []
        served = stack.enter_context(executor(Path(self.checkpoint), self.threads, *options))
        return served.pid, served.endpoints[0]

    def run(
        self, programs: Sequence[Worker], what: str, seconds: float, meanwhile: Callable[[], None] | None = None
    ) -> list[Pace]:
        return together(programs, what, seconds, *SHAPE[what], meanwhile=meanwhile)


@dataclass
class Alone:
    """Median seconds of a step, and its CPU seconds (the executor's, too), in each round, by what and side."""

    seconds: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    cpu: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    loss_difference: float = 0.0

    def ratio(self, what: str) -> float:
        return ratio(self.seconds[what, "split"], self.seconds[what, "unsplit"])

    def cpu_ratio(self, what: str) -> float:
        """Of the totals: the clock of CPU seconds is coarse."""
        return sum(self.cpu[what, "split"]) / sum(self.cpu[what, "unsplit"])


@dataclass
class Crowd:
    """One side's four programs in one round: training steps and tokens per second of all, bytes of memory."""

    train: float
    decode: float
    programs_bytes: int
    executor_bytes: int
    idle_bytes: int  # of a process that has loaded the executor's code and nothing else

    @property
    def bytes(self) -> int:
        return self.programs_bytes + self.executor_bytes


class IdleExecutor:
    """What an executor's process costs before it holds a model."""

    def __init__(self) -> None:
        from transformers import LlamaForCausalLM

        import symbiosis.executor.daemon

        assert symbiosis.executor.daemon.serve and LlamaForCausalLM


def run_alone(setting: Setting) -> Alone:
    result = Alone()
    with ExitStack() as stack:
        pid, endpoint = setting.serve(stack, 1)
        pair = stack.enter_context(workers(LoraClient, [(endpoint, *LORA), (setting.checkpoint, *LORA)]))
        turns = [
            (what, side, worker, [worker.pid, pid] if side == "split" else [worker.pid])
            for what in ("train", "decode")
            for side, worker in zip(SIDES, pair, strict=True)
        ]
        for what, _, worker, _ in turns:  # memory is allocated, and the executor learns
            setting.run([worker], what, setting.decode_s if what == "decode" else 0.0)
        for number in range(setting.rounds):
            progress(f"one program, round {number + 1} of {setting.rounds}")
            for what, side, worker, pids in turns:
                before = sum(map(cpu_seconds, pids))
                pace = setting.run([worker], what, setting.decode_s if what == "decode" else 0.0)[0]
                result.seconds[what, side].append(statistics.median(pace.steps))
                result.cpu[what, side].append((sum(map(cpu_seconds, pids)) - before) / len(pace.steps))
        mine, plain = (worker.call("losses_so_far") for worker in pair)
        result.loss_difference = max(abs(a - b) for a, b in zip(mine, plain, strict=True))
    return result


def run_crowd(setting: Setting, side: str) -> Crowd:
    """Four programs at once, in fresh processes; memory is read while they train."""
    with ExitStack() as stack:
        pid, source = setting.serve(stack, setting.workers) if side == "split" else (None, setting.checkpoint)
        crowd = stack.enter_context(workers(LoraClient, [(source, *LORA)] * PROGRAMS))
        idle = stack.enter_context(workers(IdleExecutor, [()]))[0]
        setting.run(crowd, "train", 0.0)
        setting.run(crowd, "decode", 0.5)
        decode = setting.run(crowd, "decode", setting.crowd_decode_s)
        memory: list[int] = []

        def read_memory() -> None:
            time.sleep(setting.crowd_train_s / 2)
            memory.extend(pss_bytes(worker.pid) for worker in (*crowd, idle))
            memory.append(pss_bytes(pid) if pid else 0)

        train = setting.run(crowd, "train", setting.crowd_train_s, read_memory)
        *programs, empty, serving = memory
        return Crowd(_rate(train), _rate(decode), sum(programs), serving, empty)


def _rate(paces: Sequence[Pace]) -> float:
    """Steps per second of all together."""
    return sum(len(pace.steps) / pace.elapsed for pace in paces)


def ratio(mine: Sequence[float], plain: Sequence[float]) -> float:
    """The median over the rounds of what the two sides compare to within a round."""
    return statistics.median(a / b for a, b in zip(mine, plain, strict=True))


def over_ideal(split: Crowd, unsplit: Crowd, weights_bytes: int) -> float:
    """Memory over the least there can be: the weights once, the programs without them, a process for the executor."""
    return split.bytes / (unsplit.programs_bytes - (PROGRAMS - 1) * weights_bytes + split.idle_bytes)


def show(alone: Alone, crowds: dict[str, list[Crowd]]) -> None:
    rows = []
    for what in SHAPE:
        for name, times, compared in (
            ("ms", alone.seconds, alone.ratio(what)),
            ("CPU ms", alone.cpu, alone.cpu_ratio(what)),
        ):
            split, unsplit = (statistics.median(times[what, side]) * 1e3 for side in SIDES)
            rows.append((f"{what} step alone, {name}", f"{split:.1f}", f"{unsplit:.1f}", f"{compared:.2f}"))
    for name, attribute, unit in (
        (f"training of {PROGRAMS}, steps/s", "train", 1.0),
        (f"decoding of {PROGRAMS}, tokens/s", "decode", 1.0),
        (f"memory of {PROGRAMS}, MiB", "bytes", 2.0**20),
        ("  of it the programs, MiB", "programs_bytes", 2.0**20),
    ):
        values = [[getattr(crowd, attribute) / unit for crowd in crowds[side]] for side in SIDES]
        split, unsplit = map(statistics.median, values)
        rows.append((name, f"{split:.2f}", f"{unsplit:.2f}", f"{ratio(*values):.2f}"))
    print_table(("median of rounds", *SIDES, "split/unsplit"), rows)


def report(setting: Setting, alone: Alone, crowds: dict[str, list[Crowd]], parameters: int) -> Report:
    split, unsplit = crowds["split"], crowds["unsplit"]
    result = Report("bench_step")
    result.figure("parameters", parameters)
    result.figure("threads", setting.threads)
    result.figure("workers_of_four", setting.workers)
    for what in SHAPE:
        result.figure(f"{what}_cpu_ratio", alone.cpu_ratio(what))
        for side in SIDES:
            result.figure(f"{what}_ms_{side}", statistics.median(alone.seconds[what, side]) * 1e3)
    for side in SIDES:
        for attribute in ("train", "decode", "programs_bytes", "executor_bytes", "idle_bytes"):
            middle = statistics.median(getattr(crowd, attribute) for crowd in crowds[side])
            result.figure(f"four_{attribute}_{side}", middle)
    result.figure("four_memory_ratio", ratio([c.bytes for c in split], [c.bytes for c in unsplit]))
    ideal = statistics.median(over_ideal(*pair, 4 * parameters) for pair in zip(split, unsplit, strict=True))
    result.bar("loss_difference", alone.loss_difference, "<=", 0.0)
    result.bar("train_step_ratio", alone.ratio("train"), "<=", setting.bars["train"])
    result.bar("decode_step_ratio", alone.ratio("decode"), "<=", setting.bars["decode"])
    result.bar("four_memory_over_ideal", ideal, "<=", 1.05)
    for what in ("decode", "train"):
        compared = ratio([getattr(crowd, what) for crowd in split], [getattr(crowd, what) for crowd in unsplit])
        result.bar(f"four_{what}_ratio", compared, ">=", setting.bars[f"four_{what}"])
    return result


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--hidden", type=int, default=1024, help="hidden size, a multiple of 128")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1, help="threads of every process")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="of the executor of four")
    parser.add_argument("--called", action="store_true", help="the executor shares no weights")
    parser.add_argument("--checkpoint-dtype", choices=("bfloat16", "float32"), default="bfloat16")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    prepare(args.threads)
    plan = (4, 0.7, 2, 15.0, 5.0) if args.quick else (15, 2.0, 5, 40.0, 15.0)
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(Path(folder), args.threads, args.workers, args.hidden, args.called, *plan)
        parameters = save_llama(Path(setting.checkpoint), args.hidden, args.layers, args.checkpoint_dtype)
        alone = run_alone(setting)
        crowds: dict[str, list[Crowd]] = {side: [] for side in SIDES}
        for number in range(setting.crowd_rounds):
            for side in SIDES:
                progress(f"{PROGRAMS} {side} programs, round {number + 1} of {setting.crowd_rounds}")
                crowds[side].append(run_crowd(setting, side))
    show(alone, crowds)
    return report(setting, alone, crowds, parameters).finish()


if __name__ == "__main__":
    sys.exit(main())
