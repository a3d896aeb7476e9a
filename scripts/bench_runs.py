"""What runs cost that an engine keeps: to create, in memory and on disk, to come back; and what it costs that none of their steps is lost.

    python scripts/bench_runs.py             # 1,000 runs of rank 8 on the demo model, 100 in memory; a few minutes on one core
    python scripts/bench_runs.py --quick     # 30 runs, 10 in memory

The log's price is a step (one sequence of 64 tokens, forward, backward and AdamW) with a folder over one without.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from peft import LoraConfig

import symbiosis
from symbiosis.base.reporting import Report
from symbiosis.training import Datum, Engine, Run

STEPS = 30


def config() -> LoraConfig:
    return LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")


def datum(seed: int) -> Datum:
    ids = torch.randint(3, 100, (65,), generator=torch.Generator().manual_seed(seed))
    return Datum(ids[:-1], ids[1:])


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def step_s(runs: list[Run]) -> list[float]:
    """Seconds of a step of each, the median of some, in turns."""
    took: list[list[float]] = [[] for _ in runs]
    for seed in range(STEPS):
        for mine, run in zip(took, runs, strict=True):
            began = time.perf_counter()
            run.forward_backward(datum(seed))
            run.step(1e-4).result()
            mine.append(time.perf_counter() - began)
    return [statistics.median(each) for each in took]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="30 runs instead of 1,000")
    count, here = (30, 10) if parser.parse_args().quick else (1000, 100)
    report = Report("bench_runs")
    with (
        symbiosis.Executor("demo") as executor,
        tempfile.TemporaryDirectory() as folder,
        Engine(executor.endpoint) as plain,
        Engine(executor.endpoint, state=folder, in_memory=here) as engine,
    ):
        without, with_folder = step_s([plain.create(config()), engine.create(config(), name="first")])
        before, began = resident_bytes(), time.perf_counter()
        runs = [engine.create(config(), name=f"run-{number}") for number in range(count)]
        created_s = (time.perf_counter() - began) / count
        grown = resident_bytes() - before
        came = []
        for run in runs[: here // 2]:
            began = time.perf_counter()
            run.forward(datum(0)).result()
            came.append(time.perf_counter() - began)
        began = time.perf_counter()
        for _ in range(len(came)):
            runs[0].forward(datum(0)).result()
        forward_s = (time.perf_counter() - began) / len(came)
        on_disk = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file()) / (count + 1)
    report.bar("created_ms_each", 1e3 * created_s, "<=", 1000)
    report.bar("in_memory_kib_each", grown / min(count, here) / 1024, "<=", 16384)
    report.bar("on_disk_kib_each", on_disk / 1024, "<=", 4096)
    report.bar("comes_back_ms", 1e3 * (statistics.median(came) - forward_s), "<=", 1000)
    report.bar("step_ms", 1e3 * without, ">=", 0)
    report.bar("step_with_folder_over_without", with_folder / without, "<=", 1.5)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
