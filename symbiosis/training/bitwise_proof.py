"""The proof that a sampler says of its tokens, bit for bit, what a trainer computes of them: some are made, and scored."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from symbiosis.errors import ConfigError
from symbiosis.training.datum import Datum

NAME = "bitwise-proof"  # of the run and of the adapter
# those of one prompt are decoded alone; the last ends in another block of keys, and is longer than what a step takes of prompts
LENGTHS, TOKENS = (1, 7, 30, 60, 700), 8


def prove_bitwise(sampler: Any, trainer: Any, layers: Sequence[str]) -> int:
    """Have a LoRA at these layers, whose numbers are random, sampled and scored. Return how many tokens agreed, or raise `ConfigError`."""
    from peft import LoraConfig

    if NAME in trainer.names:  # of a process that was killed here
        trainer.forget(trainer.open(NAME))
    config = LoraConfig(r=8, lora_alpha=24, target_modules=list(layers), init_lora_weights=False)
    run = trainer.create(config, seed=0, name=NAME)
    try:
        sampler.publish(NAME, run)
        try:
            data = _sampled(sampler)
        finally:
            sampler.remove(NAME)
        together = run.forward(data).result().mismatch
        alone = run.forward(data[-1:]).result().mismatch
    finally:
        trainer.forget(run)
    assert together is not None and alone is not None
    if not (together.is_zero and alone.is_zero):
        off = max(together.largest, alone.largest)
        raise ConfigError(
            f"bitwise does not hold here: of {together.tokens} tokens, log probabilities of sampler and trainer differ by up to {off:.1e}. "
            "Leave it out, or use another processor or release of torch"
        )
    return together.tokens


def _sampled(sampler: Any) -> list[Datum]:
    generator, room = torch.Generator().manual_seed(0), min(sampler.longest, sampler.most_tokens) - TOKENS
    texts = [torch.randint(sampler.vocabulary, (min(n, room),), generator=generator).tolist() for n in LENGTHS]
    with ThreadPoolExecutor(len(texts)) as pool:
        return [*pool.map(lambda text: _datum(sampler, text), texts)]


def _datum(sampler: Any, text: list[int]) -> Datum:
    made = sampler.generate(text, adapter=NAME, max_tokens=TOKENS, logprobs=0, seed=0, ignore_eos=True)
    blank, whole = [0.0] * (len(text) - 1), [*text, *made.tokens]
    logprobs, advantages = [each.logprob for each in made.logprobs], [1.0] * TOKENS
    numbers = (torch.tensor([*blank, *each]) for each in (logprobs, advantages))
    return Datum(
        torch.tensor(whole[:-1]), torch.tensor(whole[1:]), **dict(zip(("logprobs", "advantages"), numbers, strict=True))
    )
