"""Finds out which layers see all rows of a step, in order. At any other layer an adapter would act on rows that are not its own."""

from collections import defaultdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from symbiosis.offload.logit_check import probe_tokens
from symbiosis.serving.request import Request
from symbiosis.serving.runner.model_runner import ModelRunner
from symbiosis.serving.scheduler.scheduler_output import ScheduledRequest, SchedulerOutput, Sequence

LENGTH = 8  # tokens of the text that is looked at; they differ
NEVER, SOMETIMES = "is not called for the tokens of a text", "is called for some tokens only, as a routed expert is"
ROUNDS = 1e-6  # of the largest number: rows as far off another one are alike

Calls = dict[str, list[Tensor | None]]  # by layer: the rows that it was called with; None: not by rows


def rows_of(x: Any, y: Any) -> Tensor | None:
    """Return what a layer was given, row by row, [rows, width], or None if it does not make one row of each. Tokens are rows without a
    width.

    >>> rows_of(torch.ones(1, 3, 4), torch.ones(1, 3, 5)).shape
    torch.Size([3, 4])
    >>> rows_of(torch.ones(1, 3, 2, 4), torch.ones(1, 3, 2, 4)) is None
    True
    """
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return None
    leading = x.shape[:-1] if x.is_floating_point() else x.shape
    if y.shape[:-1] != leading or len(leading) not in (1, 2) or (len(leading) == 2 and leading[0] != 1):
        return None
    return x.detach().float().reshape(leading[-1], -1)


def misplaced(served: ModelRunner) -> dict[str, str]:
    """Return the layers at which no adapter can act, each with the reason. To be asked before any request is served."""
    tokens = _tokens(served)
    pieces = [_calls(served, tokens[: length + 1]) for length in range(len(tokens))]
    reasons = {name: _reason([calls.get(name, []) for calls in pieces]) for name, _ in served.model.named_modules()}
    return _with_siblings(served.model, {name: why for name, why in reasons.items() if why is not None})


def _with_siblings(model: nn.Module, reasons: dict[str, str]) -> dict[str, str]:
    """Add the siblings of layers that were not called: a layer in the same list has seen all rows only by chance."""
    beside: dict[str, str] = {}
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.ModuleDict):
            continue
        if any(reasons.get(f"{path}.{child}") in (NEVER, SOMETIMES) for child, _ in module.named_children()):
            beside |= {f"{path}.{name}": SOMETIMES for name, _ in module.named_modules() if name}
    return beside | reasons


def _tokens(served: ModelRunner) -> list[int]:
    return list(dict.fromkeys(token for of in probe_tokens(served.model) for token in of))[:LENGTH]


def _calls(served: ModelRunner, tokens: list[int]) -> Calls:
    """Return the rows of every layer while these tokens are computed."""
    calls: Calls = defaultdict(list)

    def look(name: str, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any], y: Any) -> None:
        calls[name].append(rows_of(args[0], y) if len(args) == 1 and not options else None)

    hooks = [
        module.register_forward_hook(partial(look, name), with_kwargs=True)
        for name, module in served.model.named_modules()
    ]
    sequence = Sequence(Request(id=0, prompt=tuple(tokens)), 0, tokens, None, 0.0)
    try:
        served.blocks.grow(sequence, len(tokens))
        served.logits(
            SchedulerOutput((ScheduledRequest(sequence, 0, len(tokens), 0, True),)), torch.arange(len(tokens))
        )
    finally:
        served.release(sequence)
        for hook in hooks:
            hook.remove()
    return calls


def _reason(pieces: list[list[Tensor | None]]) -> str | None:
    """Return what is wrong with a layer, given its calls for the first token, the first two, and so on up to the whole text. The last
    rows of these calls must be the rows of the whole text, one by one."""
    counts = {len(calls) for calls in pieces}
    if counts == {0}:
        return NEVER
    if len(counts) > 1:
        return SOMETIMES
    for calls in zip(*pieces, strict=True):
        rows = [x for x in calls if x is not None]
        if len(rows) < len(calls):
            return "is not called with one row for each token"
        if [len(x) for x in rows] != list(range(1, len(rows) + 1)):
            return "sees other rows than there are tokens, as a routed expert does"
        if not _are_in_order(torch.stack([x[-1] for x in rows]), rows[-1]):
            return "sees the tokens' rows in another order"
    return None


def _are_in_order(expected: Tensor, rows: Tensor) -> bool:
    """Whether each row is nearer to the one expected in its place than to any other."""
    apart = torch.cdist(expected.double(), rows.double())
    return bool((apart.diagonal() <= apart.amin(1) + ROUNDS * rows.abs().max()).all())
