"""What privacy costs: bytes, time per token and per training step, and error against float32, for every level; plain = 1.

Two executors of two operators and one client, each a process with one thread; over tcp:// on loopback, and over links of 1 Gbit/s.
A LoRA client (q, v) decodes and trains at each level in turn, again and again, so that noise hits all alike; times are medians.
Errors are those of the bundled demo model's predictions on text.

    python scripts/bench_privacy.py --quick     # some minutes
    python scripts/bench_privacy.py
"""

import argparse
import copy
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from _link import Link
from _processes import LoraClient, Worker, executor, prepare, progress, save_llama, workers

import symbiosis
from symbiosis.base.reporting import Report, print_table
from symbiosis.cli.pad_files import make

GIGABIT = 1e9
TARGETS = ("q_proj", "v_proj")
LEVELS = ("plain", "plain, verified", "noise", "pads 8", "pads 16", "split 8", "split 8, verified", "split 16")
BATCH, LENGTH, PROMPT = 2, 64, 16
STEPS = 6  # of training in each round
FASTEST_S = 0.01  # that a token may take, if the pads are to suffice
LINK_S = 3600.0  # longer than any run


def privacy_of(level: str, other: str, pads: dict[int, Path]) -> dict[str, Any]:
    """What `wrap` is told."""
    name, _, bits = level.partition(",")[0].partition(" ")
    made = {
        "plain": lambda: None,
        "noise": symbiosis.Noise,
        "pads": lambda: symbiosis.Pads(pads[int(bits)]),
        "split": lambda: symbiosis.Split(other, int(bits)),
    }[name]()
    return {"privacy": made, "verify": level.endswith("verified")}


class PrivateClient(LoraClient):
    """A LoRA program at one level."""

    def __init__(self, folder: str, endpoint: str, other: str, level: str, pads: dict[int, Path]) -> None:
        super().__init__(folder, 8, TARGETS)
        self.model = symbiosis.wrap(self.model, endpoint, **privacy_of(level, other, pads))

    def cost(self, what: str, seconds: float, tokens: int) -> tuple[float, float]:
        """The median time of a token or training step, and its bytes."""
        before = symbiosis.stats(self.model).copy()
        if what == "decode":
            times = self.decode(0.0, seconds, 1, PROMPT, tokens).steps
            rows = len(times) + PROMPT * -(-len(times) // tokens)
        else:
            times = [self.train(0.0, 0.0, BATCH, LENGTH).steps[0] for _ in range(STEPS)]
            rows = STEPS
        now = symbiosis.stats(self.model)
        nbytes = now.bytes_sent + now.bytes_received - before.bytes_sent - before.bytes_received
        return statistics.median(times), nbytes / rows


def predictions(text: torch.Tensor, endpoint: str, other: str, level: str, pads: dict[int, Path]) -> torch.Tensor:
    model = demo_model()
    symbiosis.wrap(model, endpoint, **privacy_of(level, other, pads))
    with torch.no_grad():
        return model(text).logits.double().log_softmax(-1)


def demo_model() -> Any:
    from transformers import AutoModelForCausalLM

    from symbiosis.executor.model.load import DEMO_MODEL

    return AutoModelForCausalLM.from_pretrained(DEMO_MODEL)


def divergence(expected: torch.Tensor, found: torch.Tensor) -> float:
    return float((expected.exp() * (expected - found)).sum(-1).mean())


def errors(folder: Path, report: Report) -> dict[str, float]:
    """How far the predictions are from float32, by level and for bfloat16."""
    from transformers import AutoTokenizer

    from symbiosis.demo.data import base_text, blocks
    from symbiosis.executor.model.load import DEMO_MODEL

    text = torch.tensor(blocks(base_text(), AutoTokenizer.from_pretrained(DEMO_MODEL), 128, 8, seed=3))
    pads = {bits: folder / f"demo{bits}.pads" for bits in (8, 16)}
    for bits, file in pads.items():
        make("demo", 2 * text.numel(), file, bits)
    options = {"integers": [8, 16]}
    with (
        symbiosis.Executor("demo", operator="one", **options) as one,
        symbiosis.Executor("demo", operator="two", **options) as two,
    ):
        with torch.no_grad():
            exact = demo_model()(text).logits.double().log_softmax(-1)
            half = demo_model().bfloat16()(text).logits.double().log_softmax(-1)
        found = {"bfloat16": divergence(exact, half)}
        for level in LEVELS:
            found[level] = divergence(exact, predictions(text, one.endpoint, two.endpoint, level, pads))
    report.bar("kl_split8_over_bfloat16", found["split 8"] / found["bfloat16"], "<=", 1.0)
    report.bar("kl_split16_over_bfloat16", found["split 16"] / found["bfloat16"], "<=", 1e-3)
    return found


def measured(clients: dict[str, Worker], rounds: int, seconds: float, tokens: int) -> dict[str, dict[str, Any]]:
    """By level: the median over the rounds of time and bytes per token, and per training step."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {level: {"decode": [], "train": []} for level in clients}
    for number in range(rounds + 1):
        for level, client in clients.items():
            for what in ("decode", "train"):
                cost = client.call("cost", what, seconds if number else 0.0, tokens)
                if number:  # the first is for warming up
                    found[level][what].append(cost)
    return {
        level: {what: tuple(map(statistics.median, zip(*costs, strict=True))) for what, costs in both.items()}
        for level, both in found.items()
    }


def links(stack: ExitStack, addresses: list[str]) -> list[str]:
    """The same executors, over links of 1 Gbit/s."""
    urls = []
    for worker in stack.enter_context(workers(Link, [(address, GIGABIT) for address in addresses])):
        urls.append(f"tcp://{worker.call('address')}")
        worker.send("run", LINK_S)
    return urls


def show(title: str, found: dict[str, dict[str, Any]], kl: dict[str, float], report: Report) -> None:
    plain = found["plain"]
    rows = []
    for level, both in found.items():
        (token_s, token_bytes), (step_s, step_bytes) = both["decode"], both["train"]
        ratios = token_s / plain["decode"][0], step_s / plain["train"][0]
        size = step_bytes / plain["train"][1]
        rows.append(
            (level, f"{token_s * 1e3:.1f} ({ratios[0]:.2f})", f"{step_s * 1e3:.0f} ({ratios[1]:.2f})", f"{token_bytes / 1e3:.0f}",
             f"{step_bytes / 1e6:.2f} ({size:.2f})", f"{kl[level]:.1e}")
        )  # fmt: skip
        report.figure(
            f"{title}, {level}",
            {"token_s": token_s, "step_s": step_s, "token_bytes": token_bytes, "step_bytes": step_bytes},
        )
    head = (
        "level",
        "ms per token (plain = 1)",
        "ms per step (plain = 1)",
        "KB per token",
        "MB per step (plain = 1)",
        "KL to float32",
    )
    print_table(head, rows, title)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller model, fewer rounds")
    parser.add_argument("--hidden", type=int, default=None)
    parser.add_argument("--layers", type=int, default=4)
    arguments = parser.parse_args()
    hidden = arguments.hidden or (512 if arguments.quick else 1024)
    rounds, seconds, tokens = (3, 1.0, 24) if arguments.quick else (5, 1.5, 48)
    prepare(threads=1)
    report = Report("bench_privacy")
    report.figure("model", {"hidden": hidden, "layers": arguments.layers, "batch": BATCH, "length": LENGTH})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        progress("errors of the demo model")
        kl = errors(folder, report)
        report.figure("kl", kl)
        save_llama(folder / "model", hidden, arguments.layers)
        for title, bits_per_second in (("tcp:// on loopback", None), ("1 Gbit/s", GIGABIT)):
            progress(title)
            with ExitStack() as stack:
                integers = ("--integers", "8", "--integers", "16")
                running = [
                    stack.enter_context(
                        executor(
                            folder / "model", 1, "--listen", "tcp://127.0.0.1:0", "--operator", operator, *integers
                        )
                    ).endpoints[0]
                    for operator in ("one", "two")
                ]
                if bits_per_second:
                    running = links(stack, [url.partition("://")[2] for url in running])
                pads = new_pads(folder, title, rounds, seconds)
                started = stack.enter_context(
                    workers(
                        PrivateClient, [(str(folder / "model"), *running, level, copy.copy(pads)) for level in LEVELS]
                    )
                )
                show(title, measured(dict(zip(LEVELS, started, strict=True)), rounds, seconds, tokens), kl, report)
                for file in pads.values():
                    file.unlink()
    plain, split, pads_8 = (
        report.figures[f"tcp:// on loopback, {level}"]["step_bytes"] for level in ("plain", "split 8", "pads 8")
    )
    report.bar("bytes_split8", split / plain, "<=", 1.6)
    report.bar("bytes_pads8", pads_8 / plain, "<=", 1.05)
    return report.finish()


def new_pads(folder: Path, title: str, rounds: int, seconds: float) -> dict[int, Path]:
    """Enough for all rounds, prompts included."""
    tokens = int((rounds + 1) * (STEPS * BATCH * LENGTH + 2 * seconds / FASTEST_S))
    pads = {bits: folder / f"{title[:3]}{bits}.pads" for bits in (8, 16)}
    for bits, file in pads.items():
        progress(f"{tokens} pads of {bits} bits")
        make(str(folder / "model"), tokens, file, bits, training=True)
    return pads


if __name__ == "__main__":
    sys.exit(main())
