"""A step of RL for several tenants on one base, for `bench_train.py rl`: publish, sample, train. Beside it the step of one tenant in a program
of its own, as PEFT and `generate` make it."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import NamedTuple

import torch
from _gpu import synchronize
from peft import LoraConfig, get_peft_model
from torch import nn

from symbiosis import serving, training
from symbiosis.base.reporting import Report, print_table

TOKENS_BAR, PUBLISH_BAR, OVER_GENERATE_BAR = 3000.0, 10.0, 0.25
TOGETHER = 8  # sequences of a batch of the program by itself


class RlLoad(NamedTuple):
    """What a step takes of each tenant."""

    tenants: int
    prompts: int
    answers: int
    prompt: int  # tokens
    tokens: int  # of an answer

    @property
    def made(self) -> int:
        return self.tenants * self.prompts * self.answers * self.tokens

    def drawn(self, vocabulary: int) -> list[list[int]]:
        """Return the prompt of each answer."""
        prompts = torch.randint(3, vocabulary, (self.prompts, self.prompt)).tolist()
        return [prompt for prompt in prompts for _ in range(self.answers)]


class StepTimes(NamedTuple):
    """Seconds."""

    publish: float  # of one adapter
    sample: float
    train: float

    @property
    def whole(self) -> float:
        return sum(self)


def rl(model: nn.Module, config: LoraConfig, load: RlLoad, memory: int, report: Report) -> None:
    vocabulary = model.config.vocab_size  # type: ignore[union-attr]
    device = next(model.parameters()).device.type
    apart = _apart(model, config, load.drawn(vocabulary), load.tokens, device)
    with training.Engine(model, max_tokens=16384, compiled=device == "cuda") as trainer:
        at_once = min(256, load.tenants * load.prompts * load.answers)
        with serving.Engine(model, max_batch=at_once, memory=memory) as sampler:
            runs = [trainer.create(config, seed=number) for number in range(load.tenants)]
            prompts = [load.drawn(vocabulary) for _ in runs]
            for _ in range(2):  # the first one compiles and captures
                times = _step(sampler, runs, prompts, load.tokens)
    tokens_per_s = load.made / (times.whole + (load.tenants - 1) * times.publish)
    seconds = load.made / tokens_per_s
    for name, value in times._asdict().items():
        report.figure(f"rl_{name}_s", value)
    report.figure("rl_apart_s", apart.whole)
    report.bar("rl_tokens_per_s", tokens_per_s, ">=", TOKENS_BAR if device == "cuda" else 1.0)
    report.bar("rl_publish_ms", 1e3 * times.publish, "<=", PUBLISH_BAR if device == "cuda" else 1000.0)
    bar = OVER_GENERATE_BAR if device == "cuda" else 2.0
    report.bar("rl_over_generate", seconds / (load.tenants * apart.whole), "<=", bar)
    rows = [
        (f"{load.tenants} tenants together", *(f"{each:.2f}" for each in (times.sample, times.train, seconds))),
        ("one by itself, PEFT's generate", *(f"{each:.2f}" for each in (apart.sample, apart.train, apart.whole))),
    ]
    print_table((f"{load.made:,} tokens", "sample s", "train s", "step s"), rows)


def _step(
    sampler: serving.Engine, runs: Sequence[training.Run], prompts: Sequence[list[list[int]]], tokens: int
) -> StepTimes:
    began = time.perf_counter()
    for number, run in enumerate(runs):
        sampler.publish(f"tenant-{number}", run)
    published = time.perf_counter()

    def one(job: tuple[int, list[int]]) -> training.Datum:
        number, prompt = job
        made = sampler.generate(prompt, adapter=f"tenant-{number}", max_tokens=tokens, logprobs=0, ignore_eos=True)
        given, before = [*prompt, *made.tokens], [0.0] * (len(prompt) - 1)
        logprobs = [*before, *(token.logprob or 0.0 for token in made.logprobs)]
        advantages = [*before, *[(-1.0) ** number / tokens] * tokens]
        return training.Datum(given[:-1], targets=given[1:], logprobs=logprobs, advantages=advantages)

    jobs = [(number, prompt) for number, each in enumerate(prompts) for prompt in each]
    with ThreadPoolExecutor(len(jobs)) as pool:
        data = list(pool.map(one, jobs))
    sampled = time.perf_counter()
    each = len(prompts[0])
    passes = [
        run.forward_backward(data[number * each :][:each], "importance_sampling") for number, run in enumerate(runs)
    ]
    for made in [*passes, *[run.step(lr=1e-5) for run in runs]]:
        made.result()
    return StepTimes((published - began) / len(runs), sampled - published, time.perf_counter() - sampled)


def _apart(model: nn.Module, config: LoraConfig, prompts: list[list[int]], tokens: int, device: str) -> StepTimes:
    """Return what a program by itself takes: all answers at once, then batches with the loss of the same tokens."""
    peft = get_peft_model(model, config).train()  # type: ignore[arg-type]
    parameters = [p for p in peft.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-5)
    given, autocast = torch.tensor(prompts, device=device), device == "cuda"
    times = StepTimes(0.0, 0.0, 0.0)
    for _ in range(2):
        synchronize(device)
        began = time.perf_counter()
        with torch.no_grad(), torch.autocast(device, torch.bfloat16) if autocast else nullcontext():
            ids = peft.generate(input_ids=given, do_sample=True, max_new_tokens=tokens, min_new_tokens=tokens)
        synchronize(device)
        sampled = time.perf_counter()
        for some in ids.split(TOGETHER):
            with torch.autocast(device, torch.bfloat16) if autocast else nullcontext():
                peft(input_ids=some, labels=some, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize(device)
        times = StepTimes(0.0, sampled - began, time.perf_counter() - sampled)
    peft.unload()  # type: ignore[operator]
    model.eval()
    return times
