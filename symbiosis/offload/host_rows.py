"""Stand-ins for keys and values that lie in the host's memory, which a layer hands to its attention."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

TOLD = {"shape", "dtype", "device", "ndim", "is_cuda", "requires_grad", "layout"}  # properties
ASKED = {"size", "dim", "is_floating_point", "numel", "__repr__", "__len__"}


class Touched(TypeError):
    """Something was to be computed with keys or values that lie in the host's memory."""


class HostRows(Tensor):
    """A tensor with a shape, a dtype and a device, and without values. Only the attention that `offload_cache` puts in can read what it
    stands for. `rows` are the newest of these keys or values."""

    layer: Any
    rows: Tensor

    @staticmethod
    def __new__(cls, shape: Sequence[int], rows: Tensor, layer: object) -> "HostRows":
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=rows.dtype, device=rows.device)  # type: ignore[attr-defined]
        made.layer, made.rows = layer, rows
        return made  # type: ignore[no-any-return]

    def __init__(self, *_: object) -> None:
        super().__init__()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in ASKED or (name == "__get__" and getattr(func.__self__, "__name__", "") in TOLD):  # type: ignore[attr-defined]
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is Tensor.to and torch.device("cpu" if not args[1:] else args[1]) == args[0].device:
            return args[0]
        raise Touched(
            f"{name} of keys or values that lie in the host's memory: this cache is for the model that was given to "
            "symbiosis.offload_cache, as long as its attention is not set to another"
        )

    @classmethod
    def __torch_dispatch__(cls, func: object, *_: object) -> Any:
        raise Touched(f"{func} of keys or values that lie in the host's memory")
