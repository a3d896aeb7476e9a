"""Layers that receive the same input tensor (q/k/v, gate/up): found at run time, then asked for in one call.

No knowledge of the model is needed. A thread that calls several layers in a row with the very same tensor has shown a *group*. When
the first of them is called again, all are asked for at once, and the results of the others wait until they are called. A result is
handed out only for the tensor it was made of, unchanged; a layer that receives another tensor makes its own call. So a model whose
flow changes loses some speed and no correctness, and a member that keeps being skipped is no longer asked for.
"""

import weakref
from collections.abc import Mapping
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


class Groups:
    """The groups that one thread's calls to one executor have shown, besides those known before, and the run of calls with one tensor
    that is under way."""

    def __init__(self, known: Mapping[GroupMember, tuple[GroupMember, ...]]) -> None:
        self._known = known
        self._learned: dict[GroupMember, tuple[GroupMember, ...]] = {}
        self._misses: dict[GroupMember, int] = {}
        self._x: weakref.ref[Tensor] | None = None  # the tensor of the run, its version, and the dtype of the products
        self._version, self._dtype = -1, torch.float32
        self._called: tuple[GroupMember, ...] = ()
        self.ready: dict[GroupMember, Tensor] = {}  # results for layers that have not called yet
        self._made_of: Tensor | None = None  # what the tensor held then, where that can be compared without waiting

    def fetch(self, x: Tensor, dtype: torch.dtype, member: GroupMember) -> Tensor | None:
        """Return the product of `member` with `x` (as `dtype`), if it is `ready` and `x` still has the values that it was made of."""
        if member not in self.ready or self._x is None or self._x() is not x:
            return None
        if self._version != x._version or self._dtype != dtype:
            return None
        if self._made_of is not None and not torch.equal(self._made_of, x):  # written to past autograd
            return None
        made = self.ready.pop(member)
        if not self.ready:
            self._made_of = None
        return made

    def begin(self, x: Tensor, dtype: torch.dtype, member: GroupMember) -> tuple[GroupMember, ...]:
        """Return the layers to ask for in the call that `member` makes now: `member` first, perhaps alone."""
        if x.is_inference() or torch.is_inference_mode_enabled():  # results that wait would be of no use outside
            return (member,)
        if self._x is not None and self._x() is x and self._version == x._version and self._dtype == dtype:
            if len(self._called) <= MAX_GROUP:  # one more is too many, and that is all there is to know
                self._called = (*self._called, member)
            return (member,)
        if self.ready or len(self._called) > 1:
            self._learn()
        self._x, self._version, self._dtype, self._called = weakref.ref(x), x._version, dtype, (member,)
        self.ready, self._made_of = {}, None
        return self._learned.get(member) or self._known.get(member) or (member,)

    def keep(self, x: Tensor, group: tuple[GroupMember, ...], made: list[Tensor]) -> Tensor:
        """Return the first member's result, and keep the others until their layers are called."""
        self._called, self.ready = group, dict(zip(group[1:], made[1:], strict=True))
        self._made_of = x.detach().clone() if x.is_cpu else None
        return made[0]

    def _learn(self) -> None:
        """Learn from a run that is over."""
        leader, called = self._called[0], self._called
        if self.ready:
            self._misses[leader] = self._misses.get(leader, 0) + 1
            if self._misses[leader] >= MISSES_ALLOWED:
                self._learned[leader] = (leader,)
        elif self._can_be_group(called):
            self._learned[leader] = called

    def _can_be_group(self, called: tuple[GroupMember, ...]) -> bool:
        """Whether these layers, of which nothing is known yet, can be asked for together."""
        if called[0] in self._learned or called[0] in self._known or len(called) > MAX_GROUP:
            return False
        return len(set(called)) == len(called) and len({member.bias for member in called}) == 1
