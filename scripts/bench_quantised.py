"""Products by packed weights on a GPU, beside those of bfloat16: the layers of Llama-7B, cold, as one CUDA graph for each number of rows.

Run from the repository root:
    python scripts/bench_quantised.py
    python scripts/bench_quantised.py --layers 8 --rows 1 32 64 1024

Each weight is made whole for its product, as the executor does for many rows, and with --batch-invariant for all. Few rows are multiplied by the codes
(`by codes`).
"""

import argparse
import statistics
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from symbiosis.base.reporting import Report, print_table
from symbiosis.kernels.gpu import packed_rows
from symbiosis.kernels.packed import GroupedWeight, PackedWeight
from symbiosis.kernels.packing import FORMATS, pack
from symbiosis.kernels.product import product

WIDTH, INNER = 4096, 11008
SHAPES = [(WIDTH, WIDTH)] * 4 + [(INNER, WIDTH)] * 2 + [(WIDTH, INNER)]
TIMES = 9
GROUP = 128


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


def by_codes(rows: dict[int, Tensor], products: list[packed_rows.PackedRows]) -> None:
    for each in products:
        each.multiply(rows[each.width], [None])


def of_4_bits(shape: torch.Size) -> GroupedWeight:
    """Some weight as GPTQ and AWQ hold it."""
    N, K = shape
    codes = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8, device="cuda")
    scale, zero = torch.rand(N, K // GROUP, device="cuda").half() / 100, torch.full((N, K // GROUP), 8, device="cuda")
    return GroupedWeight((N, K), "gptq", codes, scale, zero.byte(), torch.arange(K, device="cuda") // GROUP)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8, help="default: 8")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1, 32, 64, 1024, 8192], help="default: 1 32 64 1024 8192"
    )
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    floats = [torch.randn(shape, device="cuda").bfloat16() * 0.02 for _ in range(args.layers) for shape in SHAPES]
    packed: dict[str, list[PackedWeight]] = {format: [pack(weight, format) for weight in floats] for format in FORMATS}
    packed["int4"] = [of_4_bits(weight.shape) for weight in floats]
    report, table = Report("bench_quantised"), []
    for count in args.rows:
        rows = {width: torch.randn(count, width, device="cuda").bfloat16() for width in (WIDTH, INNER)}
        plain = ms_of(lambda rows=rows: forward(rows, floats))  # type: ignore[misc]
        for format, weights in packed.items():
            found = ms_of(lambda rows=rows, weights=weights: forward_packed(rows, weights))  # type: ignore[misc]
            table.append((format, str(count), f"{plain:.3f}", f"{found:.3f}", f"{found / plain:.2f}"))
            report.figure(f"{format}_{count}_rows_over_bf16", found / plain)
            products = [
                found for weight in weights if (found := packed_rows.prepared([weight], [None], torch.bfloat16))
            ]
            if products and count <= packed_rows.MOST_ROWS:
                found = ms_of(lambda rows=rows, products=products: by_codes(rows, products))  # type: ignore[misc]
                table.append((f"{format} by codes", str(count), f"{plain:.3f}", f"{found:.3f}", f"{found / plain:.2f}"))
                report.figure(f"{format}_{count}_rows_by_codes_over_bf16", found / plain)
    print_table(("format", "rows", "bf16 ms", "packed ms", "over bf16"), table)
    report.figure("device", torch.cuda.get_device_name())
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
