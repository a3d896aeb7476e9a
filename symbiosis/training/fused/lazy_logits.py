"""Logits that exist when somebody asks for them: what a head makes of its input, of which a cross entropy needs only a piece at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from symbiosis.training.fused.loss_in_pieces import loss_in_pieces

Steps = tuple[Callable[[Tensor], Tensor], ...]
MOST_STEPS = 8  # more belong to no model


@dataclass(frozen=True)
class NotedCall:
    """An operation of torch on one tensor, that can be done again."""

    function: Callable[..., Tensor]
    before: tuple[Any, ...]  # arguments in front of the tensor
    after: tuple[Any, ...]
    named: dict[str, Any]

    def __call__(self, tensor: Tensor) -> Tensor:
        return self.function(*self.before, tensor, *self.after, **self.named)


class Whole:
    """The head's product, whole: made once, for all that asks for it."""

    def __init__(self, head: Callable[[Tensor], Tensor], hidden: Tensor) -> None:
        self.head, self.hidden = head, hidden
        self._made: Tensor | None = None

    @property
    def exists(self) -> bool:
        return self._made is not None

    def __call__(self) -> Tensor:
        wanted = torch.is_grad_enabled() and self.hidden.requires_grad
        if self._made is None or (wanted and not self._made.requires_grad):
            self._made = self.head(self.hidden)
        return self._made


class LazyLogits(Tensor):
    """A tensor of logits without memory. Operations on single values and views of rows are noted, a cross entropy is computed in pieces, and
    for anything else the logits are made."""

    whole: Whole
    hidden: Tensor  # the rows that these are the logits of
    steps: Steps  # from the head's product to these
    changes: Steps  # those of them that change values

    @staticmethod
    def of(whole: Whole, hidden: Tensor, like: Tensor, steps: Steps = (), changes: Steps = ()) -> "LazyLogits":
        """Return logits with the shape and dtype of `like`."""
        made = Tensor._make_wrapper_subclass(LazyLogits, like.shape, dtype=like.dtype, device=hidden.device)
        made.whole, made.hidden, made.steps, made.changes = whole, hidden, steps, changes
        return made  # type: ignore[no-any-return]

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return self.hidden.requires_grad

    def value(self) -> Tensor:
        """Return the logits themselves."""
        made = self.whole()
        for step in self.steps:
            made = step(made)
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.value())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.value().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.value().detach().clone()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is F.cross_entropy and (made := _cross_entropy(*args, **kwargs)) is not None:
            return made
        if (noted := _noted(func, args, kwargs)) is not None:
            return noted
        return func(*_made(args), **_made(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*_made(args), **_made(kwargs or {}))


def _made(given: Any) -> Any:
    return tree_map(lambda one: one.value() if isinstance(one, LazyLogits) else one, given)


def _noted(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazyLogits | None:
    """Return what an operation makes of lazy logits without making them, or None."""
    at = [place for place, one in enumerate(args) if isinstance(one, LazyLogits)]
    others = [one for one in (*args, *kwargs.values()) if not isinstance(one, LazyLogits)]
    if len(at) != 1 or any(isinstance(one, Tensor) for one in others):
        return None
    logits: LazyLogits = args[at[0]]
    call = NotedCall(func, args[: at[0]], args[at[0] + 1 :], kwargs)
    if logits.whole.exists or len(logits.steps) >= MOST_STEPS:
        return None
    if func in OF_VALUES:
        like = call(torch.empty(logits.shape, dtype=logits.dtype, device="meta"))
        if like.device.type != "meta" or like.shape != logits.shape or not like.is_floating_point():
            return None
        return LazyLogits.of(logits.whole, logits.hidden, like, (*logits.steps, call), (*logits.changes, call))
    if func in OF_ROWS and (hidden := _same_rows(call, logits)) is not None:
        like = call(torch.empty(logits.shape, dtype=logits.dtype, device="meta"))
        return LazyLogits.of(logits.whole, hidden, like, (*logits.steps, call), logits.changes)
    return None


def _same_rows(call: NotedCall, logits: LazyLogits) -> Tensor | None:
    """Return the rows of the head's input that a view of the logits shows whole, or None."""
    name, (*_, width) = call.function.__name__, logits.hidden.shape
    if name in ("contiguous", "detach"):
        return call(logits.hidden)
    if name == "__getitem__":
        index = call.after[0] if isinstance(call.after[0], tuple) else (call.after[0],)
        if any(type(one) not in (slice, type(...)) for one in index):
            return None
        reaches_last = ... in index or len(index) == logits.dim()
        return None if reaches_last and index[-1] not in (slice(None), ...) else logits.hidden[index]
    shape = call.after[0] if len(call.after) == 1 and isinstance(call.after[0], tuple | list) else call.after
    if call.named or not shape or shape[-1] != logits.shape[-1] or not all(type(one) is int for one in shape):
        return None
    return logits.hidden.reshape(*shape[:-1], width)


def _cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Return the loss, or None if this needs the logits."""
    if not isinstance(logits, LazyLogits) or logits.whole.exists or isinstance(target, LazyLogits):
        return None
    if weight is not None or size_average is not None or reduce is not None or label_smoothing:
        return None
    if logits.dim() != 2 or target.dim() != 1 or target.dtype != torch.int64 or len(target) != len(logits):
        return None
    losses = loss_in_pieces(logits.hidden, target, logits.whole.head, logits.changes, logits.shape[-1], ignore_index)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (target != ignore_index).sum()


_getters = [
    "shape",
    "device",
    "dtype",
    "layout",
    "is_cuda",
    "is_cpu",
    "is_meta",
    "is_leaf",
    "is_sparse",
    "is_quantized",
    "is_nested",
    "ndim",
    "grad_fn",
    "_version",
    "itemsize",
    "nbytes",
]
_methods = [
    "size",
    "dim",
    "ndimension",
    "numel",
    "nelement",
    "element_size",
    "stride",
    "is_contiguous",
    "is_floating_point",
    "is_complex",
    "get_device",
    "__len__",
    "storage_offset",
]
ABOUT = frozenset(
    [getattr(Tensor, name).__get__ for name in _getters]
    + [getattr(Tensor, name) for name in _methods]
    + [torch.is_floating_point, torch.is_complex, torch.numel]
)
OF_VALUES = frozenset(
    [
        getattr(Tensor, name)
        for name in ["float", "half", "bfloat16", "double", "to", "type", "mul", "div", "true_divide", "tanh"]
    ]
    + [getattr(Tensor, f"__{name}__") for name in ["mul", "rmul", "truediv"]]
    + [torch.tanh, torch.mul, torch.div, torch.true_divide]
)
OF_ROWS = frozenset(getattr(Tensor, name) for name in ("view", "reshape", "contiguous", "detach", "__getitem__"))
