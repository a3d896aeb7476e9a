"""Engines over 2 and 4 ranks on a CPU, compared with an engine of one process: six families, each with 20 adapters of ranks 1 to 64.

Run from the repository root:
    python scripts/tensor_exact.py            # a quarter of an hour on two cores
    python scripts/tensor_exact.py --quick    # two families over 2 ranks
    python scripts/tensor_exact.py --families llama gpt2 --ranks 2

There is memory for few of the adapters at a time, so that they are evicted and loaded again, and sequences, too. Compared are all greedy tokens and their
log probabilities, and tokens drawn with a seed. Then ranks are killed and frozen amid requests, whose texts must stay the same. What ranks send each other
is counted, and what each of them holds.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import peft
import torch
import transformers
from _answers import LATEST_S, ask, read
from peft import LoraConfig, PeftConfig, get_peft_model
from torch import nn

import symbiosis
from symbiosis.base.reporting import Report, print_table
from symbiosis.serving import Engine
from symbiosis.serving.request import Output, Token
from symbiosis.serving.tensor_parallel.leading_runner import LeadingRunner

SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
    "max_position_embeddings": 256, "initializer_range": 0.15, "bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0, "head_dim": 8,
}  # fmt: skip
OF_GPT2 = {
    "vocab_size": 256, "n_positions": 256, "n_embd": 64, "n_layer": 2, "n_head": 8, "n_inner": 96, "initializer_range": 0.15, "bos_token_id": 0,
    "eos_token_id": None,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {}),
    "gemma2": ("Gemma2Config", {"sliding_window": 24, "query_pre_attn_scalar": 8}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "phi3": ("Phi3Config", {}),
    "gpt2": ("GPT2Config", OF_GPT2),
}
ATTENTION, FEED_FORWARD = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
TARGETS = {
    "mixtral": ATTENTION,
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
}
RANKS = (1, 2, 3, 4, 5, 7, 8, 13, 16, 24, 33, 64)
MEMORY = 1_000_000
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Case:
    """A request; with a seed its tokens are drawn."""

    adapter: str | None
    prompt: tuple[int, ...]
    most: int
    seed: int | None


@dataclass
class Result:
    """What came of an engine over ranks."""

    family: str
    ranks: int
    different: int
    furthest: float
    after_kills: int
    kills: int
    longest_restart_s: float
    off_formula: float  # of what ranks send, relative
    weights: float  # of a rank, over what divides evenly of the whole plus what each rank has
    keys: float  # bytes of a rank's pages over those of one process, times ranks
    adapters: float  # bytes of all adapters on a rank, over those of one process
    told_bytes: float  # of a step in which no more than eight sequences go on


def made(family: str) -> nn.Module:
    config, own = FAMILIES[family]
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, config)(**(own if family == "gpt2" else SIZES | own)), dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model.eval()


def configs(family: str) -> list[PeftConfig]:
    """The configurations of 20 adapters."""
    targets = TARGETS.get(family, ATTENTION + FEED_FORWARD)
    of: dict[str, Any] = {"task_type": "CAUSAL_LM"}
    lora: dict[str, Any] = {**of, "target_modules": targets, "fan_in_fan_out": family == "gpt2"}
    made = list[PeftConfig]([LoraConfig(r=rank, lora_alpha=2 * rank, **lora) for rank in RANKS])
    made += [LoraConfig(r=6, use_rslora=True, **lora), LoraConfig(r=9, target_modules=["lm_head"], **of)]
    made += [LoraConfig(r=rank, use_dora=True, **lora) for rank in (3, 7)]
    outputs, inputs = targets[:1], targets[-1:]
    made.extend(
        [
            peft.IA3Config(
                target_modules=outputs + inputs, feedforward_modules=inputs, fan_in_fan_out=family == "gpt2", **of
            ),
            peft.PromptTuningConfig(num_virtual_tokens=5, **of),
            peft.PrefixTuningConfig(num_virtual_tokens=18, **of),
        ]
    )
    made.append(
        LoraConfig(r=11, **lora)
        if family in ("gpt2", "phi3")
        else peft.VeraConfig(r=12, target_modules=["o_proj"], **of)
    )
    return made


def save_adapters(family: str, folder: Path) -> list[str]:
    names = []
    for number, config in enumerate(configs(family)):
        torch.manual_seed(number)
        model = get_peft_model(made(family), config)  # type: ignore[arg-type]
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        names.append(f"adapter-{number}")
        model.eval().save_pretrained(str(folder / names[-1]), save_embedding_layers=False)
    return names


def make_cases(adapters: list[str], count: int) -> list[Case]:
    chance = random.Random(1)
    cases = []
    for number in range(count):
        adapter = None if chance.random() < 0.2 else adapters[number % len(adapters)]
        prompt = tuple(chance.randrange(3, 256) for _ in range(chance.randint(1, 90)))
        cases.append(Case(adapter, prompt, chance.choice((4, 16, 40)), number if number % 5 == 0 else None))
    return cases


def begun(engine: Engine, cases: list[Case]) -> list[SimpleQueue[Output]]:
    return [
        ask(engine, case, engine.next_id(), seed=case.seed, temperature=0.0 if case.seed is None else 1.0)
        for case in cases
    ]


def answers(engine: Engine, cases: list[Case]) -> list[list[Token]]:
    asked = begun(engine, cases)
    return [read(each) for each in asked]


def different(ours: list[list[Token]], theirs: list[list[Token]]) -> int:
    return sum([a.id for a in one] != [b.id for b in other] for one, other in zip(ours, theirs, strict=True))


def furthest(ours: list[list[Token]], theirs: list[list[Token]]) -> float:
    """How far log probabilities of the same tokens are apart at most."""
    pairs = [pair for one, other in zip(ours, theirs, strict=True) for pair in zip(one, other, strict=False)]
    return max(abs((a.logprob or 0.0) - (b.logprob or 0.0)) for a, b in pairs if a.id == b.id)


def with_kills(engine: Engine, cases: list[Case], kills: int) -> tuple[list[list[Token]], float]:
    """Return the answers to these, amid which ranks are killed, and one is frozen; and how long no token came at most."""
    served, chance, longest = engine._served, random.Random(2), 0.0
    assert isinstance(served, LeadingRunner)
    asked = begun(engine, cases)
    for number in range(kills):
        before = engine.figures().steps
        while engine.figures().steps < before + 20 and engine.figures().running:
            time.sleep(0.01)
        restarts, began = served.restarts, time.monotonic()
        os.kill(chance.choice(served.rank_pids), signal.SIGSTOP if number == kills - 1 else signal.SIGKILL)
        while served.restarts == restarts:
            if time.monotonic() > began + LATEST_S:
                raise RuntimeError("ranks were not started again")
            time.sleep(0.05)
        longest = max(longest, time.monotonic() - began)
    return [read(each) for each in asked], longest


def off_formula(engine: Engine, model: nn.Module, ranks: int) -> float:
    """How far what ranks send for a prompt is from what it should be: two sums for each layer, one for the embedding, and the head's row."""
    served, tokens = engine._served, 64
    assert isinstance(served, LeadingRunner)
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    before = served.collectives.sent.copy()
    engine.generate([5 + n for n in range(tokens)], max_tokens=1, temperature=0.0)
    sent = sum((served.collectives.sent - before).values())
    row, ring = config.hidden_size * 4, 2 * (ranks - 1) / ranks
    formula = (2 * config.num_hidden_layers + 1) * ring * row * tokens + (ranks - 1) / ranks * config.vocab_size * 4
    return abs(sent / formula - 1)


def weights_over_share(engine: Engine, model: nn.Module, ranks: int) -> float:
    """The bytes of the largest rank's weights, over its share of what is divided and what each rank has whole (norms, routers, positions, biases)."""
    served = engine._served
    assert isinstance(served, LeadingRunner)
    division = served.division
    divided = set(division.layers) | set(division.experts)
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    whole = sum(p.nbytes for p in model.parameters())
    parts = {
        p
        for n, m in model.named_modules()
        for p in m._parameters.values()
        if p is not None and (n in divided or m is embedding)
    }
    nbytes = sum(p.nbytes for p in parts)
    return max([served.weight_bytes, *(each.weight_bytes for each in served.ready)]) / (nbytes / ranks + whole - nbytes)


@contextmanager
def serving(folder: Path, adapters: Path) -> Iterator[Any]:
    """Yield what makes an engine of this base over so many ranks."""
    with (
        tempfile.TemporaryDirectory() as place,
        symbiosis.Executor(folder, listen=(f"local://{place}/executor.sock",)) as executor,
    ):
        yield lambda ranks: Engine(
            executor.endpoint, adapters=adapters, memory=MEMORY, max_batch=16, prefill_tokens=64,
            devices=("cpu",) * ranks if ranks > 1 else (),
        )  # fmt: skip


def compare(family: str, ranks: tuple[int, ...], requests: int, kills: int) -> Iterator[Result]:
    """Compare engines over so many ranks with one of one process."""
    model = made(family)
    with tempfile.TemporaryDirectory() as name:
        base, adapters = Path(name) / "base", Path(name) / "adapters"
        model.save_pretrained(base)  # type: ignore[operator]
        names = save_adapters(family, adapters)
        cases = make_cases(names, requests)
        with serving(base, adapters) as engine_over:
            with engine_over(1) as engine:
                expected = answers(engine, cases)
                alone = engine.figures()
                page_bytes = engine._served.arena.page_bytes
            for count in ranks:
                with engine_over(count) as engine:
                    ours = answers(engine, cases)
                    figures, served = engine.figures(), engine._served
                    told = served.told_bytes
                    killed, longest = with_kills(engine, cases, kills)
                    yield Result(
                        family, count, different(ours, expected), furthest(ours, expected), different(killed, expected), kills, longest,
                        off_formula(engine, model, count), weights_over_share(engine, model, count), served.arena.page_bytes * count / page_bytes,
                        figures.adapter_bytes / alone.adapter_bytes / count, told,
                    )  # fmt: skip
                    print(
                        f"{family} over {count} ranks: {figures.steps} steps, {figures.evictions} evictions, {figures.adapter_fetches} fetches",
                        flush=True,
                    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two families over 2 ranks, with fewer requests")
    parser.add_argument(
        "--families", nargs="+", choices=FAMILIES, help="default: all six; with --quick: llama and gpt2"
    )
    parser.add_argument("--ranks", nargs="+", type=int, help="default: 2 and 4; with --quick: 2")
    args = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    families = args.families or (["llama", "gpt2"] if args.quick else list(FAMILIES))
    ranks = tuple(args.ranks or ((2,) if args.quick else (2, 4)))
    requests, kills = (30, 2) if args.quick else (80, 3)
    found = [result for family in families for result in compare(family, ranks, requests, kills)]
    report = Report("tensor_exact")
    print_table(
        ("family", "ranks", "different", "log probability off", "different after kills", "longest pause, s", "weights", "adapters"),
        [
            (each.family, str(each.ranks), str(each.different), f"{each.furthest:.1e}", f"{each.after_kills} ({each.kills} kills)",
             f"{each.longest_restart_s:.1f}", f"{each.weights:.3f}", f"{each.adapters:.2f}")
            for each in found
        ],
    )  # fmt: skip
    report.figure("engines", len(found))
    report.figure("requests", requests * len(found))
    report.figure("adapters", 20)
    report.figure("kills", sum(each.kills for each in found))
    report.figure("longest_pause_s", max(each.longest_restart_s for each in found))
    report.figure(
        "adapter_bytes_of_a_rank", {f"{each.family} over {each.ranks}": round(each.adapters, 3) for each in found}
    )
    report.figure("told_bytes_of_the_last_step", max(each.told_bytes for each in found))
    report.bar("different_texts", sum(each.different for each in found), "<=", 0)
    report.bar("largest_logprob_difference", max(each.furthest for each in found), "<=", TOLERANCE)
    report.bar("different_texts_after_kills", sum(each.after_kills for each in found), "<=", 0)
    report.bar("sent_over_formula_minus_1", max(each.off_formula for each in found), "<=", 0.001)
    report.bar("weights_of_a_rank_over_its_share", max(each.weights for each in found), "<=", 1.05)
    report.bar("pages_of_a_rank_over_its_share", max(each.keys for each in found), "<=", 1.05)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
