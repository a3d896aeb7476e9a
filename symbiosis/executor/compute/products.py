"""The products of a call: its rows by the matrix of each layer.

Shapes: T rows, K what goes in, N what comes out.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from typing import TYPE_CHECKING

from torch import Tensor

from symbiosis.executor.calls.cells import cells, part_of
from symbiosis.executor.model.store import Store
from symbiosis.kernels.integers import digits, modular_product, product_of_digits
from symbiosis.kernels.product import product, sum_of_products
from symbiosis.protocol import WEIGHT_BITS, Call, Op
from symbiosis.transport.tensors import TORCH_DTYPE

if TYPE_CHECKING:
    from symbiosis.kernels.gpu.packed_rows import PackedProducts, PackedRows

ALIGNED = 64  # bytes
ONE_PRODUCT = (Op.FORWARD, Op.PRODUCT)  # ops whose reply holds each layer's product; those of DGRAD are added


class Products:
    """Multiplies by the weights of a store, on the device where they lie."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.device = store.device
        self._by_codes: PackedProducts | None = None  # multiplies few rows by packed weights as they lie there

    def read_codes(self) -> None:
        """From now on, multiply few rows by packed weights on a GPU as they lie there. Sums round in their own way."""
        from symbiosis.kernels.gpu.packed_rows import PackedProducts, load

        load((packed, self.store.weights[number].dtype) for number, packed in self.store.packed.items())
        manifest, packed = self.store.manifest, self.store.packed
        self._by_codes = PackedProducts({one: packed[one] for one in packed if manifest[one].kind == "linear"})

    def multiply(
        self,
        call: Call,
        x: list[Tensor],
        out: list[Tensor] | None = None,
        forward: Callable[..., Tensor] = product,
        operand: Callable[..., Tensor] | None = None,
    ) -> list[Tensor]:
        """Make one product for each layer, so that each rounds as it would alone. Gradients are added, the last layer's first.
        `forward` multiplies the rows of several calls, which need not round as each would alone. `operand` returns the matrices; default:
        the store's."""
        if operand is None and (by_codes := self._codes_for(call, x)):
            return by_codes.multiply(x[0], out or [None] * len(call.layers))
        operand = operand or self.store.operand
        matrices = [operand(layer, call.op, call.view, call.dtype) for layer in call.layers]
        multiply: Callable[..., Tensor] = product
        if call.dtype in WEIGHT_BITS:  # only FORWARD and DGRAD take integers
            multiply = forward = modular_product
        if call.op in ONE_PRODUCT:
            biases = self.store.biases_of(call) if call.bias else [None] * len(matrices)  # as most calls want it
            outs: Sequence[Tensor | None] = out or [None] * len(matrices)
            return [forward(x[0], *parts) for parts in zip(matrices, biases, outs, strict=True)]
        if call.op is not Op.DGRAD:
            raise _unwritten(call)
        return [sum_of_products(list(zip(x, matrices, strict=True)), out[0] if out else None, multiply)]

    def _codes_for(self, call: Call, x: list[Tensor]) -> "PackedRows | None":
        """Return what multiplies by the codes of packed weights, or None if they are made whole for this call."""
        if self._by_codes is None or call.op is not Op.FORWARD or call.view:
            return None
        biases = partial(self.store.biases_of, call) if call.bias else None
        return self._by_codes.by(call.layers, len(x[0]), biases, TORCH_DTYPE[call.dtype])

    def prepared(self, call: Call, x: list[Tensor]) -> list[Tensor]:
        """Return the rows as `panels` takes them, so that all panels share what is done with the rows alone."""
        return [digits(part) for part in x] if call.dtype in WEIGHT_BITS else x

    def panels(
        self, call: Call, x: list[Tensor], side: slice, step: int, forward: Callable[..., Tensor] = product
    ) -> Iterator[tuple[int, slice, Tensor]]:
        """Compute some columns of a call's results (`side`, in cells of `step` columns) from prepared rows. Yield the number of each result
        that has any, which columns they are, and their values. `forward` is as for `multiply`."""
        widths = [self.store.matrix(layer, call.op, call.view).shape[-1] for layer in call.layers]
        multiply: Callable[..., Tensor] = product
        if call.dtype in WEIGHT_BITS:
            multiply = forward = product_of_digits
        if call.op is Op.DGRAD:
            columns = part_of(side, widths[0], step)
            members = list(zip(x, call.layers, strict=True))
            parts = (multiply(dy, self._panel(call, layer, columns), None) for dy, layer in reversed(members))
            yield 0, columns, reduce(Tensor.add_, parts)
            return
        if call.op not in ONE_PRODUCT:
            raise _unwritten(call)
        begun = 0
        for number, (layer, width, bias) in enumerate(
            zip(call.layers, widths, self.store.biases_of(call), strict=True)
        ):
            count = cells(width, step)
            mine = slice(max(side.start - begun, 0), min(side.stop - begun, count))
            if mine.start < mine.stop:
                columns = part_of(mine, width, step)
                own = None if bias is None else bias[columns]
                yield number, columns, forward(x[0], self._panel(call, layer, columns), own, of=width)
            begun += count

    def gathers_for(self, call: Call) -> bool:
        """Whether weights are brought here for a call, so that it must not be captured as a graph."""
        return False

    def here(self, tensor: Tensor) -> Tensor:
        """Return a payload on this device, aligned as torch's own memory is, because products must not depend on the transport. The
        copy is not waited for: the payload stays there until the call is answered."""
        here = tensor.to(self.device, non_blocking=True)
        return here.clone() if here.untyped_storage().data_ptr() % ALIGNED else here

    def _panel(self, call: Call, layer: int, columns: slice) -> Tensor:
        return self.store.operand(layer, call.op, call.view, call.dtype, (..., columns))


def _unwritten(call: Call) -> NotImplementedError:
    return NotImplementedError(f"{call.op.name} goes by rows: say in symbiosis/executor/compute/products.py how")
