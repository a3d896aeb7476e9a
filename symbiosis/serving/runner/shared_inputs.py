"""Finds linear layers that see the very same rows (q, k and v; gate and up), by a look at a forward pass. Adapters are computed for all of
them together."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from symbiosis.kernels.gpu.records import MOST_MEMBERS

STAGES = 8  # in which the numbers of an adapter come to the device, in the order of the layers


@dataclass(slots=True, eq=False)
class Group:
    """Linear layers that see the same rows. An adapter has a record for the group, number `entry`, by which rows are shrunk, and behind it
    one for each layer, by which they are expanded."""

    names: list[str]
    modules: list[nn.Module]
    is_head: bool  # sees only rows whose logits are kept
    entry: int = 0
    width: int = 0  # of the rows
    stage: int = 0  # with which what acts here has come

    @property
    def last_entry(self) -> int:
        return self.entry + len(self.names)


def find_groups(model: nn.Module, run: Callable[[], object], head: Any) -> list[Group]:
    """Return the groups that a call of `run` shows. Layers that it calls more than once are in none."""
    calls: list[tuple[str, nn.Module, Tensor]] = []

    def look(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        calls.append((name, module, args[0]))

    linear = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    hooks = [module.register_forward_pre_hook(partial(look, name)) for name, module in linear]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    names = [name for name, _, _ in calls]
    groups: list[Group] = []
    last: Tensor | None = None
    for name, module, x in calls:
        if names.count(name) > 1:
            continue
        group = groups[-1] if groups else None
        joins = group is not None and x is last and _parent(group.names[0]) == _parent(name)
        if group is None or not joins or len(group.names) == MOST_MEMBERS:
            group = Group([], [], module is head, width=x.shape[-1])
            groups.append(group)
        group.names.append(name)
        group.modules.append(module)
        last = x
    return _numbered(groups)


def _numbered(groups: list[Group]) -> list[Group]:
    entries = {False: 0, True: 0}
    for number, group in enumerate(groups):
        group.stage = number * STAGES // len(groups)
        group.entry = entries[group.is_head]
        entries[group.is_head] += 1 + len(group.names)
    return groups


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def width_of(module: nn.Module) -> int:
    """Return how many features a linear layer makes."""
    return module.nf if isinstance(module, Conv1D) else module.out_features  # type: ignore[return-value]
