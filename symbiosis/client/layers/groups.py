"""Layers that receive the same input tensor (q/k/v, gate/up): found at run time, then asked for in one call.

No knowledge of the model is needed. A thread that calls several layers in a row with the very same tensor has shown a *group*. When
the first of them is called again, all are asked for at once, and the results of the others wait until they are called. A result is
handed out only for the tensor it was made of, unchanged; a layer that receives another tensor makes its own call. So a model whose
flow changes loses some speed and no correctness, and a member that keeps being skipped is no longer asked for.
"""

import weakref
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from symbiosis.protocol import MAX_GROUP

MISSES_ALLOWED = 3  # so often may members of a group not be fetched, until it is asked for no more


class GroupMember(NamedTuple):
    """One layer of a group: its number, the width of its result, and whether the executor adds its bias."""

    layer: int
    width: int
    bias: bool


@dataclass(slots=True)
class Streak:
    """Consecutive calls with one tensor: the layers that made them, and results for layers that have not called yet."""

    x: "weakref.ref[Tensor] | None" = None
    version: int = -1
    dtype: torch.dtype | None = None
    called: tuple[GroupMember, ...] = ()
    ready: dict[GroupMember, Tensor] | None = None
    made_of: Tensor | None = None  # what `x` held then, where that can be compared without waiting

    def is_of(self, x: Tensor, dtype: torch.dtype) -> bool:
        return self.x is not None and self.x() is x and self.version == x._version and self.dtype == dtype

    def take(self, x: Tensor, member: GroupMember) -> Tensor | None:
        """Return the result for `member`, if `x` still has the values that it was made of."""
        if not self.ready or member not in self.ready:
            return None
        if self.made_of is not None and not torch.equal(self.made_of, x):  # written to past autograd
            return None
        made = self.ready.pop(member)
        if not self.ready:
            self.made_of = None
        return made


class Groups:
    """The groups that one thread's calls to one executor have shown, besides those known before."""

    def __init__(self, known: dict[GroupMember, tuple[GroupMember, ...]]) -> None:
        self._run = Streak()
        self._known = dict(known)
        self._misses: dict[GroupMember, int] = {}

    def fetch(self, x: Tensor, dtype: torch.dtype, member: GroupMember) -> Tensor | None:
        """Return the product of `member` with `x` (as `dtype`), if it was made already."""
        run = self._run
        return run.take(x, member) if run.ready and run.is_of(x, dtype) else None

    def begin(self, x: Tensor, dtype: torch.dtype, member: GroupMember) -> tuple[GroupMember, ...]:
        """Return the layers to ask for in the call that `member` makes now: `member` first, perhaps alone."""
        if x.is_inference() or torch.is_inference_mode_enabled():  # results that wait would be of no use outside
            return (member,)
        run = self._run
        if run.is_of(x, dtype):
            if len(run.called) <= MAX_GROUP:  # one more is too many, and that is all there is to know
                run.called = (*run.called, member)
            return (member,)
        self._learn(run)
        self._run = Streak(weakref.ref(x), x._version, dtype, (member,))
        return self._known.get(member) or (member,)

    def keep(self, x: Tensor, group: tuple[GroupMember, ...], made: list[Tensor]) -> Tensor:
        """Return the first member's result, and keep the others until their layers are called."""
        run = self._run
        run.called, run.ready = group, dict(zip(group[1:], made[1:], strict=True))
        run.made_of = x.detach().clone() if x.is_cpu else None
        return made[0]

    def _learn(self, run: Streak) -> None:
        """Learn from a run that is over."""
        leader = run.called[0] if run.called else None
        if leader is None:
            return
        if run.ready:
            self._misses[leader] = self._misses.get(leader, 0) + 1
            if self._misses[leader] >= MISSES_ALLOWED:
                self._known[leader] = (leader,)
        elif leader not in self._known and 1 < len(run.called) <= MAX_GROUP:
            distinct = len(set(run.called)) == len(run.called)
            if distinct and all(member.bias == leader.bias for member in run.called):
                self._known[leader] = run.called
