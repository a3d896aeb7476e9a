"""What a step of training costs: the engine that trains many runs, PEFT alone, and the frozen products by themselves, all of one process.

    python scripts/bench_train.py step           # one run on Llama-7B's shapes (16 layers, rank 16 at seven projections)
    python scripts/bench_train.py many           # 8 runs of 2 x 64 and 64 runs of 1 x 128, over captured PEFT programs one after another
    python scripts/bench_train.py memory         # what 8 runs of 2 x 512 have in memory, over one run with as many tokens
    python scripts/bench_train.py whole          # Qwen3-8B's shapes: tokens per second, and their share of the GPU's peak
    python scripts/bench_train.py curves         # a step over rows, and tokens per second over runs: scripts/plot_benchmarks.py draws them
    python scripts/bench_train.py beside --tiny  # beside a wrapped trainer and a program that makes tokens, on one executor (CPU only)
    python scripts/bench_train.py fuse           # an eager program under autocast, with and without `symbiosis.fuse`, wrapped and not
    python scripts/bench_train.py rl             # a step of RL for 8 tenants on Llama-7B's shapes: tokens per second, beside PEFT's `generate`
    python scripts/bench_train.py bitwise --tiny # `bitwise`: KL of sampler and trainer, and what it costs, part by part (CPU only)
    python scripts/bench_train.py --quick        # all, fewer steps
    python scripts/bench_train.py --tiny         # on a CPU: a small model, in float32

`products` is the limit: each frozen matrix once forward and once backward for all rows, and nothing else.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import _beside
import _bitwise
import _fuse
import _rl
import torch
from _gpu import ATTENTION, MLP, Shape, synchronize
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import symbiosis
from symbiosis.base.reporting import Report, print_table
from symbiosis.training import Engine

SUITES = ["step", "many", "memory", "curves", "beside", "whole", "fuse", "rl", "bitwise"]
RANK = 16
ENGINE_WARM_UP = (
    8  # steps: the first pass has one run, the next what came meanwhile, and the third of a size is captured
)
STEP_BARS = {(4, 1024): 1.30, (2, 512): 1.5}  # over the products
MANY_BARS = {(8, 2, 64): 2.0, (64, 1, 128): 2.5}  # over one after another
MEMORY_BAR = 1.1
QWEN3_8B = Shape(36, 4096, 12288, 32, 151936, "qwen3", (("num_key_value_heads", 8), ("head_dim", 128)))
SMALL = Shape(6, 576, 1536, 9, 49152, others=(("num_key_value_heads", 3), ("head_dim", 64)))  # a fifth of SmolLM2-135M
PEAK = 989e12  # of an H100 or H200, in bfloat16
ALONE_BAR = 0.9  # tokens per second of 64 runs over those of one with as many tokens


def config() -> LoraConfig:
    return LoraConfig(r=RANK, target_modules=[*ATTENTION, *MLP], task_type="CAUSAL_LM")


def batch(rows: int, length: int, vocabulary: int) -> dict[str, Tensor]:
    ids = torch.randint(0, vocabulary, (rows, length))
    return {"input_ids": ids, "labels": ids}


class Bench:
    """A model, and what is measured on it."""

    def __init__(self, shape: Shape, device: str, dtype: torch.dtype, steps: int) -> None:
        self.device, self._dtype, self._steps = device, dtype, steps
        self.shape, self.model = shape, shape.build(device).to(dtype)

    def median_s(self, step: Callable[[], object], warm_up: int = 2) -> float:
        for _ in range(warm_up):
            step()
        times = []
        for _ in range(self._steps):
            synchronize(self.device)
            began = time.perf_counter()
            step()
            synchronize(self.device)
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def products_s(self, rows: int) -> float:
        weights = [m.weight for m in self.model.modules() if isinstance(m, nn.Linear)]
        by_width = {n: torch.randn(rows, n, device=self.device, dtype=self._dtype) for w in weights for n in w.shape}

        @torch.no_grad()
        def step() -> None:
            for weight in weights:
                torch.nn.functional.linear(by_width[weight.shape[1]], weight)
            for weight in weights:
                by_width[weight.shape[0]] @ weight

        return self.median_s(step)

    def peft_s(self, rows: int, length: int, captured: bool = False) -> float:
        """PEFT alone; on a GPU as a Trainer's `bf16=True` has it, and perhaps as one CUDA graph."""
        autocast = self.device == "cuda"
        model = get_peft_model(self.model, config()).train()
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=1e-4, capturable=captured)
        given = {name: each.to(self.device) for name, each in batch(rows, length, self.shape.vocabulary).items()}

        def step() -> None:
            how: AbstractContextManager[object] = (
                torch.autocast(self.device, torch.bfloat16) if autocast else nullcontext()
            )
            with how:
                loss = model(**given, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=not captured)

        try:
            return self.median_s(symbiosis.capture(step) if captured else step)
        finally:
            self.model = model.unload()  # type: ignore[operator]
            self.model.eval()

    def engine_s(self, runs: int, rows: int, length: int) -> float:
        """A step of so many runs that come at the same time."""
        with self.engine(runs * rows * length) as engine:
            return self.median_s(self.steps_of(engine, runs, rows, length), ENGINE_WARM_UP)

    def engine(self, tokens: int) -> Engine:
        return Engine(self.model, max_tokens=max(8192, tokens), compiled=self.device == "cuda")

    def steps_of(self, engine: Engine, runs: int, rows: int, length: int) -> Callable[[], None]:
        """Return what asks for one step of each of so many new runs, and waits for the one before."""
        each = [engine.create(config(), seed=number) for number in range(runs)]
        given = [batch(rows, length, self.shape.vocabulary) for _ in each]

        waiting: list[Future[Any]] = []

        def step() -> None:
            before = waiting.copy()
            passes = [run.forward_backward(one) for run, one in zip(each, given, strict=True)]
            waiting[:] = [*passes, *[run.step(1e-4) for run in each]]
            for made in before:
                made.result()

        return step

    def activations(self, runs: int, rows: int, length: int) -> int:
        """Bytes that passes need beyond the base and the runs' own."""
        with self.engine(runs * rows * length) as engine:
            step = self.steps_of(engine, runs, rows, length)
            step()  # moments are there then
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            for _ in range(4):
                step()
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() - before


def step(bench: Bench, shapes: Sequence[tuple[int, int]], report: Report) -> None:
    table = []
    for rows, length in shapes:
        products, engine = bench.products_s(rows * length), bench.engine_s(1, rows, length)
        peft = bench.peft_s(rows, length)
        name = f"step_{rows}x{length}"
        report.figure(f"{name}_products_ms", 1e3 * products)
        report.figure(f"{name}_engine_ms", 1e3 * engine)
        report.figure(f"{name}_peft_ms", 1e3 * peft)
        report.bar(f"{name}_over_products", engine / products, "<=", STEP_BARS.get((rows, length), 10.0))
        table.append(
            (
                f"{rows} x {length}",
                *(f"{1e3 * each:.1f}" for each in (products, engine, peft)),
                f"{engine / products:.2f}",
            )
        )
    print_table(("a step of", "products ms", "engine ms", "PEFT ms", "over products"), table)


def many(bench: Bench, loads: Sequence[tuple[int, int, int]], report: Report) -> None:
    table = []
    for runs, rows, length in loads:
        together, alone = (
            bench.engine_s(runs, rows, length),
            bench.peft_s(rows, length, captured=bench.device == "cuda"),
        )
        one = bench.engine_s(1, runs * rows, length)
        tokens = runs * rows * length
        name = f"many_{runs}x{rows}x{length}"
        report.figure(f"{name}_tokens_per_s", tokens / together)
        report.bar(
            f"{name}_over_one_after_another", runs * alone / together, ">=", MANY_BARS.get((runs, rows, length), 1.0)
        )
        report.bar(f"{name}_over_one_run", one / together, ">=", ALONE_BAR)
        cells = (
            f"{1e3 * together:.1f}",
            f"{1e3 * alone * runs:.1f}",
            f"{tokens / together:,.0f}",
            f"{one / together:.2f}",
        )
        table.append((f"{runs} runs of {rows} x {length}", *cells))
        print(*table[-1], flush=True)
    print_table(("runs", "together ms", "PEFT in turn ms", "tokens/s", "over one run"), table)


def memory(bench: Bench, report: Report) -> None:
    many, one = bench.activations(8, 2, 512), bench.activations(1, 16, 512)
    report.figure("memory_activations_of_one_run_mib", one / 2**20)
    report.bar("memory_8x2x512_over_one_run", many / one, "<=", MEMORY_BAR)


def whole(bench: Bench, report: Report) -> None:
    """A model of 8 billion parameters, of which a pass multiplies by each but the embedding's, there and back."""
    rows, length = 4, 1024
    took = bench.engine_s(1, rows, length)
    multiplied = sum(m.weight.numel() for m in bench.model.modules() if isinstance(m, nn.Linear))
    report.figure("whole_tokens_per_s", rows * length / took)
    report.figure("whole_share_of_peak", 4 * multiplied * rows * length / took / PEAK)


def curves(bench: Bench, tiny: bool, report: Report) -> None:
    """What a step takes, over the rows of one run; and what runs of one sequence each come to together, and one after another."""
    table = []
    for rows in [16, 64, 256] if tiny else [64, 256, 1024, 4096, 8192]:
        length = min(rows, 1024)
        took = bench.products_s(rows), bench.engine_s(1, rows // length, length), bench.peft_s(rows // length, length)
        for series, seconds in zip(("products", "engine", "peft"), took, strict=True):
            report.figure(f"curve_rows_{rows}_{series}_ms", 1e3 * seconds)
        table.append((rows, *(f"{1e3 * seconds:.1f}" for seconds in took)))
    print_table(("rows", "products ms", "engine ms", "PEFT ms"), table)
    length, table = 16 if tiny else 128, []
    alone = length / bench.peft_s(1, length, captured=bench.device == "cuda")
    for runs in [1, 4, 16] if tiny else [1, 2, 4, 8, 16, 32, 64]:
        together = runs * length / bench.engine_s(runs, 1, length)
        report.figure(f"curve_runs_{runs}_together_tokens_per_s", together)
        report.figure(f"curve_runs_{runs}_peft_in_turn_tokens_per_s", alone)
        table.append((runs, f"{together:,.0f}", f"{alone:,.0f}"))
    print_table(("runs", "together tokens/s", "PEFT in turn"), table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", help=f"{', '.join(SUITES)}; default: all")
    parser.add_argument("--profile", default="", metavar="FILE", help="of `fuse`: where to write what its kernels take")
    parser.add_argument("--quick", action="store_true", help="5 steps of each instead of 20")
    parser.add_argument("--tiny", action="store_true", help="a small model in float32 on the CPU")
    given = parser.parse_args()
    if not given.tiny and not torch.cuda.is_available():
        parser.error("there is no CUDA device: --tiny measures a small model on the CPU")
    suites = given.suites or SUITES
    if unknown := set(suites) - set(SUITES):
        parser.error(f"there is no {', '.join(unknown)}: the suites are {', '.join(SUITES)}")
    steps = 5 if given.quick else 20
    torch.manual_seed(0)
    shape, device = (Shape(2, 256, 688, 4, 1000), "cpu") if given.tiny else (Shape(layers=16), "cuda")
    shapes = [(2, 64)] if given.tiny else list(STEP_BARS)
    loads = [(8, 1, 16)] if given.tiny else list(MANY_BARS)
    report = Report("bench_train")
    if "fuse" in suites:
        with tempfile.TemporaryDirectory() as folder:
            _fuse.fuse(shape, device, shapes, steps, f"local://{folder}/executor.sock", given.profile, report)
    if given.tiny:
        torch.set_num_threads(1)
    dtype = torch.float32 if given.tiny else torch.bfloat16
    if {"step", "many", "memory", "curves"} & set(suites):
        bench = Bench(shape, device, dtype, steps)
        if "step" in suites:
            step(bench, shapes, report)
        if "many" in suites:
            many(bench, loads, report)
        if "memory" in suites and not given.tiny:
            memory(bench, report)
        if "curves" in suites:
            curves(bench, given.tiny, report)
        del bench
    if "beside" in suites and given.tiny:
        model = shape.build(device).to(dtype)
        _beside.beside(model, config, shape.vocabulary, 4.0 if given.quick else 15.0, report)
    torch.cuda.empty_cache()
    if "whole" in suites and not given.tiny:
        whole(Bench(QWEN3_8B, device, dtype, steps), report)
        torch.cuda.empty_cache()
    if "rl" in suites:
        load = _rl.RlLoad(2, 2, 2, 8, 8) if given.tiny else _rl.RlLoad(8, 8 if given.quick else 64, 8, 32, 256)
        model = (shape if given.tiny else Shape()).build(device).to(dtype)
        _rl.rl(model, config(), load, 1 << 26 if given.tiny else 45 << 30, report)
    if "bitwise" in suites and given.tiny:
        for name, each, kind in (
            ("tiny", shape, torch.float32),
            ("tiny", shape, torch.bfloat16),
            ("small", SMALL, torch.float32),
        ):
            _bitwise.bitwise(name, each.build(device).to(kind), config(), report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
