"""A decoding step of the server on a GPU: Llama-7B shapes with random bfloat16 weights, adapters of rank 16 on all seven projections."""
# ruff: noqa: B023

import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _processes import progress
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import symbiosis
from symbiosis.base.reporting import Report, print_table
from symbiosis.demo.processes import executor
from symbiosis.kernels import with_triton
from symbiosis.serving.lora.adapter import versions
from symbiosis.serving.lora.adapter_cache import AdapterCache
from symbiosis.serving.lora.adapter_kinds import LoadedAdapter, Part
from symbiosis.serving.lora.target_layers import TargetLayers
from symbiosis.serving.request import Request
from symbiosis.serving.runner import paged_runner
from symbiosis.serving.runner.dense_runner import make_ready
from symbiosis.serving.runner.model_runner import ModelRunner
from symbiosis.serving.scheduler.scheduler_output import ScheduledRequest, SchedulerOutput
from symbiosis.serving.scheduler.scheduler_output import Sequence as ServedSequence

RANK = 16
GIB = 1 << 30


@dataclass(frozen=True)
class Size:
    """Of a model."""

    hidden: int = 4096
    inner: int = 11008
    layers: int = 32
    heads: int = 32
    vocabulary: int = 32000
    memory: int = 46 * GIB

    @property
    def weight_bytes(self) -> int:
        each = 4 * self.hidden**2 + 3 * self.hidden * self.inner
        return 2 * (self.layers * each + self.vocabulary * self.hidden)

    @property
    def adapter_bytes(self) -> int:
        return 2 * RANK * self.layers * (8 * self.hidden + 3 * (self.hidden + self.inner))

    def cache_bytes(self, tokens: int) -> int:
        return tokens * 2 * self.hidden * 2 * self.layers


LOADED = Size(memory=40 * GIB)  # beside a second model, of those that it is compared with
TINY = Size(256, 688, 2, 4, 512, 1 << 28)


def interpret() -> None:
    """Have the kernels run on a CPU."""
    if os.environ.get("TRITON_INTERPRET") != "1" or with_triton("gpu.paged_attention") is None:
        raise SystemExit(
            "install triton, and set TRITON_INTERPRET=1: a CPU runs these kernels by Triton's interpreter only"
        )
    paged_runner.is_for = lambda device, dtype: True  # type: ignore[attr-defined]
    with_triton("gpu.paged_attention").split_for = lambda *_: 1


def dtype_on(device: str) -> torch.dtype:
    """Triton's interpreter has no bfloat16."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def build(size: Size, device: str) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=size.hidden, intermediate_size=size.inner, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, num_key_value_heads=size.heads, vocab_size=size.vocabulary,
        max_position_embeddings=4096, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype_on(device))
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)


class Bench:
    """A served model, with adapters whose numbers are all alike: each has pages of its own."""

    def __init__(self, size: Size, model: nn.Module, most: int, compiles: bool) -> None:
        self.size = size
        self.served: ModelRunner = make_ready(model, size.memory)
        assert self.served.fetcher is not None, "there are no kernels for this device"
        self.served.arena.flat.normal_()  # of what would be there, sums could be anything
        self.residency = AdapterCache(self.served.arena, self.served.blocks.make_room, self.served.fetcher)
        self.sites = TargetLayers(self.served, self.residency)
        self._packed: Any = None
        self._parts = self._make_parts()
        self.served.serve(most, most + 512, compiles)

    def _make_parts(self) -> dict[str, Part]:
        parts = {}
        for name, module in self.served.model.named_modules():
            if isinstance(module, nn.Linear) and name != "lm_head":
                (N, K), like = module.weight.shape, {"dtype": self.served.dtype}
                parts[name] = Part(down=torch.randn(RANK, K, **like) / K**0.5, up=torch.randn(RANK, N, **like) * 0.01)
        self._packed = self.served.fetcher.pack(parts)
        return {name: part.to("meta") for name, part in parts.items()}

    def adapters(self, count: int) -> list[LoadedAdapter]:
        made = [
            LoadedAdapter(
                name=str(number), kind="LORA", rank=RANK, bytes=self.size.adapter_bytes, parts=self._parts,
                packed=self._packed, version=next(versions), pages=self._packed.layout.count,
            )
            for number in range(count)
        ]  # fmt: skip
        for adapter in made:
            assert self.residency.fetch(adapter)
            self.residency.pin(adapter)
        while not all(self.residency.is_here(adapter) for adapter in made):
            time.sleep(0.001)
        return made

    def drop(self, adapters: list[LoadedAdapter]) -> None:
        for adapter in adapters:
            self.residency.unpin(adapter)
            self.residency.forget(adapter.version)

    @contextmanager
    def requests(self, count: int, context: int, adapters: list[LoadedAdapter]) -> Iterator[SchedulerOutput]:
        """A step of so many that decode; each has one of the adapters, in turn."""
        sequences = []
        for number in range(count):
            adapter = adapters[number % len(adapters)] if adapters else None
            sequences.append(ServedSequence(Request(id=number, prompt=(1,)), 0, [1] * context, adapter, 0.0))
        sequences.sort(key=lambda sequence: sequence.version)
        for sequence in sequences:
            assert self.served.blocks.grow(sequence, context)
        yield SchedulerOutput(
            tuple(ScheduledRequest(sequence, row, 1, context - 1, True) for row, sequence in enumerate(sequences))
        )
        for sequence in sequences:
            self.served.release(sequence)

    def step(self, step: SchedulerOutput) -> list[int]:
        return self.served.forward(step).argmax(dim=-1).tolist()

    def time(self, step: SchedulerOutput, seconds: float) -> float:
        """Milliseconds of a step, its tokens on the host."""
        for _ in range(4):
            self.step(step)
        times: list[float] = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(times) < 5:
            start = time.perf_counter()
            self.step(step)
            times.append((time.perf_counter() - start) * 1e3)
        return statistics.median(times)

    def device_time(self, step: SchedulerOutput, count: int = 20) -> float:
        """Milliseconds that the device takes for a step."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        torch.cuda.synchronize()
        events[0].record()
        for _ in range(count):
            self.served.forward(step)
        events[1].record()
        torch.cuda.synchronize()
        return events[0].elapsed_time(events[1]) / count


def copy_speed() -> float:
    """Bytes a second that the device reads and writes when it copies."""
    a = torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    times = []
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        b.copy_(a)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 2 * a.numel() / min(times)


@dataclass(frozen=True)
class StepBench:
    """How steps are measured, and where their figures go."""

    report: Report
    quick: bool
    compiles: bool
    profiles: bool
    size: Size = Size()
    device: str = "cuda"

    @property
    def loads(self) -> Sequence[tuple[int, int]]:
        """Requests and tokens of each."""
        if self.device == "cpu":
            return ((4, 32),)
        return (32, 512), (32, 2048), *(() if self.quick else ((128, 512),))

    def run(self) -> None:
        """A step beside what it must read."""
        speed = copy_speed() if self.device == "cuda" else 1e10
        self.report.figure("copy_tb_per_s", speed / 1e12)
        progress(f"copies {speed / 1e12:.2f} TB/s")
        bench, rows = self.bench(build(self.size, self.device)), []
        for (count, context), times in self.times(bench).items():
            for (kind, different), (took, on_device) in times.items():
                moved = (
                    self.size.weight_bytes
                    + self.size.cache_bytes(count * context)
                    + different * self.size.adapter_bytes
                )
                floor = moved / speed * 1e3
                name = f"{count}x{context}_{kind}"
                rows.append((f"{count} x {context}, {kind}", f"{took:.2f}", f"{on_device:.2f}", f"{floor:.2f}", f"{took / floor:.2f}", f"{count / took * 1e3:,.0f}"))  # fmt: skip
                self.report.figure(f"{name}_ms", took)
                self.report.figure(f"{name}_device_ms", on_device)
                if kind == "distinct" and count == 32:
                    self.report.bar(f"{name}_over_floor", took / floor, "<=", 1.6 if context == 512 else 1.4)
            base, identical, distinct = (took for took, _ in times.values())
            self.report.bar(f"{count}x{context}_distinct_of_identical", identical / distinct, ">=", 0.95)
            self.report.bar(f"{count}x{context}_adapters_over_base", distinct / base, "<=", 1.2)
        if self.profiles and self.device == "cuda":
            show_profiles(bench, self.loads)
        print_table(("a step", "ms", "device ms", "floor ms", "x floor", "tokens/s"), rows)

    def run_quantised(self, how: str) -> None:
        """A step over an executor whose weights are packed, which is as fast as one of bfloat16 weights."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            whole = build(self.size, self.device)
            progress("saving the model")
            whole.save_pretrained(folder / "model")  # type: ignore[operator]
            bench = self.bench(whole)
            dense = self.times(bench)
            del bench, whole
            gc.collect()
            torch.cuda.empty_cache()
            where = f"local://{folder}/executor.sock"
            options = "--quantize", how, "--device", self.device, "--listen", where
            progress(f"an executor packs it as {how}")
            with executor(folder, str(folder / "model"), *options):
                packed_bench = self.bench(symbiosis.from_executor(where))
                packed = self.times(packed_bench)
                if self.profiles:
                    show_profiles(packed_bench, self.loads)
        rows = []
        for (count, context), times in packed.items():
            for (kind, different), (took, on_device) in times.items():
                before, _ = dense[count, context][kind, different]
                rows.append((f"{count} x {context}, {kind}", f"{before:.2f}", f"{took:.2f}", f"{on_device:.2f}", f"{before / took:.2f}"))  # fmt: skip
                self.report.figure(f"{count}x{context}_{kind}_{how}_ms", took)
            speedup = dense[count, context]["distinct", count][0] / times["distinct", count][0]
            self.report.bar(f"{count}x{context}_{how}_faster", speedup, ">=", 1.25)
        print_table(("a step", "bfloat16 ms", f"{how} ms", "device ms", "x"), rows)

    def bench(self, model: nn.Module) -> Bench:
        return Bench(self.size, model, max(count for count, _ in self.loads), self.compiles)

    def times(self, bench: Bench) -> dict[tuple[int, int], dict[tuple[str, int], tuple[float, float]]]:
        """Milliseconds of a step by load, by kind and number of adapters; and those that the device takes."""
        seconds, found = 0.3 if self.quick else 2.0, {}
        with torch.inference_mode():
            for count, context in self.loads:
                times = found[count, context] = dict[tuple[str, int], tuple[float, float]]()
                for kind, different in (("base", 0), ("identical", 1), ("distinct", count)):
                    adapters = bench.adapters(different)
                    with bench.requests(count, context, adapters) as step:
                        progress(f"{count} requests of {context} tokens, {kind}")
                        start = time.perf_counter()
                        took = bench.time(step, seconds)
                        progress(f"{took:.2f} ms (ready after {time.perf_counter() - start - seconds:.1f} s)")
                        on_device = bench.device_time(step) if self.device == "cuda" else 0.0
                    times[kind, different] = took, on_device
                    bench.drop(adapters)
        return found


def show_profiles(bench: Bench, loads: Iterable[tuple[int, int]]) -> None:
    """Which kernels take the time of a step. To be called when nothing else is to be timed: once the profiler has run, launches take longer."""
    for count, context in loads:
        for different in (0, count):
            adapters = bench.adapters(different)
            with bench.requests(count, context, adapters) as step:
                print(f"{count} requests of {context} tokens, {different} adapters")
                show_profile(lambda step=step: bench.step(step))
            bench.drop(adapters)


def show_profile(run: Callable[[], object]) -> None:
    """Which kernels take the time of a step."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    kernels = sorted(found.key_averages(), key=lambda each: -each.device_time_total)
    whole = sum(each.device_time_total for each in kernels)
    print(f"kernels take {whole / 1e3:.2f} ms")
    for each in kernels[:14]:
        print(
            f"  {each.device_time_total / 1e3:7.3f} ms {each.count:5d} x {each.device_time_total / each.count:6.1f} us  {each.key[:90]}"
        )


# ---------------------------------------------------------------- how kernels are cut


def captured_time(run: Callable[[], object], times: int = 20) -> float:
    """Milliseconds of one."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda.synchronize()
    events[0].record()
    for _ in range(times):
        graph.replay()
    events[1].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]) / times


# so many rows, which see so many tokens each, or between so many and so many
CASES = ((32, 512), (32, 2048), (128, 512), (8, 2048), (1, 8192), (32, (64, 2048)), (128, (64, 1024)))
CUTS = tuple((pages, warps, stages) for pages in (1, 2, 4) for warps in (2, 4) for stages in (2, 3, 4))
SPLITS = (1, 2, 4, 8, 16, 32)


def sweep_attention(heads: int = 32) -> None:
    """The decode kernel by how it is cut: which way is the best for each load, and which for all of them."""
    from symbiosis.kernels.gpu import paged_attention as kernels

    for shared in (heads, heads // 4):
        chosen, ratios = kernels.DECODE_ALONE if shared == heads else kernels.DECODE, dict[Any, list[float]]()
        for rows, tokens in CASES:
            blocks, found, read = time_attention(rows, tokens, heads, shared)
            best = sorted(found.items(), key=lambda pair: pair[1])
            speed = read / best[0][1] / 1e6
            print(f"attention {rows} x {tokens}, {shared} heads of keys: {speed:.2f} TB/s;", [(f"{us:.1f} us", *which) for which, us in best[:4]], flush=True)  # fmt: skip
            for cut in CUTS:
                for programs in (256, 512, 1024, 2048, 4096):
                    took = found.get((cut, kernels.split_for(programs, rows, shared, blocks)), float("inf"))
                    ratios.setdefault((*cut, programs), []).append(took / best[0][1])
        over_all = sorted((statistics.geometric_mean(of), max(of), cut) for cut, of in ratios.items())
        now = next(each for each in over_all if each[2] == tuple(chosen))
        for mean, worst, cut in (*over_all[:4], now):
            print(f"  {kernels.Decode(*cut)}: {mean:.3f} of the best for each, at worst {worst:.3f}", flush=True)


def time_attention(
    rows: int, tokens: int | tuple[int, int], heads: int, shared: int, layers: int = 4
) -> tuple[int, dict[Any, float], int]:
    """How many blocks the longest row has, the microseconds of each way to cut, and the bytes that must be read."""
    from symbiosis.kernels.gpu import paged_attention as kernels
    from symbiosis.kernels.paged_attention import How

    least, most = tokens if isinstance(tokens, tuple) else (tokens, tokens)
    blocks, page = most // 16, 2 * 16 * shared * 128
    seen = torch.linspace(least, most, rows).int().tolist() if least < most else [most] * rows
    flat = torch.randn(rows * layers * blocks * page, device="cuda", dtype=torch.bfloat16)
    pages = torch.randperm(rows * layers * blocks, device="cuda").int().view(rows, layers, blocks)
    singles = torch.tensor([(row, row, seen[row]) for row in range(rows)], dtype=torch.int32, device="cuda")
    query = torch.randn(heads, rows, 128, device="cuda", dtype=torch.bfloat16)
    result = torch.empty(rows, heads, 128, device="cuda", dtype=torch.bfloat16)
    found = {}
    for cut in CUTS:
        for split in SPLITS:

            def run(cut: Any = cut, split: int = split) -> None:
                for layer in range(layers):
                    memory = kernels.Memory(flat, pages, 16, page, page // 2, shared, 128, 128, layer)
                    kernels.decode(memory, How(0.09), query, singles, result, kernels.Decode(*cut), split)

            if split <= blocks and 64 <= rows * shared * split <= 16384:
                try:
                    found[cut, split] = captured_time(run, 5) / layers * 1e3
                except Exception as error:  # a GPU may have too little shared memory for it
                    print("attention", cut, split, repr(error)[:150], flush=True)
    return blocks, found, sum(seen) * shared * 128 * 2 * 2


def sweep_adapters() -> None:
    """The two kernels of 32 rows of distinct and of one adapter, at the groups of a 7B model, by how they are cut."""
    from symbiosis.kernels.gpu import adapter_rows as kernels

    page, rows = 131072, 32
    for K, widths in ((4096, [4096] * 3), (4096, [4096]), (4096, [11008] * 2), (11008, [4096])):
        members = len(widths)
        many = 8 * rows  # sets of adapters, so that nothing stays in the cache
        each = RANK * members * K + RANK * sum(widths)
        flat = torch.randn(many * each, device="cuda", dtype=torch.bfloat16)
        begin, size = flat.data_ptr(), 2
        stores, addresses = [], torch.zeros(1 + members, 8, rows, dtype=torch.int64)
        for number in range(many):
            at = begin + number * each * size
            word = [RANK * members, *(at + r * K * size for r in range(RANK * members))]
            records = [word]
            at += RANK * members * K * size
            for member, n in enumerate(widths):
                records.append([RANK, RANK * member, 0, 0, *(at + r * n * size for r in range(RANK))])
                at += RANK * n * size
            for entry, record in enumerate(records):
                stores.append(torch.tensor([*record, *[0] * 64], device="cuda"))
                addresses[entry, number // rows, number % rows] = stores[-1].data_ptr()
        x = torch.randn(rows, K, device="cuda", dtype=torch.bfloat16)
        ys = [torch.randn(rows, n, device="cuda", dtype=torch.bfloat16) for n in widths]
        words = torch.tensor([(row, 1) for row in range(rows)], dtype=torch.int32, device="cuda")
        sets = [addresses[:, number].contiguous().cuda() for number in range(8)]
        same = [each[:, :1].expand(-1, rows).contiguous() for each in sets]
        for kind, of in (("distinct", sets), ("identical", same)):
            for what in ("SHRINK_ONE", "EXPAND_ONE"):
                found, before = [], getattr(kernels, what)
                for columns, warps in ((256, 2), (512, 2), (512, 4), (1024, 4), (1024, 8), (2048, 8)):
                    setattr(kernels, what, kernels.Cut(columns, warps))
                    low = torch.empty(rows, kernels.parts_of(K), RANK * members, device="cuda")

                    def run(what: str = what, low: Any = low) -> None:
                        for records in of:
                            tiles = kernels.Tiles(words, records, True)
                            if what == "SHRINK_ONE":
                                kernels.shrink(x, tiles, rows, 0, page, low)
                            else:
                                kernels.expand_(ys, tiles, rows, 1, page, low)

                    try:
                        found.append((captured_time(run, 5) / len(of) * 1e3, columns, warps))
                    except Exception as error:
                        print(what, columns, warps, repr(error)[:150], flush=True)
                    finally:
                        setattr(kernels, what, before)
                found.sort()
                default = [took for took, *cut in found if tuple(cut) == tuple(before)[:2]]
                print(f"{what} {kind} {K} -> {widths}:", [f"{t:.1f} us {c} x {w} warps" for t, c, w in found[:4]], "default", [f"{t:.1f}" for t in default], flush=True)  # fmt: skip
