"""A weight that lives in the executor: the tensor that takes a parameter's place, and what torch's operations make of it."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors
from torch.utils._pytree import tree_leaves, tree_map

from symbiosis.client.session import Session
from symbiosis.client.weights.remote_products import PRODUCTS
from symbiosis.client.weights.remote_sum import SUMS, RemoteSum
from symbiosis.client.weights.remote_view import (
    LIKE,
    Handle,
    Lent,
    NoMemory,
    RemoteView,
    call_site,
    is_composite,
    is_view,
    stand_in,
    written_by,
)
from symbiosis.errors import WeightRead, WeightWrite
from symbiosis.protocol import Layer, View

aten = torch.ops.aten
COPIES = frozenset((aten.copy_.default, aten.set_.source_Tensor))
NOWHERE = 1 << 62  # no address of any processor or GPU


class RemoteWeight(RemoteView):
    """A view into a tensor of the executor that acts as a tensor."""

    _is_a_parameter = _is_to_be_trained = False

    # What torch.Tensor has as attributes and must not be bypassed.

    @property
    def data(self) -> "RemoteWeight":  # type: ignore[override]
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, RemoteWeight) or not self._may_share(value):
            own = self.handle.with_private(self._to_be_written("data=", value))  # views of what was there keep it
            value = RemoteWeight.whole(own, value.dtype, value.device)
        elif self.handle.keeps_dtype and value.dtype is not self.dtype:
            return  # as a packed parameter that stays as it is when a model is cast
        elif not value.is_whole and not value.handle.is_same_layer(self.handle) and value.handle.private is None:
            value.privatise("data=")  # a product with a view of another layer would round otherwise
        torch._C.TensorBase.data.__set__(self, value)  # type: ignore[attr-defined]
        self.handle, self.is_whole = value.handle, value.is_whole

    def _may_share(self, value: "RemoteWeight") -> bool:
        """Whether this tensor may lie where that one does, so that a write to either shows in both, as torch has it."""
        mine, theirs = self.handle, value.handle
        if theirs.is_same_layer(mine):
            return True
        if theirs.session is not mine.session or theirs.layer.kind != mine.layer.kind or value.shape != self.shape:
            return False
        return value.is_whole or mine.session.may_read

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return False

    @requires_grad.setter
    def requires_grad(self, flag: bool) -> None:
        self.requires_grad_(flag)

    def requires_grad_(self, flag: bool = True) -> "RemoteWeight":  # type: ignore[override]
        """Make the parameter trainable, which makes it the client's own. It stays the same object, which modules and optimizers
        know."""
        if flag and self.is_whole:  # nn.Parameter(W.t()), as PEFT writes it, asks too, and means nothing by it
            self._refuse_training()
            self._is_to_be_trained = True
            self._is_param = self._is_param
        elif not flag and self._is_a_parameter:
            self.handle.is_frozen = True
        return self

    @property
    def _is_param(self) -> bool:
        """The flag that `nn.Parameter` sets last, also on a tensor that it has just asked to require grad."""
        return self._is_a_parameter

    @_is_param.setter
    def _is_param(self, flag: bool) -> None:
        self._is_a_parameter = flag
        if flag and self._is_to_be_trained:
            if self.handle.private is None:  # which this parameter shares with whatever else is the same tensor
                self.privatise("requires_grad_")
            own = nn.Parameter(self.value())
            try:
                swap_tensors(self, own)
            except RuntimeError as error:  # something refers to the tensor below: a graph, or compiled code
                raise WeightWrite(
                    f"{self.handle.layer.name!r} cannot become the client's own any more: ask for gradients before it is used or "
                    f"compiled ({error})"
                ) from None

    def _refuse_training(self) -> None:
        handle = self.handle
        if handle.private is None and not handle.session.may_read:
            raise WeightWrite(
                f"the shared base weight {handle.layer.name!r} is frozen and cannot require grad (at {call_site()}). To train it, "
                f'keep the layer on the client, wrap(model, layers="!{handle.layer.name}"), or start the executor with '
                "--allow-read for a private copy"
            )

    def numpy(self, **how: Any) -> Any:
        """Return the values. What is not the client's own cannot be written to: the weight would not change with it."""
        array = self._read("numpy").numpy(**how)
        if self.handle.private is None:
            array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        return self._read("tolist").tolist()

    def __dlpack__(self, **how: Any) -> Any:
        return self.memory("__dlpack__").__dlpack__(**how)

    def data_ptr(self) -> int:
        """Return an address by which tied weights can be found. Nothing lies there."""
        handle, offset = self.handle, int(self.storage_offset()) * self.element_size()
        if handle.private is not None:
            return handle.private.data_ptr() + offset
        return NOWHERE + (handle.session.number << 52) + (handle.index << 38) + offset

    def untyped_storage(self) -> Any:
        """Return the storage of a private copy, else torch's own, which tells tensors apart and has no memory."""
        if self.handle.private is not None:
            return self.handle.private.untyped_storage()
        storage = super().untyped_storage()
        storage.__class__ = NoMemory
        return storage

    def storage(self) -> Any:
        """Return the storage of a private copy, or refuse. `safetensors` asks for it last, for each tensor that it saves."""
        if self.handle.private is not None:
            return self.handle.private.storage()
        raise WeightRead(
            f"the remote weight {self.handle.layer.name!r} has no memory here (at {call_site()}). To save it, call "
            "symbiosis.unwrap(model) first"
        )

    def _read(self, what: str) -> Tensor:
        """Return the values, for code that takes them past torch's operations."""
        if self.handle.private is None:
            _check_may_read(what, self)
        return self.value()

    def memory(self, what: str) -> Tensor:
        """Return the values in memory that this weight lies in from now on, because `what` shares memory: a private copy."""
        if self.handle.private is None:
            _check_may_read(what, self)
            self.privatise(what)
        return self.value()

    def share_memory_(self) -> "RemoteWeight":
        """Do nothing: other processes reach the executor as this one does."""
        if self.handle.private is not None:
            self.handle.private.share_memory_()
        return self

    def privatise(self, what: str) -> None:
        """Make this parameter, and all views of it, a private copy, because it is about to be written to."""
        handle = self.handle
        handle.private = self._to_be_written(what, handle.private).to(self.dtype)

    def _to_be_written(self, what: str, value: Tensor | None) -> Tensor:
        """Return what a private copy begins with: `value`, or the executor's values. Only where reads are allowed."""
        handle = self.handle
        if not handle.session.may_read:
            raise WeightWrite(
                f"{what} would write to the shared base weight {handle.layer.name!r} (at {call_site()}). Keep the layer "
                "on the client (wrap's layers=), leave out share=False where weights can be mapped, take them all back first (symbiosis.unwrap), "
                "or start the executor with --allow-read for a private copy"
            )
        if value is None:
            return RemoteWeight.whole(handle, self.dtype, self.device).value().clone()
        if isinstance(value, RemoteWeight) and value.handle.private is not None:
            value = value.value()  # the same memory, as torch would have it
        elif isinstance(value, RemoteWeight | RemoteSum):
            value = value.value().clone()
        if tuple(value.shape) != handle.layer.shape:
            raise WeightWrite(
                f"{what} would give {handle.layer.name!r} the shape {tuple(value.shape)} (at {call_site()})"
            )
        return value

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"RemoteWeight({self.handle.layer.name}, {tuple(self.shape)}, {self.dtype})"

    def __copy__(self) -> "RemoteWeight":
        """Return another tensor in the same memory, as torch does."""
        return _remade(self.handle, self.view_of(), self.dtype, self.device, self._is_param)

    def __deepcopy__(self, memo: dict[int, Any]) -> "RemoteWeight":
        if id(self) not in memo:
            handle = self.handle.copy(memo)
            memo[id(self)] = _remade(handle, self.view_of(), self.dtype, self.device, self._is_param)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        handle = self.handle
        parts = (
            handle.session,
            handle.index,
            handle.layer,
            handle.private,
            handle.bias,
            handle.is_frozen,
            handle.keeps_dtype,
        )
        return _unpickled, (*parts, self.view_of(), self.dtype, self.device, self._is_param)

    @classmethod
    @torch.compiler.disable  # what runs here are calls, and bookkeeping
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if is_composite(func):
            return func.decompose(*args, **kwargs)
        if is_view(func):
            return _view(func, args, kwargs)
        if func is aten._to_copy.default:
            return _cast(func, args, kwargs)
        if func in LIKE:
            return func(stand_in(args[0]), *args[1:], **kwargs)
        given = tree_leaves((args, kwargs))
        remote = [a for a in given if isinstance(a, RemoteWeight)]
        if any(weight.handle.private is not None for weight in remote):
            written = [one for one in written_by(func, args, kwargs) if _is_shared(one)]
            return _write(func, written, args, kwargs) if written else _on_values(func, args, kwargs)
        for answers in _answers(func, remote[0], given):
            if (answer := answers.get(func)) and (result := answer(*args, **kwargs)) is not NotImplemented:
                return result
        if written := [one for one in written_by(func, args, kwargs) if isinstance(one, RemoteWeight | RemoteSum)]:
            return _write(func, written, args, kwargs)
        _check_may_read(func, remote[0])
        return _on_values(func, args, kwargs)


def _is_shared(tensor: Any) -> bool:
    """Whether the executor has the values of this tensor."""
    return isinstance(tensor, RemoteWeight) and tensor.handle.private is None


def _answers(func: Any, weight: RemoteWeight, given: list[Any]) -> tuple[dict[Any, Any], ...]:
    """Where to look for what a call, or two terms, make of an operation. Where values are at hand, sums have one, and a matrix that lies
    by columns is multiplied as it lies: either rounds as unsplit."""
    if not weight.has_values:
        return PRODUCTS, SUMS
    matrices = (a for a in given if isinstance(a, Tensor) and not isinstance(a, RemoteView) and a.dim() == 2)
    by_columns = func is not aten.embedding.default and any(not matrix.is_contiguous() for matrix in matrices)
    return () if by_columns else (PRODUCTS,)


def _check_may_read(what: Any, weight: RemoteWeight) -> None:
    if not weight.handle.session.may_read:
        raise WeightRead(
            f"{what} reads the values of the remote weight {weight.handle.layer.name!r} (at {call_site()}). "
            "If only an initialisation reads them, call get_peft_model before wrap; else use a method that needs only "
            "the layer's output, keep the layer on the client (wrap's layers=), or start the executor with --allow-read"
        )


def _remade(handle: Handle, view: View, dtype: torch.dtype, device: torch.device, is_param: bool) -> RemoteWeight:
    weight = RemoteWeight(handle, *view, dtype, device)
    return nn.Parameter(weight, requires_grad=False) if is_param else weight  # type: ignore[return-value]


def _unpickled(
    session: Session,
    index: int,
    layer: Layer,
    private: Tensor | None,
    bias: Tensor | None,
    is_frozen: bool,
    keeps_dtype: bool,
    view: View,
    dtype: Any,
    device: Any,
    param: bool,
) -> RemoteWeight:
    return _remade(Handle(session, index, layer, private, bias, is_frozen, keeps_dtype), view, dtype, device, param)


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    weight = args[0]
    result = func(weight.meta(), *args[1:], **kwargs)
    if isinstance(result, list | tuple):
        return [weight.like_me(part) for part in result]
    return weight.like_me(result)


def _cast(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the executor's tensor in another dtype. What a cast rounds (`W.half().float()`) stays rounded, in a private copy."""
    weight, handle = args[0], args[0].handle
    dtype = kwargs.get("dtype") or weight.dtype
    if handle.private is None and weight.can_become(dtype):
        return weight.converted(dtype, kwargs.get("device"))
    if handle.private is None:
        _check_may_read(f"a cast to {dtype} of what was rounded to {weight.dtype}", weight)
    if not weight.is_whole:
        return _on_values(func, args, kwargs)
    own = handle.with_private(_on_values(func, args, kwargs))
    return RemoteWeight.whole(own, own.private.dtype, own.private.device)  # type: ignore[union-attr]


def _on_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on values. Mapped ones are not copied for torch's own operations. If what is made lies in the same memory, the
    weight becomes a private copy: a write to either must show in both."""
    lends = func.namespace == "aten" and torch.Tag.inplace_view not in func.tags
    lent = Lent[RemoteWeight]()

    def value(given: Any) -> Any:
        if not isinstance(given, RemoteWeight):
            return given
        if given.handle.private is not None:
            return given.value()
        return lent.add(given, given.values_to_read() if lends else given.value())

    made = func(*tree_map(value, args), **tree_map(value, kwargs))
    if not (shared := list(lent.shared_by(made))):
        return made
    for weight in shared:
        weight.memory(str(func))
    return _on_values(func, args, kwargs)


def _write(func: Any, written: list[Any], args: Any, kwargs: Any) -> Any:
    weight, source = written[0], args[1] if len(args) > 1 else None
    if func in COPIES and isinstance(source, RemoteWeight) and source.is_same_view(weight):
        return weight  # from itself, as parametrize and load_state_dict do
    if func is aten.detach_.default:
        return weight  # which has no graph
    if torch.Tag.inplace_view in func.tags:
        raise WeightWrite(
            f"{func} would change the shape or the memory of a remote weight in place (at {call_site()}): use what makes a view "
            "instead, `.t()` for `.t_()`"
        )
    for one in written:
        if isinstance(one, RemoteSum):
            one.refuse_write(func)
        one.privatise(str(func))
    _on_values(func, args, kwargs)
    return None if isinstance(args[0], list | tuple) else weight


def remote_weights(model: nn.Module) -> Iterator[RemoteWeight]:
    """Yield the remote weights of a wrapped model. A tied one comes as often as it is used."""
    for module in model.modules():
        for parameter in module._parameters.values():
            if isinstance(parameter, RemoteWeight):
                yield parameter


def close_sessions(model: nn.Module) -> None:
    """Leave the executors that hold a model's weights."""
    for session in {weight.handle.session for weight in remote_weights(model)}:
        session.close()


def is_remote_linear(layer: Any) -> bool:
    """Whether this is a linear layer whose weight is as the executor holds it, and its values are not at hand."""
    return is_linear_as_served(layer) and not layer.weight.has_values


def is_linear_as_served(layer: Any) -> bool:
    """Whether this is a linear layer whose weight is as the executor holds it."""
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, RemoteWeight) or weight.handle.private is not None:
        return False
    return weight.is_whole and weight.handle.layer.kind in ("linear", "conv1d")
