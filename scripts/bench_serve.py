"""Tokens a second of the server, beside PEFT's own way.

    python scripts/bench_serve.py --cpu --quick
    python scripts/bench_serve.py --cpu      # 16 requests of 8 adapters at once, against PEFT one after another

On a GPU, with Llama-7B shapes; --quick is shorter, --tiny a small model on a CPU:

    python scripts/bench_serve.py step       # a decoding step with many adapters, beside the bytes that it must read
    python scripts/bench_serve.py punica     # Punica's load, beside PEFT's adapter_names and transformers' continuous batching
    python scripts/bench_serve.py slora      # S-LoRA's loads: up to 2,000 adapters, rates up to saturation
    python scripts/bench_serve.py cold       # the first token of an adapter in the host's memory, or on disk
    python scripts/bench_serve.py mixed      # streams of tokens beside two trainers on the same executor

One process, so that both have the same threads. Both take turns in every round; the table has medians over the rounds.
"""

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from _processes import prepare, progress
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from symbiosis.base.reporting import Report, print_table
from symbiosis.executor import mps
from symbiosis.kernels.packing import FORMATS
from symbiosis.serving import Engine
from symbiosis.serving.request import Output, Request, Sampling

REQUESTS, ADAPTERS = 16, 8
RANKS = (4, 8, 16, 32)
PROMPT = 32
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LATEST_S = 120.0
WHATS = ("step", "punica", "slora", "cold", "mixed", "attention", "adapters")


def build(hidden: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def save_adapters(model: nn.Module, folder: Path) -> list[str]:
    """LoRA of several ranks on all seven projections."""
    names = []
    for number in range(ADAPTERS):
        torch.manual_seed(number)
        rank = RANKS[number % len(RANKS)]
        config = LoraConfig(task_type="CAUSAL_LM", r=rank, target_modules=MODULES, init_lora_weights=False)
        adapted = get_peft_model(model, config)
        adapted.save_pretrained(folder / f"adapter-{number}")
        adapted.unload()
        names.append(f"adapter-{number}")
    return names


def prompts() -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(3, 2048, (PROMPT,), generator=generator).tolist()) for _ in range(REQUESTS)]


def by_server(engine: Engine, names: list[str], length: int, first_id: int) -> tuple[float, list[list[int]]]:
    """Seconds for all requests together, and what they said."""
    start = time.perf_counter()
    asked: list[SimpleQueue[Output]] = []
    for number, prompt in enumerate(prompts()):
        outputs: SimpleQueue[Output] = SimpleQueue()
        how = Sampling(max_tokens=length, temperature=0.0)
        name = names[number % len(names)]
        engine.submit(Request(id=first_id + number, prompt=prompt, adapter=name, sampling=how), outputs.put)
        asked.append(outputs)
    said = [[outputs.get(timeout=LATEST_S).tokens[0].id for _ in range(length)] for outputs in asked]
    return time.perf_counter() - start, said


def by_peft(model: Any, names: list[str], length: int) -> tuple[float, list[list[int]]]:
    start = time.perf_counter()
    said = []
    for number, prompt in enumerate(prompts()):
        model.set_adapter(names[number % len(names)])
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        made = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=length, do_sample=False)
        said.append(made[0, PROMPT:].tolist())
    return time.perf_counter() - start, said


def on_gpu(args: argparse.Namespace) -> int:
    import _serve_gpu
    import _serve_loads

    report, compiles = Report(f"bench_serve {args.what}"), args.compile and not args.tiny
    if args.what in _serve_loads.LOADS:
        size, device = (_serve_gpu.TINY, "cpu") if args.tiny else (_serve_gpu.LOADED, "cuda")
        setting = _serve_loads.Setting(
            size, device, args.quick, args.tiny, compiles, args.profile, tuple(args.only), args.seconds
        )
        with nullcontext() if args.tiny or args.what != "mixed" else mps.running():
            _serve_loads.LOADS[args.what](report, setting)
    elif args.what == "attention":
        _serve_gpu.sweep_attention()
    elif args.what == "adapters":
        _serve_gpu.sweep_adapters()
    elif args.tiny:
        _serve_gpu.interpret()
        _serve_gpu.StepBench(report, True, compiles, False, _serve_gpu.TINY, "cpu").run()
    else:
        size = replace(_serve_gpu.Size(), layers=args.layers or _serve_gpu.Size.layers)
        bench = _serve_gpu.StepBench(report, args.quick, compiles, args.profile, size)
        bench.run_quantised(args.quantize) if args.quantize else bench.run()
    return report.finish()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what", nargs="?", choices=WHATS, help="on a GPU; attention, adapters: how their kernels are best cut"
    )
    parser.add_argument("--cpu", action="store_true", help="on this machine's CPU, in float32")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=True, help="with torch.compile, as serve --compile"
    )
    parser.add_argument(
        "--profile", action="store_true", help="step: tell which kernels take the time; punica: which kinds of steps do"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="PART", help="slora: S1, S2; punica: distinct, uniform, skewed, identical, "
        "peft_adapter_names, transformers_batching; its bars hold for what is run"
    )  # fmt: skip
    parser.add_argument("--tiny", action="store_true", help="of a tiny model, on a CPU; step: by Triton's interpreter")
    parser.add_argument("--quick", action="store_true", help="shorter, and one round")
    parser.add_argument("--seconds", type=float, help="slora: how long a rate is offered (120; with --quick 12)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, help="of the model (with --cpu 4; step: 32)")
    parser.add_argument(
        "--quantize", choices=FORMATS, help="step: over an executor that packs the weights so, beside whole ones"
    )
    args = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    prepare(args.threads)
    if args.what is not None:
        return on_gpu(args)
    if not args.cpu:
        parser.error(f"say what ({', '.join(WHATS)}), or --cpu")
    layers = args.layers or 4
    length, rounds = (16, 1) if args.quick else (64, 3)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        names = save_adapters(build(args.hidden, layers), folder)
        alone: Any = PeftModel.from_pretrained(build(args.hidden, layers), folder / names[0], names[0])
        for other in names[1:]:
            alone.load_adapter(folder / other, other)
        alone.eval()
        times: dict[str, list[float]] = {"server": [], "PEFT in turn": []}
        with Engine(build(args.hidden, layers), adapters=folder, memory=1 << 29) as engine:
            by_server(engine, names, 2, 10**6)
            by_peft(alone, names[:1], 2)
            for number in range(rounds):
                progress(f"round {number + 1} of {rounds}")
                seconds, mine = by_server(engine, names, length, 100 * number)
                times["server"].append(seconds)
                seconds, theirs = by_peft(alone, names, length)
                times["PEFT in turn"].append(seconds)
    pace = {side: REQUESTS * length / statistics.median(taken) for side, taken in times.items()}
    print_table(("", "tokens/s"), [(side, f"{of:,.0f}") for side, of in pace.items()])
    report = Report("bench_serve")
    report.figure("hidden", args.hidden)
    report.figure("layers", layers)
    report.figure("server_tokens_per_s", pace["server"])
    report.figure("peft_tokens_per_s", pace["PEFT in turn"])
    report.bar("different_requests", sum(a != b for a, b in zip(mine, theirs, strict=True)), "<=", 0)
    report.bar("over_peft", pace["server"] / pace["PEFT in turn"], ">=", 3.0)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
