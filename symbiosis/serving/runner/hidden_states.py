"""The last hidden states of a step's rows: what a causal model's head is given, and vectors of texts are made of."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from symbiosis.errors import ConfigError
from symbiosis.serving.runner.model_runner import ModelRunner
from symbiosis.serving.scheduler.scheduler_output import SchedulerOutput


class HiddenStates:
    """The last hidden states of one served model, as its base without the head returns them. They are kept within `kept` only. On a GPU a step
    that they are kept of runs as it is: a graph returns its logits only."""

    def __init__(self, served: ModelRunner) -> None:
        self._batches, self._runner = served.batches, served.runner
        self._kept: list[Tensor] | None = None  # of each pass of the present step
        self.why_not, self._model = why_none(served), served.model

    @contextmanager
    def kept(self) -> Iterator[None]:
        """In the block, keep those of one step."""
        self._kept = kept = list[Tensor]()

        def keep(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            kept.append(output[0][0])

        hook = self._model.base_model.register_forward_hook(keep)  # type: ignore[union-attr]
        if self._runner is not None:
            self._runner.is_watched = True
        try:
            yield
        finally:
            self._kept = None
            hook.remove()
            if self._runner is not None:
                self._runner.is_watched = False

    def of(self, step: SchedulerOutput) -> Tensor:
        """Return those of a step that was computed in the block, float32 [rows, width] on the CPU."""
        kept = self._kept or []
        if not self._batches:
            kept = [each[-segment.rows :] for each, segment in zip(kept, step.segments, strict=True)]
        rows = torch.cat(kept).float().cpu()
        if len(rows) != step.rows:
            raise ConfigError(f"the model tells {len(rows)} hidden states of {step.rows} tokens: it makes no vectors")
        return rows


def why_none(served: ModelRunner) -> str:
    """Say why a model makes no vectors, if it does not."""
    if served.divide_adapter is not None:
        return "a model that is divided over several devices makes no vectors of texts: serve it on one"
    if getattr(served.model, "base_model", served.model) is served.model:
        return f"{type(served.model).__name__} has no part that tells hidden states, so there are no vectors of texts"
    return ""
