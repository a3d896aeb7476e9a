"""A Trainer-like program for `bench_train.py fuse`: LoRA under autocast, eager, with and without `symbiosis.fuse`."""

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from _gpu import ATTENTION, MLP, Serving, Shape, synchronize
from _processes import progress, workers
from peft import LoraConfig, get_peft_model
from torch import Tensor

import symbiosis
from symbiosis.base.reporting import Report, print_table

BARS = {(4, 1024): 0.70, (2, 512): 0.75}  # over the same program without `fuse`
SPLIT_BAR = 1.02  # fused and wrapped, over fused
RANK = 16
TURNS = 3  # on a GPU


class StepFigures(NamedTuple):
    """What a step takes."""

    seconds: float
    peak_bytes: int


class FuseProgram:
    """Trains an adapter of the executor's model at `endpoint`, or without one of a model of its own."""

    def __init__(self, endpoint: str | None, shape: Shape, device: str) -> None:
        self._device, self._vocabulary = device, shape.vocabulary
        model = symbiosis.from_executor(endpoint, device=device) if endpoint else shape.build(device)
        torch.manual_seed(0)
        config = LoraConfig(r=RANK, target_modules=[*ATTENTION, *MLP], task_type="CAUSAL_LM")
        self._model = get_peft_model(model, config).train()
        self._parameters = [p for p in self._model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(self._parameters, lr=1e-4, fused=device == "cuda")

    def measure(self, rows: int, length: int, fused: bool, steps: int) -> StepFigures:
        """Return the median of some steps, and the most memory that torch had in use."""
        step = self._step(rows, length, fused)
        times = []
        for number in range(steps + 3):
            if number == 3 and self._device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            step()
            synchronize(self._device)
            times.append(time.perf_counter() - began)
        peak = torch.cuda.max_memory_allocated() if self._device == "cuda" else 0
        return StepFigures(statistics.median(times[3:]), peak)

    def profile(self, rows: int, length: int, file: str) -> None:
        """Write what the kernels of a fused step take, and its calls on the CPU."""
        step = self._step(rows, length, True)
        for _ in range(3):
            step()
        with torch.profiler.profile() as profile:
            for _ in range(2):
                step()
            synchronize(self._device)
        with Path(file).open("a") as out:
            for order in ("self_cuda_time_total", "self_cpu_time_total"):
                table = profile.key_averages().table(sort_by=order, row_limit=45, max_name_column_width=70)
                out.write(f"{rows} x {length}, by {order}, 2 steps\n{table}\n")

    def _step(self, rows: int, length: int, fused: bool) -> Callable[[], Tensor]:
        (symbiosis.fuse if fused else symbiosis.unfuse)(self._model)
        ids = torch.randint(3, self._vocabulary, (rows, length), generator=torch.Generator().manual_seed(1))
        ids = ids.to(self._device)

        def step() -> Tensor:
            on_gpu = self._device == "cuda"
            how: AbstractContextManager[object] = torch.autocast("cuda", torch.bfloat16) if on_gpu else nullcontext()
            with how:
                loss: Tensor = self._model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
            self._optimizer.step()
            self._optimizer.zero_grad()
            return loss.detach()

        return step


def fuse(
    shape: Shape, device: str, shapes: list[tuple[int, int]], steps: int, endpoint: str, profile: str, report: Report
) -> None:
    """Compare the program with itself, and with one whose model an executor holds. They take turns, and the best of each counts: where Python is
    what takes the time, a step of the same program varies by half."""
    before, after, wrapped = (dict[tuple[int, int], StepFigures]() for _ in range(3))
    with (
        workers(FuseProgram, [(None, shape, device)]) as [own],
        workers(Serving, [(shape, device, endpoint, {"share_weights": True})]) as [server],
        workers(FuseProgram, [(server.call("endpoints")[0], shape, device)]) as [split],
    ):
        for turn, each in product(range(TURNS if device == "cuda" else 1), shapes):
            for found, program, fused in (before, own, False), (after, own, True), (wrapped, split, True):
                figures = program.call("measure", *each, fused, steps)
                found[each] = min(found.get(each, figures), figures)
            progress(f"turn {turn}, {each}: {before[each]}, fused {after[each]}, split {wrapped[each]}")
        for each in shapes if profile else ():
            own.call("profile", *each, profile)
    table = []
    for each in shapes:
        name = f"fuse_{each[0]}x{each[1]}"
        report.figure(f"{name}_ms", 1e3 * after[each].seconds)
        report.figure(f"{name}_before_ms", 1e3 * before[each].seconds)
        report.bar(f"{name}_over_before", after[each].seconds / before[each].seconds, "<=", BARS.get(each, 1.0))
        report.bar(f"{name}_split_over_unsplit", wrapped[each].seconds / after[each].seconds, "<=", SPLIT_BAR)
        report.figure(f"{name}_peak_gib", after[each].peak_bytes / 2**30)
        report.figure(f"{name}_before_peak_gib", before[each].peak_bytes / 2**30)
        cells = [f"{1e3 * each.seconds:.1f}" for each in (before[each], after[each], wrapped[each])]
        peaks = [f"{figures.peak_bytes / 2**30:.1f}" for figures in (before[each], after[each])]
        table.append((f"{each[0]} x {each[1]}", *cells, *peaks))
    print_table(("a step of", "before ms", "fused ms", "fused, split ms", "before GiB", "fused GiB"), table)
