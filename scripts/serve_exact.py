"""One engine with 40 adapters of many kinds, compared with PEFT alone: 200 requests that come while others run.

Run from the repository root (some minutes on one core):
    python scripts/serve_exact.py
    python scripts/serve_exact.py --quick
    python scripts/serve_exact.py --ahead    # a step is launched before the tokens of the one before are read, as on a GPU

There is memory for few of the adapters and texts at a time, so that sequences are evicted and computed again, and adapters are evicted
and loaded again. Compared are all greedy tokens and their log probabilities with those of `generate()` (for prompts of PEFT's: of the forward) on a PEFT model of the
request's adapter; and tokens drawn with a seed amid the crowd with those drawn when nothing else runs.
"""

import argparse
import random
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from _answers import ask, read
from peft import LoraConfig, PeftConfig, PeftModel, TaskType, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from symbiosis.base.reporting import Report, print_table
from symbiosis.serving import Engine
from symbiosis.serving.request import Token

TINY: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.1, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TWO = ["q_proj", "v_proj"]
RANKS = (1, 2, 3, 4, 7, 8, 16, 24, 32, 64)
PAGES, PAGE = 190, 4096  # of the memory: the largest adapter takes some 140
TOLERANCE = 1e-4


def _of(kind: type[PeftConfig], **options: Any) -> PeftConfig:
    return kind(**{"task_type": TaskType.CAUSAL_LM, **options})


# By kind: its configuration at a rank, where it has one.
KINDS: dict[str, Callable[[int], PeftConfig]] = {
    "LoRA": lambda r: _of(LoraConfig, r=r, target_modules=ALL),
    "rsLoRA": lambda r: _of(LoraConfig, r=r, use_rslora=True, target_modules=["q_proj", "up_proj"]),
    "DoRA": lambda r: _of(LoraConfig, r=r, use_dora=True, target_modules=ALL),
    "LoRA of the head": lambda r: _of(LoraConfig, r=r, target_modules=["lm_head", "k_proj"]),
    "VeRA": lambda r: _of(peft.VeraConfig, r=r, target_modules=["q_proj", "down_proj"]),
    "IA3": lambda r: _of(peft.IA3Config, target_modules=["v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "LoHa": lambda r: _of(peft.LoHaConfig, r=r, target_modules=TWO),
    "LoKr": lambda r: _of(peft.LoKrConfig, r=r, target_modules=TWO),
    "OFT": lambda r: _of(peft.OFTConfig, oft_block_size=8, r=0, target_modules=TWO),
    "HRA": lambda r: _of(peft.HRAConfig, r=min(r, 16), target_modules=TWO),
    "FourierFT": lambda r: _of(peft.FourierFTConfig, n_frequency=50, target_modules=TWO),
    "LN tuning": lambda r: _of(peft.LNTuningConfig, target_modules=["input_layernorm", "norm"]),
    "prompt tuning": lambda r: _of(peft.PromptTuningConfig, num_virtual_tokens=5),
    "prefix tuning": lambda r: _of(peft.PrefixTuningConfig, num_virtual_tokens=18),
    "saved modules": lambda r: _of(LoraConfig, r=r, target_modules=TWO, modules_to_save=["lm_head"]),
}


@dataclass(frozen=True)
class Case:
    """A request, and how long after the one before it comes."""

    adapter: str | None
    prompt: tuple[int, ...]
    most: int
    after_s: float


def base() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**TINY)).eval()


def save_adapters(count: int, folder: Path) -> dict[str, str]:
    """So many adapters with random weights; says of what kind each is."""
    names = {}
    for number in range(count):
        kind = list(KINDS)[number % len(KINDS)]
        rank = RANKS[(number // len(KINDS) + number) % len(RANKS)]
        torch.manual_seed(number)
        model = get_peft_model(base(), KINDS[kind](rank))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter += torch.randn_like(parameter) * 0.1
        model.eval().save_pretrained(folder / f"adapter-{number}")
        names[f"adapter-{number}"] = kind
    return names


def make_cases(adapters: Iterable[str], count: int, gap_s: float) -> list[Case]:
    chance = random.Random(1)
    names = list(adapters)
    cases = []
    for number in range(count):
        # Texts of the base need no room for an adapter: many run together, and grow until there is none left.
        adapter = None if chance.random() < 0.3 else names[number % len(names)]
        most = 120 if adapter is None else chance.choice((1, 8, 24, 40))
        prompt = tuple(chance.randrange(3, 96) for _ in range(chance.randint(1, 90)))
        cases.append(Case(adapter, prompt, most, chance.expovariate(1 / gap_s)))
    return cases


def serve(engine: Engine, cases: list[Case], seeded: list[Case]) -> tuple[list[list[Token]], list[list[Token]]]:
    """All of them at their times; those with a seed come between the others."""
    greedy, drawn = [], []
    every = max(1, len(cases) // len(seeded))
    for number, case in enumerate(cases):
        time.sleep(case.after_s)
        greedy.append(ask(engine, case, number, temperature=0.0))
        if number % every == 0 and len(drawn) < len(seeded):
            drawn.append(ask(engine, seeded[len(drawn)], len(cases) + len(drawn), seed=len(drawn)))
    return [read(each) for each in greedy], [read(each) for each in drawn]


def generated(model: nn.Module, case: Case) -> list[Token]:
    """By transformers, with nothing of ours."""
    made = model.generate(  # type: ignore[operator]
        input_ids=torch.tensor([case.prompt]),
        attention_mask=torch.ones(1, len(case.prompt), dtype=torch.long),
        max_new_tokens=case.most,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logprobs = torch.cat(made.logits).float().log_softmax(-1)
    ids = made.sequences[0, -len(logprobs) :].tolist()
    return [Token(id, logprobs[row, id].item()) for row, id in enumerate(ids)]


def forwarded(model: nn.Module, case: Case) -> list[Token]:
    """The same with the whole text for each token. PEFT 0.21.2 with transformers 5.24 gives the tokens that `generate()` makes behind a
    prompt of PEFT's other positions than the model's forward does.
    """
    text, tokens = torch.tensor([case.prompt]), []
    with torch.no_grad():
        for _ in range(case.most):
            logprobs = model(input_ids=text, attention_mask=torch.ones_like(text)).logits[0, -1].float().log_softmax(-1)
            tokens.append(Token(int(logprobs.argmax()), logprobs.max().item()))
            text = torch.cat([text, logprobs.argmax().view(1, 1)], dim=1)
    return tokens


def by_peft(cases: list[Case], folder: Path) -> list[list[Token]]:
    """Each adapter's requests, one after another, on a model of its own."""
    found: dict[int, list[Token]] = {}
    by_adapter: dict[str | None, list[int]] = defaultdict(list)
    for number, case in enumerate(cases):
        by_adapter[case.adapter].append(number)
    for adapter, numbers in by_adapter.items():
        model = deepcopy(base()) if adapter is None else PeftModel.from_pretrained(base(), folder / adapter).eval()
        is_prompt = isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning
        for number in numbers:
            found[number] = (forwarded if is_prompt else generated)(model, cases[number])
    return [found[number] for number in range(len(cases))]


def compare(mine: list[list[Token]], theirs: list[list[Token]]) -> tuple[list[int], float]:
    """The requests whose tokens differ, and how far log probabilities of the same tokens are apart at most."""
    wrong, furthest = [], 0.0
    for number, (ours, alone) in enumerate(zip(mine, theirs, strict=True)):
        if [token.id for token in ours] != [token.id for token in alone]:
            wrong.append(number)
        for one, other in zip(ours, alone, strict=False):
            if one.id != other.id:
                break
            assert one.logprob is not None and other.logprob is not None
            furthest = max(furthest, abs(one.logprob - other.logprob))
    return wrong, furthest


def show(cases: list[Case], kinds: dict[str, str], wrong: list[int]) -> None:
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for number, case in enumerate(cases):
        of = counts[kinds[case.adapter] if case.adapter else "(base)"]
        of[0] += 1
        of[1] += case.most
        of[2] += number in wrong
    rows = [(kind, str(asked), str(most), str(bad) if bad else "-") for kind, (asked, most, bad) in counts.items()]
    print_table(("kind", "requests", "tokens at most", "different"), rows)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="15 adapters and 40 requests")
    parser.add_argument("--ahead", action="store_true", help="with the loop of a GPU")
    args = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    adapters, requests, with_seed = (15, 40, 6) if args.quick else (40, 200, 30)
    report = Report("serve_exact")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kinds = save_adapters(adapters, folder)
        cases, seeded = make_cases(kinds, requests, gap_s=0.005), make_cases(kinds, with_seed, gap_s=0.005)[::-1]
        with Engine(base(), adapters=folder, memory=PAGES * PAGE, max_batch=24, prefill_tokens=64) as engine:
            engine._loop.ahead = args.ahead
            mine, drawn = serve(engine, cases, seeded)
            figures = engine.figures()
            alone = [read(ask(engine, case, 10_000 + n, seed=n)) for n, case in enumerate(seeded)]
        wrong, furthest = compare(mine, by_peft(cases, folder))
    show(cases, kinds, wrong)
    ids = [[[token.id for token in each] for each in side] for side in (drawn, alone)]
    report.figure("adapters", adapters)
    report.figure("requests", requests)
    report.figure("steps", figures.steps)
    report.figure("tokens", sum(map(len, mine)))
    report.bar("kinds", len(set(kinds.values())), ">=", 10)
    report.bar("different_requests", len(wrong), "<=", 0)
    report.bar("largest_logprob_difference", furthest, "<=", TOLERANCE)
    report.bar("different_seeded_requests", sum(a != b for a, b in zip(*ids, strict=True)), "<=", 0)
    report.bar("evicted_sequences", figures.evictions, ">=", 1)
    report.bar("adapters_loaded_again", figures.adapter_fetches - adapters, ">=", 1)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
