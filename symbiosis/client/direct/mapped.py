"""The served weights that a client has mapped, and the products it computes with them: the executor's own formulas, bit for bit.

Eager layers ask `weight_for_local_product` for their weight, and are ordinary linear layers then. Everything else (gradients of calls, products
with views, experts, lookups, norms, reads) arrives as a `Call`, and is answered here instead of being sent.
"""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _is_tracing, _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._autograd import _top_saved_tensors_default_hooks as hooks_on_saved
from torch.compiler import is_compiling

from symbiosis.client.direct.rule import DECODE_ROWS, should_send
from symbiosis.client.requests import are_tensors_seen, unshared, will_be_made_again
from symbiosis.errors import CallError, Code
from symbiosis.kernels import with_triton
from symbiosis.kernels.grouped import grouped
from symbiosis.kernels.operand import cast, matrix_of, norms, whole_part
from symbiosis.kernels.packed import PackedWeight
from symbiosis.kernels.product import product, sum_of_products
from symbiosis.protocol import FLOATS, Call, Layer, Op, Priority, View, outputs_of
from symbiosis.transport.base import Advice, Tokens
from symbiosis.transport.tensors import TORCH_DTYPE, Shapes, as_multiplied, check_values, cut

OF_ITS_ROWS = Code.TOO_LARGE, Code.NON_FINITE  # why a call is refused that somebody who multiplies himself may make

Payload = tuple[Tensor, ...]


class DirectFigures(NamedTuple):
    """What was multiplied by mapped weights."""

    calls: int = 0
    rows: int = 0
    multiplications: int = 0

    def since(self, before: "DirectFigures") -> "DirectFigures":
        return DirectFigures(
            self.calls - before.calls, self.rows - before.rows, self.multiplications - before.multiplications
        )


class Matrix(NamedTuple):
    """A mapped weight of two dimensions, with what every product asks of it."""

    weight: Tensor
    dtype: torch.dtype
    values: int
    width: int  # of the rows that it is multiplied by


class Mapped:
    """The mapped weights of one session. While the executor is away there is no `page` and no advice, so nothing is sent."""

    def __init__(
        self, manifest: list[Layer], priority: Priority | None, device: torch.device, reads_codes: bool = True
    ) -> None:
        """`reads_codes`: few rows are multiplied by packed weights as they lie there, where a GPU's kernel can."""
        self._manifest, self._priority, self.device = manifest, priority, device
        self._codes: Any = with_triton("gpu.packed_rows") if reads_codes and device.type == "cuda" else None
        self._by_codes: Any = None  # what multiplies so
        self._on_cpu = device.type == "cpu"
        self.weights: dict[int, Tensor] = {}  # those that are packed are without values, on the meta device
        self._packed: dict[int, PackedWeight] = {}
        self._matrices: dict[int, Matrix] = {}
        self.joins = 0
        self.fixed: Advice | None = None  # what holds for a step that is captured, whatever is advised meanwhile
        # whether advice made a difference, since somebody cleared these
        self.asked_for_tokens = self.asked_for_training = False
        self.tokens = Tokens.NONE  # what was made, since somebody cleared it
        self._nbytes = 0.0  # of a weight, on average
        self._page: Any = None
        self._biases = {layer.name: number for number, layer in enumerate(manifest) if layer.name.endswith(".bias")}
        self.calls = self.rows = self.multiplications = 0
        self._told = self._told_before = DirectFigures()  # to any executor, and to those before the one that is joined

    def join(self, weights: Mapping[int, Tensor | PackedWeight], page: Any) -> None:
        """Use the weights of the executor that this client has just joined."""
        self._packed = {number: weight for number, weight in weights.items() if isinstance(weight, PackedWeight)}
        if self._codes is not None:
            self._by_codes = self._codes.PackedProducts(
                {one: self._packed[one] for one in self._packed if self._is_linear(one)}
            )
        self.weights = {
            number: self._shown(number) if isinstance(weight, PackedWeight) else weight
            for number, weight in weights.items()
        }
        self._page = page
        self._matrices = {
            number: Matrix(weight, weight.dtype, weight.numel(), self._matrix(number, Op.FORWARD, None).shape[-2] or 1)
            for number, weight in self.weights.items()
            if weight.dim() == 2 and number not in self._packed
        }
        self.joins += 1
        matrices = [weight.nbytes for weight in self.weights.values() if weight.dim() > 1]
        self._nbytes = sum(matrices) / max(1, len(matrices))
        self._told_before = self._told

    def _shown(self, number: int) -> Tensor:
        """Return what a packed weight looks like when it is whole, without its values."""
        layer = self._manifest[number]
        return torch.empty(layer.shape, dtype=TORCH_DTYPE[layer.dtype], device="meta")

    def _is_linear(self, number: int) -> bool:
        return self._manifest[number].kind == "linear"

    @property
    def held(self) -> tuple[Mapping[int, Tensor], Mapping[int, PackedWeight]]:
        """The weights as they are mapped now: who launches kernels later that read them keeps these until then."""
        return self.weights, self._packed

    def take_over(self, before: "Mapped") -> "Mapped":
        """Count on from where another one's figures and joins are. Returns this one."""
        self.calls, self.rows, self.multiplications = before.figures
        self._told = self._told_before = before._told
        self.joins += before.joins
        return self

    def leave(self) -> None:
        """Note that the executor is away. The weights stay mapped."""
        self._page = None

    @property
    def suffices(self) -> bool:
        """Whether there are weights to multiply by."""
        return bool(self.weights)

    @property
    def figures(self) -> DirectFigures:
        return DirectFigures(self.calls, self.rows, self.multiplications)

    def report(self) -> None:
        """Tell the executor, while it is there, how much was multiplied that no other was told."""
        if (page := self._page) is not None:
            self._told = self.figures
            page.report(*self._told.since(self._told_before))

    def advice(self) -> Advice:
        """Return what the executor advises now. While it is away, that is to send nothing."""
        return Advice() if (page := self._page) is None else Advice(page.others, page.give_way)

    def made(self, tokens: Tokens) -> None:
        """Tell the executor what tokens this client makes."""
        self.tokens = max(self.tokens, tokens)
        if tokens and (page := self._page) is not None:
            page.made(tokens)

    def weight_for_local_product(self, number: int, dtype: torch.dtype, x: Tensor, training: bool) -> Tensor | None:
        """Return the weight to multiply `x` by, or None if the product should be sent. Counts the product, as the caller makes it now.

        An eager layer pays for each function, so the usual case, in which nothing is advised, calls none but `is_none`."""
        matrix = self._matrices.get(number)
        if matrix is None or matrix.dtype is not dtype or not (x.is_cpu if self._on_cpu else x.device == self.device):
            return None
        if is_compiling() or _is_tracing() or _len_torch_dispatch_stack():  # `is_watched`
            return None
        if _len_torch_function_stack() and are_tensors_seen():
            return None
        recorded = torch.is_grad_enabled()
        if recorded and hooks_on_saved(False):  # then this layer saves nothing, whichever way its product goes
            return None
        rows, page, training = x.numel() // matrix.width, self._page, training and recorded
        usual = (training or rows > DECODE_ROWS) and self.fixed is None and self._priority is None
        if not (usual and (page is None or page.is_none)) and self._should_send(rows, training):
            return None
        if recorded and x.requires_grad:  # the gradient's product, too
            self.calls += 1
            rows *= 2
        self.calls += 1
        self.rows += rows
        self.multiplications += rows * matrix.values
        return matrix.weight

    def multiplies(self, number: int, dtype: torch.dtype, rows: int) -> bool:
        """Whether a product of so many rows, in a step that is captured and records no gradients, is computed here."""
        weight, advice, training = self.weights.get(number), self.fixed, self._priority is Priority.TRAIN
        if advice is None or weight is None or weight.dim() != 2 or weight.dtype is not dtype:
            return False
        if self._is_made_whole_there(number, training) or (self._on_cpu and number in self._packed):
            return False
        return not should_send(rows, self._nbytes, training, advice.others, advice.give_way)

    def _has(self, x: Tensor) -> bool:
        """Whether the rows lie where the weights do."""
        return x.is_cpu if self._on_cpu else x.device == self.device

    def weights_for_local_products(
        self, wanted: dict[str, tuple[int, torch.dtype]], x: Tensor, routed: int, training: bool
    ) -> dict[str, Tensor]:
        """Return the stacks of matrices that a module multiplies rows by, or none if its products should be sent. Counts the products, as the
        caller makes them now.

        Args:
            wanted: Numbers and dtypes of the stacks, by whatever name.
            x: The rows that the module was given.
            routed: How many rows it multiplies, if it multiplies some of them more than once.
        """
        if not self._has(x):
            return {}
        rows, recorded = max(routed, x.numel() // max(1, x.size(-1))), torch.is_grad_enabled()
        found = {
            name: weight
            for name, (number, dtype) in wanted.items()
            if (weight := self.weights.get(number)) is not None and weight.dtype is dtype and not weight.is_meta
        }
        if len(found) < len(wanted):
            return {}
        if self._should_send(rows, training and recorded) and not (recorded and hooks_on_saved(False)):
            return {}
        products = 2 if recorded and x.requires_grad and not will_be_made_again() else 1
        for weight in found.values():
            self.count(products, products * rows, products * rows * prod(weight.shape[-2:]))
        return found

    def _should_send(self, rows: int, training: bool) -> bool:
        if self._priority is not None:
            training = self._priority is Priority.TRAIN
        page = self._page
        if training:
            self.asked_for_training = True
        elif rows <= DECODE_ROWS:
            self.asked_for_tokens = True
            self.tokens = Tokens.FEW  # `made`, which would cost a call
            if page is not None:
                page.made(Tokens.FEW)
        elif self._priority is Priority.DECODE:
            self.made(Tokens.MANY)
        advice = self.fixed or page
        if advice is None or advice.is_none:
            return False
        return should_send(rows, self._nbytes, training, advice.others, advice.give_way)

    def count(self, calls: int, rows: int, multiplications: int) -> None:
        """Book what was multiplied by mapped weights."""
        self.calls += calls
        self.rows += rows
        self.multiplications += multiplications

    def knows(self, call: Call) -> bool:
        """Whether this call can be answered from the mapped weights."""
        if call.op not in ANSWERS and (call.op not in (Op.FORWARD, Op.DGRAD) or call.dtype not in FLOATS):
            return False
        return all(layer in self.weights for layer in call.layers)

    def takes(self, call: Call) -> bool:
        """Whether this call should be answered here rather than sent. Tells the executor of tokens that are decoded."""
        if not self.knows(call):
            return False
        if not call.op.traits.multiplies:
            return True
        training = (self._priority or call.priority) is Priority.TRAIN
        if self._page is not None and self._is_made_whole_there(call.layer, training):
            return False
        return not self._should_send(call.rows, training)

    def _is_made_whole_there(self, number: int, training: bool) -> bool:
        """Whether a GPU's packed weight is made whole by the executor, once for the rows of all, rather than by each client for itself. Rows of which
        no gradients are wanted do not go there for that."""
        return not self._on_cpu and number in self._packed and (training or not self._is_linear(number))

    def answer(self, call: Call, payload: Payload, shapes: Shapes) -> list[Tensor]:
        """Answer a call as the executor would."""
        if payload:
            payload = (payload[0].reshape(call.payload_shape).contiguous(), *payload[1:])
            if self._on_cpu:  # the values of a GPU's tensors are not looked at
                check_values(call, payload, self._manifest[call.layer])
        if call.op.traits.multiplies:
            for layer in call.layers:
                *_, M, N = self._matrix(layer, call.op, call.view).shape
                self.count(1, call.rows, M * payload[0].numel() if call.op is Op.LEFT else call.rows * M * N)
        if (answer := ANSWERS.get(call.op)) is not None:
            results = [answer(self, call, payload)]
        elif call.op is Op.DGRAD:
            results = [self._gradient(call, payload[0])]
        else:
            results = self._products(call, payload[0])
        return [unshared(y, shape) for y, shape in zip(results, shapes, strict=True)] if shapes else results

    def _products(self, call: Call, x_TK: Tensor) -> list[Tensor]:
        """Return the product of each layer of a group."""
        dtype = TORCH_DTYPE[call.dtype]

        def biases() -> list[Tensor]:
            return [self._bias(layer).to(dtype) for layer in call.layers]

        wanted = biases if call.bias else None
        if self._by_codes is not None and (few := self._by_codes.by(call.layers, len(x_TK), wanted, dtype)):
            made: list[Tensor] = few.multiply(x_TK, [None] * len(call.layers))
            return made
        matrices = (self._operand(layer, call.op, None, dtype) for layer in call.layers)  # one after another
        each = wanted() if wanted else [None] * len(call.layers)
        return [product(x_TK, matrix, bias) for matrix, bias in zip(matrices, each, strict=True)]

    def _gradient(self, call: Call, dys: Tensor) -> Tensor:
        """Return the gradient of the rows that a layer was given, or a group."""
        dtype = TORCH_DTYPE[call.dtype]
        matrices = [self._operand(layer, call.op, None, dtype) for layer in call.layers]
        each = cut(dys, tuple((call.shape[0], len(matrix)) for matrix in matrices) if call.also else ())
        return sum_of_products(list(zip(each, matrices, strict=True)))

    def _matrix(self, layer: int, op: Op, view: View | None) -> Tensor:
        return matrix_of(self.weights[layer], self._manifest[layer].transposes(op), view)

    def _operand(self, layer: int, op: Op, view: View | None, dtype: torch.dtype) -> Tensor:
        """Return the matrix that `op` multiplies rows of this dtype by: one that is packed is made whole for it."""
        matrix, packed = self._matrix(layer, op, view), self._packed.get(layer)
        return cast(matrix, dtype) if packed is None else whole_part(packed, matrix, self.weights[layer], dtype)

    def _operand_of(self, call: Call) -> Tensor:
        return self._operand(call.layer, call.op, call.view, TORCH_DTYPE[call.dtype])

    def _whole(self, layer: int) -> Tensor:
        weight, packed = self.weights[layer], self._packed.get(layer)
        return weight if packed is None else packed.whole(weight.dtype).view(weight.shape)

    def _lookup(self, call: Call, payload: Payload) -> Tensor:
        weight, packed = self.weights[call.layer], self._packed.get(call.layer)
        rows = weight[payload[0]] if packed is None else packed.rows(weight.dtype, payload[0])
        return rows.to(TORCH_DTYPE[call.dtype])

    def _norms(self, call: Call, _: Payload) -> Tensor:
        return norms(self._whole(call.layer), self._manifest[call.layer].kind, TORCH_DTYPE[call.dtype])

    def _read(self, call: Call, _: Payload) -> Tensor:
        if call.layer in self._packed:
            return self._operand_of(call)
        return self._matrix(call.layer, call.op, call.view).to(TORCH_DTYPE[call.dtype], copy=True)

    def _bias(self, layer: int) -> Tensor:
        return self.weights[self._biases[f"{self._manifest[layer].name}.bias"]]

    def _product(self, call: Call, payload: Payload) -> Tensor:
        outputs = outputs_of(self._manifest[call.layer], call.view) if call.bias and call.view else None
        bias = None if outputs is None else self._bias(call.layer)[outputs].to(TORCH_DTYPE[call.dtype])
        return product(as_multiplied(call, payload[0]), self._operand_of(call), bias)

    def _left(self, call: Call, payload: Payload) -> Tensor:
        return torch.matmul(self._operand_of(call), as_multiplied(call, payload[0]))

    def _grouped(self, call: Call, payload: Payload) -> Tensor:
        return grouped(payload[0], self._operand_of(call), payload[1])


def answered_despite(
    error: CallError, mapped: Mapped | None, call: Call, payload: Payload, shapes: Shapes = ()
) -> list[Tensor]:
    """Answer a call that the executor refused for its rows by mapped weights, as if nobody else were there: then it is not even sent.
    Raises the error if there are none."""
    if error.code not in OF_ITS_ROWS or mapped is None or not mapped.knows(call):
        raise error
    if payload and payload[0].device != mapped.device:
        raise error
    return mapped.answer(call, payload, shapes)


ANSWERS: dict[Op, Callable[[Mapped, Call, Payload], Tensor]] = {
    Op.PRODUCT: Mapped._product,
    Op.LEFT: Mapped._left,
    Op.GROUPED: Mapped._grouped,
    Op.LOOKUP: Mapped._lookup,
    Op.NORMS: Mapped._norms,
    Op.READ: Mapped._read,
}
