"""What `bitwise` costs and gives, for `bench_train.py bitwise`: KL of sampler and trainer, and the time of a sampled token and of a training step, part by
part, with it and without."""

import copy
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig
from torch import nn
from transformers import AttentionInterface

from symbiosis import serving, training
from symbiosis.base.reporting import Report, print_table
from symbiosis.serving.runner.attention import NAME as PAGED
from symbiosis.serving.runner.attention import attention
from symbiosis.training.sequence_packing import NAME as PACKED
from symbiosis.training.sequence_packing import _attention

PROMPT, TOKENS, TEXTS, ROUNDS = 64, 24, 8, 2
PARTS = "products", "attention", "head"


class Parts:
    """Seconds of the forward passes' parts. Adapters of the trainer count as products."""

    def __init__(self, model: nn.Module) -> None:
        self.seconds: Counter[str] = Counter()
        self._began: list[float] = []
        head = model.get_output_embeddings()  # type: ignore[operator]
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(lambda *_: self._began.append(time.perf_counter()))
                module.register_forward_hook(lambda *_, part="head" if module is head else "products": self._end(part))

    def _end(self, part: str) -> None:
        self.seconds[part] += time.perf_counter() - self._began.pop()

    @contextmanager
    def of_attention(self) -> Iterator[None]:
        """In the block, attention is timed."""
        try:
            for name, function in ((PAGED, attention), (PACKED, _attention)):
                AttentionInterface.register(name, self._timed(function))
            yield
        finally:
            for name, function in ((PAGED, attention), (PACKED, _attention)):
                AttentionInterface.register(name, function)

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._began.append(time.perf_counter())
            try:
                return function(*args, **kwargs)
            finally:
                self._end("attention")

        return timed


def bitwise(name: str, base: nn.Module, config: LoraConfig, report: Report) -> None:
    """Sample and train with `bitwise` and without."""
    found = {is_on: _measured(copy.deepcopy(base), config, is_on) for is_on in (False, True)}
    name = f"{name}_{str(next(base.parameters()).dtype).removeprefix('torch.')}"
    usual, exact = found[False], found[True]
    rows = []
    for what in usual:
        ratio = "" if what.startswith(("KL", "largest", "equal")) else f"{exact[what] / max(usual[what], 1e-9):.2f}"
        rows.append((what, f"{usual[what]:.3g}", f"{exact[what]:.3g}", ratio))
        for is_on, each in found.items():
            report.figure(f"{name}_{what.replace(' ', '_')}_{'bitwise' if is_on else 'usual'}", each[what])
    print_table((name, "usual", "bitwise", "ratio"), rows)
    report.bar(f"{name}_bitwise_largest", exact["largest difference"], "<=", 0.0)


def _measured(model: nn.Module, config: LoraConfig, is_on: bool) -> dict[str, float]:
    twin = copy.deepcopy(model)
    of_sampler, of_trainer = Parts(model), Parts(twin)
    told: dict[str, float] = {}
    with (
        serving.Engine(model, memory=1 << 28, max_batch=TEXTS, bitwise=is_on) as sampler,
        training.Engine(twin, bitwise=is_on) as trainer,
    ):
        run = trainer.create(config, seed=0)
        run.forward_backward(_data(model)).result()
        run.step(1e-3).result()  # B is not zero any more
        sampler.publish("policy", run)
        for texts in (1, TEXTS):
            with of_sampler.of_attention():
                told |= _of_tokens(sampler, of_sampler, texts)
        with ThreadPoolExecutor(TEXTS) as pool:
            data = list(pool.map(lambda number: _sampled(sampler, number), range(TEXTS)))
        with of_trainer.of_attention():
            told |= _of_steps(run, of_trainer, data)
        apart = run.forward(data).result().mismatch
        assert apart is not None
        told |= {
            "KL, first estimate": apart.kl_v1,
            "KL, second estimate": apart.kl_v2,
            "largest difference": apart.largest,
        }
    return told


def _of_tokens(sampler: Any, parts: Parts, texts: int) -> dict[str, float]:
    """Milliseconds of a step, by what they are."""
    with ThreadPoolExecutor(texts) as pool:

        def round_s() -> float:
            began = time.perf_counter()
            list(pool.map(lambda number: _sampled(sampler, number), range(texts)))
            return time.perf_counter() - began

        round_s()
        parts.seconds.clear()
        steps = sampler.figures().steps
        whole = sum(round_s() for _ in range(ROUNDS))
        steps = sampler.figures().steps - steps
    named = {"whole": whole, **{part: parts.seconds[part] for part in PARTS}}
    named["rest"] = whole - sum(named[part] for part in PARTS)
    return {f"a step of {texts} texts: {part} ms": 1e3 * seconds / steps for part, seconds in named.items()}


def _of_steps(run: Any, parts: Parts, data: list[training.Datum]) -> dict[str, float]:
    times, forwards = [], []
    for _ in range(ROUNDS + 1):
        began = time.perf_counter()
        run.forward_backward(data, "importance_sampling").result()
        times.append(time.perf_counter() - began)
    parts.seconds.clear()
    for _ in range(ROUNDS):
        began = time.perf_counter()
        run.forward(data).result()
        forwards.append(time.perf_counter() - began)
    what = f"training {sum(map(len, data))} tokens"
    told = {f"{what}: forward and backward ms": 1e3 * statistics.median(times[1:])}
    told[f"{what}: forward ms"] = 1e3 * statistics.mean(forwards)
    return told | {f"{what}: forward, {part} ms": 1e3 * parts.seconds[part] / ROUNDS for part in PARTS}


def _prompt(number: int, vocabulary: int) -> list[int]:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(3, vocabulary, (PROMPT,), generator=generator).tolist()


def _sampled(sampler: Any, number: int) -> training.Datum:
    prompt = _prompt(number, sampler.vocabulary)
    made = sampler.generate(prompt, adapter="policy", max_tokens=TOKENS, logprobs=0, seed=number, ignore_eos=True)
    blank, whole = [0.0] * (PROMPT - 1), [*prompt, *made.tokens]
    logprobs = torch.tensor([*blank, *(token.logprob for token in made.logprobs)])
    advantages = torch.tensor([*blank, *[1.0] * TOKENS])
    return training.Datum(torch.tensor(whole[:-1]), torch.tensor(whole[1:]), logprobs=logprobs, advantages=advantages)


def _data(model: Any) -> list[training.Datum]:
    texts = [torch.tensor(_prompt(number, model.config.vocab_size)) for number in range(2)]
    return [training.Datum(text[:-1], text[1:]) for text in texts]
