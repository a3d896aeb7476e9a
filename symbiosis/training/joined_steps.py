"""Steps of AdamW of several runs, made together: their norms come from the device at once, and kernels take the parameters of all."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from symbiosis.errors import ConfigError
from symbiosis.training.train_state import MOMENTS, TrainState


class StepWords(NamedTuple):
    """What a step was asked for."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    max_grad_norm: float | None


def step_together(asked: Sequence[tuple[TrainState, StepWords]]) -> list[float | Exception]:
    """Make a step of each run, and return its gradients' norm, or why there was none. The gradients are gone then, also if they were not finite."""
    outcomes: list[float | Exception] = []
    by_words: dict[Any, list[tuple[TrainState, Any]]] = {}
    for (state, words), norm in zip(asked, _norms([state for state, _ in asked]), strict=True):
        if norm is None:
            outcomes.append(ConfigError("there are no gradients to step with: call forward_backward first"))
        elif not norm < float("inf"):
            outcomes.append(ConfigError(f"the gradients' norm is {norm}: they are dropped, and nothing has changed"))
        else:
            outcomes.append(norm)
            _clip(state, norm, words.max_grad_norm)
            for flat, ratio in state.rates():
                how = words._replace(lr=words.lr * ratio, max_grad_norm=None), flat.values.device, flat.values.dtype
                by_words.setdefault(how, []).append((state, flat))
    for (words, device, _), each in by_words.items():
        _adamw(words, each, fused=device.type == "cuda")
    for state, _ in asked:
        state.drop_gradients()
    return outcomes


def _norms(states: Sequence[TrainState]) -> list[float | None]:
    """Return the norm of each run's gradients, None where there are none."""
    there = [state for state in states if any(flat.waits for flat in state.adapter.flats)]
    made = [torch.nn.utils.get_total_norm([flat.gradients for flat in state.adapter.flats]) for state in there]
    norms = dict(zip(there, torch.stack(made).tolist() if made else [], strict=True))
    return [norms.get(state) for state in states]


def _clip(state: TrainState, norm: float, most: float | None) -> None:
    if most is not None:
        values = [flat.values for flat in state.adapter.flats]
        torch.nn.utils.clip_grads_with_norm_(values, most, torch.tensor(norm))


@torch.no_grad()
def _adamw(words: StepWords, each: Sequence[tuple[TrainState, Any]], fused: bool) -> None:
    moments = [state.moments(flat) for state, flat in each]
    firsts, seconds = ([moment[name] for moment in moments] for name in MOMENTS)
    steps: list[Tensor] = [moment["step"] for moment in moments]
    values, gradients = ([getattr(flat, name) for _, flat in each] for name in ("values", "gradients"))
    adamw(
        values, gradients, firsts, seconds, [], steps, foreach=False, fused=fused, amsgrad=False, beta1=words.beta1,
        beta2=words.beta2, lr=words.lr, weight_decay=words.weight_decay, eps=words.eps, maximize=False,
    )  # fmt: skip
