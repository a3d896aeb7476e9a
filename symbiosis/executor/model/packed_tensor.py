"""A packed weight in the place of a tensor, so that transformers' loader renames, stacks and joins it as it would the whole one."""

from typing import Any

import torch
from torch import Tensor

from symbiosis.kernels.packed import PackedWeight

aten = torch.ops.aten
KEEPS = {aten.detach.default, aten.alias.default, aten.clone.default}


class PackedTensor(Tensor):
    """It has the shape and dtype of the whole matrix. What is not a way to lay it out computes with the whole one.

    >>> from symbiosis.kernels.packing import pack
    >>> tensor = PackedTensor(pack(torch.eye(2), "int8"), torch.bfloat16)
    >>> torch.stack([tensor, tensor]).packed.shape, torch.cat([tensor, tensor]).packed.shape
    ((2, 2, 2), (4, 2))
    """

    packed: PackedWeight

    @staticmethod
    def __new__(cls, packed: PackedWeight, dtype: torch.dtype) -> "PackedTensor":
        made = Tensor._make_wrapper_subclass(cls, packed.shape, dtype=dtype, device=packed.device)  # type: ignore[attr-defined]
        made.packed = packed
        return made  # type: ignore[no-any-return]

    def __init__(self, packed: PackedWeight, dtype: torch.dtype) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PackedTensor({self.packed.format}, {tuple(self.shape)}, {self.dtype})"

    def whole(self) -> Tensor:
        return self.packed.whole(self.dtype).view(self.shape)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in KEEPS:
            return cls(args[0].packed, args[0].dtype)
        if func is aten._to_copy.default:
            device = kwargs.get("device") or args[0].device
            moved = args[0].packed.with_parts(lambda part: part.to(device))
            return cls(moved, kwargs.get("dtype") or args[0].dtype)
        if func is aten.stack.default and not (args[1] if len(args) > 1 else 0):
            first, *others = args[0]
            return cls(first.packed.stacked([one.packed for one in others]), first.dtype)
        if func is aten.cat.default and (args[1] if len(args) > 1 else 0) % args[0][0].dim() == args[0][0].dim() - 2:
            first, *others = args[0]
            return cls(first.packed.joined([one.packed for one in others]), first.dtype)
        return func(*map(_whole, args), **{name: _whole(value) for name, value in kwargs.items()})


def _whole(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_whole, value))
    return value.whole() if isinstance(value, PackedTensor) else value
