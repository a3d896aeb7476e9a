"""A server and a trainer on one packed base with the shapes of Llama-70B, on one GPU: what they take of its memory and make, alone and together.

Run from the repository root:
    python scripts/bench_large.py                  # on a GPU: 8 of its 80 layers, as nf4
    python scripts/bench_large.py --layers 80      # all of them, if the disk holds 140 GB
    python scripts/bench_large.py --tiny           # a tiny model on a CPU

The executor is a process of its own; the server's engine and the training engine are this one's. Weights are random, so texts say nothing.
"""

import argparse
import sys
import tempfile
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from statistics import fmean

import torch
from _processes import progress
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM

from symbiosis.base.reporting import Report, print_table
from symbiosis.demo.processes import executor
from symbiosis.kernels.packing import FORMATS
from symbiosis.serving import Engine
from symbiosis.serving.request import Output, Request, Sampling
from symbiosis.training import Engine as TrainingEngine
from symbiosis.training import Run

GIB = 1 << 30
LATEST_S = 120.0
LARGE = {
    "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
}  # fmt: skip
ROWS, LENGTH = 2, 512  # of a training step
LEAST_STEPS = 4  # beside which tokens are counted
REQUESTS, PROMPT, TOKENS = 16, 128, 64


def save(folder: Path, shapes: dict[str, int], layers: int, device: str) -> int:
    """Write a model of random weights, and return the bytes of its layers in bfloat16."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **shapes, num_hidden_layers=layers, max_position_embeddings=4096, eos_token_id=None, pad_token_id=0
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.save_pretrained(folder)
    return sum(weight.nbytes for weight in model.model.layers.parameters())


def used(device: str) -> int:
    """Bytes of the GPU's memory that all programs take together."""
    if device == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


class Load:
    """What both programs do, as often as they are asked to."""

    def __init__(self, engine: Engine, run: Run, vocabulary: int, is_tiny: bool) -> None:
        self._engine, self._run, self._numbers = engine, run, iter(range(1, 1 << 30))
        self._length = 16 if is_tiny else LENGTH
        generator = torch.Generator().manual_seed(1)
        self._ids = torch.randint(3, vocabulary, (ROWS, self._length), generator=generator)
        self._prompts = torch.randint(3, vocabulary, (REQUESTS, 8 if is_tiny else PROMPT), generator=generator).tolist()

    def tokens_per_s(self) -> float:
        """Have all requests answered at once."""
        begun, asked = time.perf_counter(), []
        for prompt in self._prompts:
            outputs: SimpleQueue[Output] = SimpleQueue()
            how = Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
            self._engine.submit(Request(id=next(self._numbers), prompt=tuple(prompt), sampling=how), outputs.put)
            asked.append(outputs)
        made = 0
        for outputs in asked:
            while (output := outputs.get(timeout=LATEST_S)).finish is None:
                made += len(output.tokens)
            made += len(output.tokens)
        assert made == REQUESTS * TOKENS
        return made / (time.perf_counter() - begun)

    def step_s(self) -> float:
        """Make one step."""
        begun = time.perf_counter()
        self._run.forward_backward({"input_ids": self._ids, "labels": self._ids}, "cross_entropy").result(LATEST_S)
        self._run.step(1e-4).result(LATEST_S)
        return time.perf_counter() - begun


def together(load: Load) -> tuple[float, float]:
    """Return how many tokens a second are made while steps are, and how long these take on average. The first time says nothing: steps are captured
    anew for what is advised by now."""
    stopped, steps = threading.Event(), list[float]()

    def step() -> None:
        while not stopped.is_set():
            steps.append(load.step_s())

    thread = threading.Thread(target=step)
    thread.start()
    try:
        progress(f"the first time: {load.tokens_per_s():,.0f} tokens/s")
        steps.clear()
        found = []
        while len(steps) < LEAST_STEPS:  # a few requests may be over before a step is
            found.append(load.tokens_per_s())
    finally:
        stopped.set()
        thread.join()
    return fmean(found), fmean(steps)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8, help="of 80; default: 8")
    parser.add_argument("--quantize", choices=FORMATS, default="nf4", help="default: nf4")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU")
    args = parser.parse_args(arguments)
    shapes, device, layers = (TINY, "cpu", 2) if args.tiny else (LARGE, "cuda", args.layers)
    report = Report("bench_large")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        progress(f"saving {layers} layers")
        whole = save(folder / "model", shapes, layers, device)
        if device == "cuda":
            torch.cuda.empty_cache()
        before, where = used(device), f"local://{folder}/executor.sock"
        options = "--quantize", args.quantize, "--device", device, "--listen", where
        progress(f"an executor packs them as {args.quantize}")
        with executor(folder, str(folder / "model"), *options):
            of_executor = used(device) - before
            progress("a server and a trainer join")
            with (
                Engine(where, memory=(1 << 26) if args.tiny else 4 * GIB) as engine,
                TrainingEngine(where) as trainer,
            ):
                run = trainer.create(LoraConfig(r=16, target_modules="all-linear"), seed=0)
                load = Load(engine, run, shapes["vocab_size"], args.tiny)
                load.tokens_per_s(), load.step_s()
                tokens, step = load.tokens_per_s(), min(load.step_s() for _ in range(3))
                progress("together")
                tokens_beside, step_beside = together(load)
                both = used(device) - before - of_executor
    rows = [
        ("tokens/s of 16 requests", f"{tokens:,.0f}", f"{tokens_beside:,.0f}"),
        (f"seconds of a step of {ROWS} x {LENGTH}", f"{step:.3f}", f"{step_beside:.3f}"),
    ]
    print_table(("", "alone", "together"), rows)
    if device == "cuda":
        print(
            f"memory: {whole / GIB:.1f} GiB of layers in bfloat16; executor {of_executor / GIB:.1f} GiB, both programs {both / GIB:.1f} GiB"
        )
        report.figure("executor_gib", of_executor / GIB)
        report.figure("programs_gib", both / GIB)
    report.figure("layers", layers)
    report.figure("bfloat16_gib", whole / GIB)
    report.figure("tokens_per_s", tokens)
    report.figure("tokens_per_s_together", tokens_beside)
    report.figure("step_ms_of_a_layer", step / layers * 1e3)
    report.figure("step_ms_of_a_layer_together", step_beside / layers * 1e3)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
