"""Products by packed weights on a GPU, beside those of bfloat16: the layers of Llama-7B, cold, as one CUDA graph for each number of rows.

Run from the repository root:
    python scripts/bench_quantised.py
    python scripts/bench_quantised.py --layers 8 --rows 1 32 64 1024

Each weight is made whole for its product, as the executor does for the rows of all that it joins. Where one kernel multiplies the few rows of several
programs, it makes the values of int8 and fp8 itself (`in one`).
"""

import argparse
import statistics
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from symbiosis.base.reporting import Report, print_table
from symbiosis.kernels.gpu import few_rows
from symbiosis.kernels.gpu.gather import IN
from symbiosis.kernels.packed import PackedWeight, ScaledWeight
from symbiosis.kernels.packing import FORMATS, pack
from symbiosis.kernels.product import product

WIDTH, INNER = 4096, 11008
SHAPES = [(WIDTH, WIDTH)] * 4 + [(INNER, WIDTH)] * 2 + [(WIDTH, INNER)]
TIMES = 9


def ms_of(run: Callable[[], object]) -> float:
    """How long a graph of it takes, in the median."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    found = []
    for _ in range(TIMES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return statistics.median(found)


def forward(rows: dict[int, Tensor], weights: list[Tensor]) -> None:
    for weight in weights:
        product(rows[weight.shape[1]], weight.t(), None)


def forward_packed(rows: dict[int, Tensor], weights: list[PackedWeight]) -> None:
    for weight in weights:
        product(rows[weight.shape[1]], weight.whole(torch.bfloat16).t(), None)


class InOne:
    """The products of few rows by one kernel each."""

    def __init__(
        self, weights: list[PackedWeight], rows: dict[int, Tensor], cut: few_rows.Tiling | None = None
    ) -> None:
        self._done, self._turn = (torch.zeros(1, dtype=kind, device="cuda") for kind in (torch.int32, torch.int64))
        self._results: list[Tensor] = []
        self._products = []
        for weight in weights:
            assert isinstance(weight, ScaledWeight)
            x = rows[weight.shape[1]]
            y = x.new_empty(len(x), weight.shape[0])
            kernel = few_rows.FewRowsKernel([weight.codes.t()], [None], len(x), cut, x.dtype, [weight.scale])
            words = kernel.page([row.data_ptr() for row in x], [[row.data_ptr() for row in y]])
            self._products.append((kernel, torch.tensor([0] * IN + words, device="cuda")))
            self._results.append(y)

    def run(self) -> None:
        for kernel, page in self._products:
            kernel.multiply(page, self._turn, 0, self._done)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8, help="default: 8")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1, 32, 64, 1024, 8192], help="default: 1 32 64 1024 8192"
    )
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    floats = [torch.randn(shape, device="cuda").bfloat16() * 0.02 for _ in range(args.layers) for shape in SHAPES]
    packed = {format: [pack(weight, format) for weight in floats] for format in FORMATS}
    report, table = Report("bench_quantised"), []
    for count in args.rows:
        rows = {width: torch.randn(count, width, device="cuda").bfloat16() for width in (WIDTH, INNER)}
        plain = ms_of(lambda rows=rows: forward(rows, floats))  # type: ignore[misc]
        for format, weights in packed.items():
            found = ms_of(lambda rows=rows, weights=weights: forward_packed(rows, weights))  # type: ignore[misc]
            table.append((format, str(count), f"{plain:.3f}", f"{found:.3f}", f"{found / plain:.2f}"))
            report.figure(f"{format}_{count}_rows_over_bf16", found / plain)
            if all(few_rows.takes_packed([weight], torch.bfloat16, count) for weight in weights):
                found = ms_of(InOne(weights, rows).run)
                table.append((f"{format} in one", str(count), f"{plain:.3f}", f"{found:.3f}", f"{found / plain:.2f}"))
                report.figure(f"{format}_{count}_rows_in_one_over_bf16", found / plain)
    print_table(("format", "rows", "bf16 ms", "packed ms", "over bf16"), table)
    report.figure("device", torch.cuda.get_device_name())
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
