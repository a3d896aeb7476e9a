"""Adapters as PEFT saves them, and steps over many sequences, for tests of the server."""

from collections.abc import Callable, Iterable
from copy import deepcopy
from pathlib import Path

import peft
import torch
from torch import Tensor, nn

from symbiosis.serving.lora.adapter import Adapter
from symbiosis.serving.request import Request
from symbiosis.serving.runner.model_runner import ModelRunner
from symbiosis.serving.scheduler.scheduler_output import ScheduledRequest, SchedulerOutput, Sequence

Made = tuple[Path, nn.Module]  # the folder, and PEFT's own model


def saved(base: nn.Module, config: peft.PeftConfig, folder: Path, seed: int = 0, spread: float = 0.1) -> Made:
    """An adapter with random weights."""
    torch.manual_seed(seed)
    model = peft.get_peft_model(deepcopy(base), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += torch.randn_like(parameter) * spread
    model.eval().save_pretrained(folder)
    return folder, peft.PeftModel.from_pretrained(deepcopy(base), folder).eval()


def sequence_of(prompt: Iterable[int], adapter: Adapter | None = None) -> Sequence:
    tokens = tuple(prompt)
    virtual = adapter.virtual if adapter else 0
    return Sequence(Request(id=0, prompt=tokens), 0, [0] * virtual + list(tokens), adapter, 0.0)


def step_over(pairs: Iterable[tuple[Sequence, int]]) -> SchedulerOutput:
    """So many rows of each sequence, which has come to where it is; and they are computed."""
    segments: list[ScheduledRequest] = []
    first = 0
    for sequence, rows in pairs:
        segments.append(ScheduledRequest(sequence, first, rows, sequence.computed, True))
        first += rows
    return SchedulerOutput(tuple(segments))


def run(served: ModelRunner, pairs: list[tuple[Sequence, int]]) -> Tensor:
    for sequence, rows in pairs:
        assert served.blocks.grow(sequence, sequence.computed + rows)
    step = step_over(pairs)
    logits = served.forward(step)
    for sequence, rows in pairs:
        sequence.computed += rows
    return logits


def off(mine: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((mine - theirs).abs().max() / theirs.abs().max())


Configure = Callable[[], peft.PeftConfig]
