"""Tokens a second of one stream with draft tokens, beside the same stream without.

    python scripts/bench_speculation.py                        # a text with repetition, by n-grams, with the demo model
    python scripts/bench_speculation.py --model DIR            # with another checkpoint, such as the one that scripts/compat_programs.py makes
    python scripts/bench_speculation.py --model DIR --draft SMALLER    # and any text, by a draft model
    python scripts/bench_speculation.py --streams 1 4 16       # several streams at once

Both take turns in every round; figures are medians over the rounds.
"""

import argparse
import statistics
import sys
import time
import warnings
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from _processes import prepare, progress
from transformers import AutoModelForCausalLM, AutoTokenizer

import symbiosis
from symbiosis.base.reporting import Report, print_table
from symbiosis.serving import Engine
from symbiosis.serving.request import Output, Request, Sampling

DEMO = Path(symbiosis.__file__).parent / "demo_model"
LATEST_S = 600.0
REPEATED = """Rewrite this program, and change nothing but the name of the class to Till:

class Register:
    def __init__(self, owner, currency):
        self.owner = owner
        self.currency = currency
        self.entries = []

    def add(self, name, amount):
        self.entries.append((name, amount))
        return self

    def remove(self, name):
        self.entries = [entry for entry in self.entries if entry[0] != name]
        return self

    def total(self):
        return sum(amount for name, amount in self.entries)

    def report(self):
        lines = [f"{name}: {amount} {self.currency}" for name, amount in self.entries]
        return "\\n".join([self.owner, *lines, f"total: {self.total()} {self.currency}"])
"""
NOUGHTS = "0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,"  # with which the demo model goes on
PLAIN = "Explain in a few sentences why the sky is blue, and why it is red in the evening."


class Side:
    """An engine, and what it measured."""

    def __init__(self, checkpoint: str, speculate: str | None) -> None:
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self.engine = Engine(model, memory=1 << 29, speculate=speculate)
        self.paces: list[float] = []

    def stream(self, prompt: list[int], tokens: int, streams: int) -> list[list[int]]:
        """Have so many streams of one prompt go on together, each with its own seed, and note their tokens a second, from the first token on."""
        asked: list[SimpleQueue[tuple[float, Output]]] = [SimpleQueue() for _ in range(streams)]
        for number, outputs in enumerate(asked):
            how = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True, seed=number)
            request = Request(id=self.engine.next_id(), prompt=tuple(prompt), sampling=how)
            self.engine.submit(request, lambda output, to=outputs: to.put((time.perf_counter(), output)))
        texts, times = [], []
        for outputs in asked:
            text: list[int] = []
            while len(text) < tokens:
                at, output = outputs.get(timeout=LATEST_S)
                text += [token.id for token in output.tokens]
                times.append((at, len(output.tokens)))
            texts.append(text)
        first, last = min(at for at, _ in times), max(at for at, _ in times)
        self.paces.append((sum(count for _, count in times) - streams) / (last - first))
        return texts


def measure(report: Report, checkpoint: str, speculate: str, text: str, name: str, bar: float, args: Any) -> None:
    """Compare one stream, or several, with drafts and without."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    plain, drafting = Side(checkpoint, None), Side(checkpoint, speculate)
    prompt = tokenizer(chat(tokenizer, text)).input_ids
    if len(prompt) + args.tokens > plain.engine.longest:
        prompt = tokenizer(NOUGHTS).input_ids
    rows = []
    for streams in args.streams:
        for side in (plain, drafting):
            side.paces.clear()
            side.stream(prompt, 8, streams)
            side.paces.clear()
        before, unlike = drafting.engine.figures(), 0
        for number in range(args.rounds):
            progress(f"{name}: {streams} streams, round {number + 1} of {args.rounds}")
            theirs, mine = plain.stream(prompt, args.tokens, streams), drafting.stream(prompt, args.tokens, streams)
            unlike += sum(a != b for a, b in zip(mine, theirs, strict=True))
        after = drafting.engine.figures()
        drafted, accepted = (
            after.drafted_tokens - before.drafted_tokens,
            after.accepted_tokens - before.accepted_tokens,
        )
        paces = [statistics.median(side.paces) for side in (plain, drafting)]
        rows.append(
            (streams, *(f"{pace:.1f}" for pace in paces), f"{paces[1] / paces[0]:.2f}", f"{accepted}/{drafted}", unlike)
        )
        key = f"{name}_{streams}"
        report.figure(f"{key}_tokens_per_s", paces)
        report.figure(f"{key}_accepted", accepted / max(1, drafted))
        report.bar(f"{key}_unlike_texts", unlike, "<=", 0)
        report.bar(f"{key}_ratio", paces[1] / paces[0], ">=", bar if streams == 1 else 0.95)
    print_table(
        ("streams", "tokens/s without", "with drafts", "ratio", "accepted", "unlike texts"),
        rows,
        f"{name}: {speculate}",
    )
    for side in (plain, drafting):
        side.engine.close()


def chat(tokenizer: Any, text: str) -> str:
    if tokenizer.chat_template is None:
        return text
    return str(
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEMO), help="a checkpoint; default: the demo model")
    parser.add_argument("--draft", help="a smaller checkpoint with the same tokens: measure it, too")
    parser.add_argument("--drafts", type=int, default=8, help="draft tokens in a step")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--streams", type=int, nargs="+", default=[1], help="streams at once")
    args = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    prepare(args.threads)
    report = Report("bench_speculation")
    measure(report, args.model, f"ngram:{args.drafts}", REPEATED, "repetition", 1.8, args)
    if args.draft:
        measure(report, args.model, f"draft:{args.draft}:{args.drafts}", PLAIN, "draft", 1.3, args)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
