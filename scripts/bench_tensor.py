"""Decoding steps of a model that is divided over GPUs, beside those of one GPU.

Run from the repository root, on a host with several GPUs:
    python scripts/bench_tensor.py            # Llama-13B's layers, 20 of them
    python scripts/bench_tensor.py --quick    # 6 of them, about a minute
    python scripts/bench_tensor.py --devices 0-3 --compile
    python scripts/bench_tensor.py --ranks 2  # on one GPU, which they share by CUDA MPS: what dividing costs

32 sequences of 512 tokens go on for 200 steps: of the base, and each with an adapter of its own, of rank 16 at all projections. Weights are random. On
two GPUs a step reads half as much on each, and adds up two sums for each layer.
"""

import argparse
import gc
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import symbiosis
from symbiosis.base.devices import gpus_of
from symbiosis.base.reporting import Report, print_table
from symbiosis.executor import mps
from symbiosis.serving import Engine
from symbiosis.serving.lora.adapter_files import AdapterWeights
from symbiosis.serving.request import Output, Request, Sampling

SIZES: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 5120, "intermediate_size": 13824, "num_attention_heads": 40, "num_key_value_heads": 40,
    "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": None, "initializer_range": 0.02,
}  # fmt: skip
SEQUENCES, CONTEXT, STEPS, WARM = 32, 512, 200, 24
RANK = 16
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LATEST_S = 300.0


def model_of(layers: int) -> nn.Module:
    """A model with random weights, made on a GPU."""
    torch.manual_seed(0)
    with torch.device("cuda:0"):
        made: nn.Module = LlamaForCausalLM._from_config(
            LlamaConfig(**SIZES, num_hidden_layers=layers), dtype=torch.bfloat16
        )
    return made.eval().requires_grad_(False)


def adapter(layers: int, seed: int) -> AdapterWeights:
    """A LoRA at all projections."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=layers))
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            key = f"base_model.model.{name}.lora_"
            tensors[f"{key}A.weight"] = torch.randn(RANK, module.in_features, generator=generator).bfloat16() * 0.01
            tensors[f"{key}B.weight"] = torch.randn(module.out_features, RANK, generator=generator).bfloat16() * 0.01
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": PROJECTIONS,
        "task_type": "CAUSAL_LM",
    }
    return AdapterWeights(config, tensors)


def step_ms(engine: Engine, adapters: list[str | None]) -> tuple[float, list[list[int]]]:
    """How long a step takes in the median, and the tokens of all sequences."""
    times: list[list[float]] = [[] for _ in adapters]
    tokens: list[list[int]] = [[] for _ in adapters]
    ended, errors = threading.Semaphore(0), list[str]()
    chance = torch.Generator().manual_seed(1)
    numbers: dict[int, int] = {}

    def on_output(output: Output) -> None:
        number = numbers[output.request]
        times[number].append(time.perf_counter())
        tokens[number] += [token.id for token in output.tokens]
        if output.finish is not None:
            errors.extend([output.error] if output.error else [])
            ended.release()

    for number, name in enumerate(adapters):
        prompt = tuple(torch.randint(3, 32000, (CONTEXT,), generator=chance).tolist())
        id = engine.next_id()
        numbers[id] = number
        sampling = Sampling(max_tokens=WARM + STEPS + SEQUENCES, temperature=0.0, ignore_eos=True)
        engine.submit(Request(id=id, prompt=prompt, adapter=name, sampling=sampling), on_output)
    for _ in adapters:
        if not ended.acquire(timeout=LATEST_S):
            raise RuntimeError("no tokens come")
    if errors:
        raise RuntimeError(errors[0])
    last = times[-1][
        WARM : WARM + STEPS
    ]  # the last sequence begins some steps after the first, and all go on for longer
    return statistics.median(b - a for a, b in zip(last, last[1:], strict=False)) * 1e3, tokens


@contextmanager
def served(layers: int, devices: tuple[str, ...], compiles: bool) -> Iterator[Engine]:
    """An engine on one GPU, or over several."""
    options: dict[str, Any] = {
        "memory": 24 << 30,
        "max_batch": SEQUENCES,
        "prefill_tokens": 2048,
        "compiles": compiles,
        "adapter_memory": 16 << 30,
    }
    if len(devices) == 1:
        with Engine(model_of(layers), **options) as engine:
            yield engine
        return
    with tempfile.TemporaryDirectory() as folder:
        url = f"local://{folder}/executor.sock"
        with (
            symbiosis.Executor(model_of(layers).cpu(), listen=(url,), share_weights=True),
            Engine(url, devices=devices, **options) as engine,
        ):
            yield engine


def alike(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """The share of tokens that are the same up to where texts part: in bfloat16 they do, sooner or later."""
    same = 0
    for one, other in zip(ours, theirs, strict=True):
        same += next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))
    return same / sum(map(len, ours))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="6 layers")
    parser.add_argument("--layers", type=int, help="default: 20")
    parser.add_argument("--devices", default="0-1", help="GPUs; default: 0-1")
    parser.add_argument("--ranks", type=int, help="so many on the first GPU instead")
    parser.add_argument("--compile", action="store_true", help="compile the layers")
    args = parser.parse_args(arguments)
    layers = args.layers or (6 if args.quick else 20)
    devices = tuple(f"cuda:{number}" for number in gpus_of(args.devices))
    if args.ranks:
        devices = devices[:1] * args.ranks
    report = Report("bench_tensor")
    adapters = {f"adapter-{number}": adapter(layers, number) for number in range(SEQUENCES)}
    with ExitStack() as shared:
        if args.ranks:
            shared.enter_context(mps.running())
        return measured(layers, devices, args.compile, adapters, report)


def measured(
    layers: int, devices: tuple[str, ...], compiles: bool, adapters: dict[str, AdapterWeights], report: Report
) -> int:
    rows, found, texts = [], dict[str, float](), dict[str, list[list[int]]]()
    for places in (devices[:1], devices):
        began = time.perf_counter()
        gc.collect()
        torch.cuda.empty_cache()
        with served(layers, places, compiles) as engine:
            up = time.perf_counter() - began
            for name, weights in adapters.items():
                engine.add(name, weights)
            loads: dict[str, list[str | None]] = {"base": [None] * SEQUENCES, "adapters": list(adapters)}
            for what, names in loads.items():
                step_ms(engine, names)  # captures
                key = f"{what}_{len(places)}"
                found[key], texts[key] = step_ms(engine, names)
                rows.append(
                    (what, str(len(places)), f"{found[key]:.2f}", f"{SEQUENCES / found[key] * 1e3:.0f}", f"{up:.0f}")
                )
                print(rows[-1], flush=True)
            if len(places) > 1:
                report.figure("graphs", engine._served.runner._captured.graphs)
                report.figure("told_bytes_of_the_last_step", engine._served.told_bytes)  # type: ignore[attr-defined]
    print_table(("rows", "ranks", "ms a step", "tokens/s", "ready after s"), rows)
    count = len(devices)
    report.figure("layers", layers)
    report.figure("device", torch.cuda.get_device_name(0))
    for what in ("base", "adapters"):
        report.figure(f"{what}_one_gpu_ms", found[f"{what}_1"])
        report.figure(f"{what}_ms", found[f"{what}_{count}"])
        report.figure(f"{what}_step_over_one_gpu", found[f"{what}_{count}"] / found[f"{what}_1"])
        report.figure(f"{what}_tokens_alike", alike(texts[f"{what}_{count}"], texts[f"{what}_1"]))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
