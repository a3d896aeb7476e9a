"""A program that reads a long context and goes on with it, by each cache in turn: the `long` suite of `bench_gpu.py`."""

import gc
import time
from typing import Any, NamedTuple

import torch
from _gpu import Shape, synchronize
from transformers import DynamicCache

import symbiosis

CHUNK = 4096  # tokens of the prompt at once
WARM_UP, STEPS = 2, 6  # tokens before any is measured, and those that are
CLEAR = 0.02  # of the largest logit: rounding does not exchange tokens that are further apart


class Read(NamedTuple):
    """What a program has done. `best` are the likeliest tokens, and `clear` says which of them no rounding makes others."""

    prompt_s: float
    token_s: list[float]
    best: list[int]
    clear: list[bool]
    cache_gib: float  # of the device


class LongContext:
    """A client of the executor at `endpoint`, or without one a program with a model of its own."""

    def __init__(self, endpoint: str | None, shape: Shape, device: str) -> None:
        self._shape, self._device = shape, device
        made = shape.build(device) if endpoint is None else symbiosis.from_executor(endpoint, device=device)
        self._model: Any = made.eval()

    def _cache(self, kind: str) -> Any:
        if kind == "host":
            return symbiosis.offload_cache(self._model)
        return DynamicCache(config=self._shape.config(), offloading=kind == "offloaded" and self._device != "cpu")

    @torch.no_grad()
    def read(self, kind: str, length: int) -> Read:
        """Read a text of so many tokens, and go on with tokens that are the same for every cache, so that all have the same to do."""
        ids = torch.randint(
            3, self._shape.vocabulary, (1, length + WARM_UP + STEPS), generator=torch.Generator().manual_seed(1)
        )
        ids, before, cache = ids.to(self._device), self._in_use(), self._cache(kind)
        begun = time.perf_counter()
        for first in range(0, length, CHUNK):
            chunk = ids[:, first : min(length, first + CHUNK)]
            self._model(input_ids=chunk, past_key_values=cache, use_cache=True, logits_to_keep=1)
        synchronize(self._device)
        prompt_s, held = time.perf_counter() - begun, (self._in_use() - before) / 2**30
        took, best, clear = [], [], []
        for at in range(length, length + WARM_UP + STEPS):
            begun = time.perf_counter()
            logits = self._model(input_ids=ids[:, at : at + 1], past_key_values=cache, use_cache=True).logits
            synchronize(self._device)
            took.append(time.perf_counter() - begun)
            first_two = logits[0, -1].float().topk(2)
            best.append(int(first_two.indices[0]))
            apart = first_two.values[0] - first_two.values[1]
            clear.append(bool(apart > CLEAR * logits.abs().max()))
        return Read(prompt_s, took[WARM_UP:], best, clear, held)

    def forget(self) -> None:
        """Give back what the last cache has left behind, on the device and in the host's memory."""
        gc.collect()
        if self._device != "cpu":
            torch.cuda.empty_cache()
            names = "_accelerator_emptyHostCache", "_host_emptyCache"  # by torch's version
            next(filter(None, (getattr(torch._C, name, None) for name in names)))()

    def _in_use(self) -> int:
        return torch.cuda.memory_allocated() if self._device != "cpu" else 0
