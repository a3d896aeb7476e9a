"""Long contexts on a CPU: keys and values in the host's memory and the C function that looks at them, against a copy of as much memory, and
against the model's own cache and SDPA.

    python scripts/bench_long.py
    python scripts/bench_long.py --tokens 32768 --layers 4

With --tiny nothing is judged.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import symbiosis
from symbiosis.base.reporting import Report, print_table
from symbiosis.kernels.paged_attention import How, PageLayout, SeenTokens, compiled

HEADS = {"32 heads": (32, 32), "32 heads, 8 of keys": (32, 8)}
SIZE, BLOCK = 128, 256
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
COPY_BAR, TOKEN_BAR = 1.5, 1.0


def seconds(run: Callable[[], Any], times: int) -> float:
    """The best of so many, after one that warms up."""
    run()
    took = []
    for _ in range(times):
        begun = time.perf_counter()
        run()
        took.append(time.perf_counter() - begun)
    return min(took)


def bandwidth(report: Report, tokens: int, times: int, judged: bool) -> None:
    """How fast the C function reads keys and values, and how fast a copy reads."""
    rows = []
    threads = len(os.sched_getaffinity(0))
    for dtype_name, dtype in DTYPES.items():
        kernel = compiled(dtype)
        if kernel is None:
            raise SystemExit("there is no C compiler")
        for name, (heads, shared) in HEADS.items():
            blocks = max(1, tokens // BLOCK)
            memory = torch.randn(blocks, 2 * BLOCK * shared * SIZE).to(dtype)
            addresses = (memory.data_ptr() + torch.arange(blocks) * memory.stride(0) * dtype.itemsize).view(1, -1)
            query, result = torch.randn(heads, 1, SIZE).to(dtype), torch.empty(1, heads, SIZE, dtype=dtype)
            seen, count = SeenTokens(torch.tensor([0]), torch.tensor([blocks * BLOCK]), blocks * BLOCK), threads
            pages = PageLayout(shared, SIZE, SIZE, BLOCK, 0, BLOCK * shared * SIZE)
            look = (None, pages, addresses, seen, How(SIZE**-0.5), query, result, count)
            to = torch.empty_like(memory)
            mine = memory.nbytes / seconds(lambda kernel=kernel, look=look: kernel.attend(*look), times) / 1e9
            copied = memory.nbytes / seconds(lambda to=to, memory=memory: to.copy_(memory), times) / 1e9
            key = f"{dtype_name}_{shared}_heads"
            report.figure(f"{key}_gb_per_s", mine)
            report.figure(f"{key}_copy_reads_gb_per_s", copied)
            if judged and shared == heads:
                report.bar(f"{key}_copy_over_it", copied / mine, "<=", COPY_BAR)
            rows.append((f"{dtype_name}, {name}", f"{mine:.1f}", f"{copied:.1f}", f"{mine / copied:.2f}"))
    print_table(("keys and values", "read, GB/s", "a copy reads", "ratio"), rows, title=f"{threads} threads")


def token(report: Report, tokens: int, layers: int, times: int, tiny: bool) -> None:
    """A token after so many others: by `offload_cache` and by the model's own cache, taking turns, and whether it is the same."""
    rows = []
    for dtype_name in ("bfloat16", "float32"):
        for name, (heads, shared) in HEADS.items():
            width = 64 if tiny else 1024
            config = LlamaConfig(
                vocab_size=512, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
                num_attention_heads=heads, num_key_value_heads=shared, head_dim=8 if tiny else SIZE,
                max_position_embeddings=2 * tokens + 64, pad_token_id=0,
            )  # fmt: skip
            torch.manual_seed(0)
            model: Any = LlamaForCausalLM(config).eval().to(DTYPES[dtype_name])
            caches = {"host": symbiosis.offload_cache(model), "own": DynamicCache(config=config)}
            fill(caches, config, tokens, DTYPES[dtype_name])
            took, made = decode(model, caches, times)
            key = f"token_{dtype_name}_{shared}_heads"
            ratio = took["host"] / took["own"]
            for side, each in took.items():
                report.figure(f"{key}_{side}_ms", each * 1e3)
            if tiny:
                report.figure(f"{key}_ratio", ratio)
            else:
                report.bar(f"{key}_ratio", ratio, "<=", TOKEN_BAR)
            if dtype_name == "float32":
                report.bar(
                    f"{key}_tokens_that_differ", sum(a != b for a, b in zip(*made.values(), strict=True)), "==", 0
                )
            rows.append(
                (f"{dtype_name}, {name}", f"{took['host'] * 1e3:.1f}", f"{took['own'] * 1e3:.1f}", f"{ratio:.2f}")
            )
    print_table(
        ("model", "offload_cache, ms", "its own, ms", "ratio"),
        rows,
        title=f"a token after {tokens} others, {layers} layers",
    )


def fill(caches: dict[str, Any], config: LlamaConfig, tokens: int, dtype: torch.dtype) -> None:
    """With the same random keys and values: reading a prompt on a CPU would take minutes."""
    for layer in range(config.num_hidden_layers):
        shape = 1, config.num_key_value_heads, tokens, config.head_dim
        keys, values = (torch.randn(shape).to(dtype) for _ in range(2))
        for cache in caches.values():
            cache.update(keys, values, layer)


@torch.no_grad()
def decode(model: Any, caches: dict[str, Any], times: int) -> tuple[dict[str, float], dict[str, list[int]]]:
    """The seconds that a token takes with each cache, and the tokens."""
    took: dict[str, list[float]] = {side: [] for side in caches}
    made: dict[str, list[int]] = {side: [7] for side in caches}
    for _ in range(times + 1):
        for side, cache in caches.items():
            begun = time.perf_counter()
            logits = model(input_ids=torch.tensor([[made[side][-1]]]), past_key_values=cache, use_cache=True).logits
            took[side].append(time.perf_counter() - begun)
            made[side].append(int(logits[0, -1].argmax()))
    return {side: statistics.median(each[1:]) for side, each in took.items()}, made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="of the context")
    parser.add_argument("--layers", type=int, default=2, help="of the model")
    parser.add_argument("--times", type=int, default=7, help="that each is measured")
    parser.add_argument("--tiny", action="store_true", help="whether all runs, not how fast")
    args = parser.parse_args()
    tokens = min(args.tokens, 512) if args.tiny else args.tokens
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    report = Report("bench_long")
    report.figure("tokens", tokens)
    report.figure("layers", args.layers)
    bandwidth(report, tokens, args.times, judged=not args.tiny)
    token(report, tokens, args.layers, args.times, args.tiny)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
