"""Weights that lie in parts on several GPUs, gathered into buffers of this one before products of many rows.

A few rows read a weight once, wherever it lies, so they read the other GPUs' parts in place. Many rows read it again and again. For them it is copied
into one of a few buffers by a stream of its own, and the next layers' weights while this one multiplies. No other rank takes part. A weight stays in its buffer
until the room is needed, so one gather serves all calls that come for that layer, forward and backward.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from symbiosis.executor.compute.products import Products
from symbiosis.executor.model.store import Store
from symbiosis.kernels.operand import cast, matrix_of
from symbiosis.kernels.product import product
from symbiosis.protocol import FLOATS, Call, Op, View
from symbiosis.transport.tensors import TORCH_DTYPE

MANY_ROWS = 257  # from so many on a weight is read more than once
ALIGNED = 512


class Buffer:
    """Room for one weight: which one it holds, when that is there, and what still reads it, by stream."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.weight = Tensor()
        self.ready = torch.cuda.Event()
        self.used: dict[int, torch.cuda.Event] = {}


class Gathers:
    """The buffers, by the number of the layer that each holds; the one that was used last comes last."""

    def __init__(
        self,
        weights: Sequence[Tensor],
        order: Sequence[int],
        nbytes: int,
        device: torch.device,
        cuts: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        """Take memory for the buffers.

        Args:
            order: The numbers of the layers as the model goes through them.
            nbytes: Of all buffers.
            cuts: By number, at which bytes another GPU's part of a weight begins. One copy across them would take five times as long.
        """
        self._weights, self._order, self._device, self._cuts = weights, order, device, cuts or {}
        self._place = {number: at for at, number in enumerate(order)}
        each = buffer_bytes(weights, order)
        self._free = [Buffer(each, device) for _ in range(nbytes // each)]
        self._count = len(self._free)
        self._held: OrderedDict[int, Buffer] = OrderedDict()
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self.made = 0  # gathers

    def takes(self, layers: Sequence[int]) -> bool:
        """Whether there is room for all of these weights and for the one behind them."""
        return len(layers) < self._count and all(layer in self._place for layer in layers)

    @contextmanager
    def of(self, layers: Sequence[int], backward: bool) -> Iterator[dict[int, Tensor]]:
        """Yield these layers' weights, gathered, for what is launched on the current stream in the block; and begin to gather those that come
        next."""
        buffers = {layer: self._gathered(layer, keep=layers) for layer in layers}
        current = torch.cuda.current_stream(self._device)
        for buffer in buffers.values():
            current.wait_event(buffer.ready)
        self._gather_ahead(layers, backward)
        try:
            yield {layer: buffer.weight for layer, buffer in buffers.items()}
        finally:
            for buffer in buffers.values():
                buffer.used.setdefault(current.cuda_stream, torch.cuda.Event()).record(current)

    def _gather_ahead(self, layers: Sequence[int], backward: bool) -> None:
        """Gather the weights behind these, as far as there is room; the one that comes next must not push out another that does."""
        step = -1 if backward else 1
        at = self._place[layers[0] if backward else layers[-1]] + step
        ahead = [
            self._order[at + step * n]
            for n in range(self._count - len(layers))
            if 0 <= at + step * n < len(self._order)
        ]
        for layer in ahead:
            self._gathered(layer, keep=(*layers, *ahead))

    def _gathered(self, layer: int, keep: Sequence[int]) -> Buffer:
        """Return the buffer that holds a weight, or begin to fill one whose weight is none of those to keep."""
        buffer = self._held.pop(layer, None)
        if buffer is None:
            if self._free:
                buffer = self._free.pop()
            else:
                buffer = self._held.pop(next(number for number in self._held if number not in keep))
            self._fill(buffer, self._weights[layer], self._cuts.get(layer, ()))
        self._held[layer] = buffer
        return buffer

    def _fill(self, buffer: Buffer, weight: Tensor, cuts: Sequence[int]) -> None:
        for event in buffer.used.values():
            self._stream.wait_event(event)
        buffer.used.clear()
        self._stream.wait_event(buffer.ready)  # of what was gathered there, and perhaps never used
        source, target = weight.view(-1).view(torch.uint8), buffer.memory[: weight.nbytes]
        buffer.weight = target.view(weight.dtype).view(weight.shape)
        with torch.cuda.stream(self._stream):
            for begin, end in pairwise((0, *cuts, weight.nbytes)):
                target[begin:end].copy_(source[begin:end], non_blocking=True)
            buffer.ready.record(self._stream)
        self.made += 1


def buffer_bytes(weights: Sequence[Tensor], order: Sequence[int]) -> int:
    """Return the bytes of one buffer: those of the largest weight."""
    return -(-max((weights[number].nbytes for number in order), default=1) // ALIGNED) * ALIGNED


class GatheringProducts(Products):
    """Products of many rows by gathered weights. What is captured as a graph reads parts in place, because a buffer holds something else when
    the graph runs again."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        assert store.on_gpus
        order = [number for number, layer in enumerate(store.manifest) if layer.kind in ("linear", "conv1d")]
        self.gathers = Gathers(store.weights, order, store.gather_bytes, store.device, store.on_gpus.cuts)

    def gathers_for(self, call: Call) -> bool:
        """Whether the weights for a call are gathered, so that it must not be captured."""
        floats = call.op in (Op.FORWARD, Op.DGRAD) and call.dtype in FLOATS
        return floats and call.rows >= MANY_ROWS and self.gathers.takes(call.layers)

    def multiply(
        self,
        call: Call,
        x: list[Tensor],
        out: list[Tensor] | None = None,
        forward: Callable[..., Tensor] = product,
        operand: Callable[..., Tensor] | None = None,
    ) -> list[Tensor]:
        """Make one product for each layer, by weights that are gathered if the rows are many."""
        if not self.gathers_for(call) or torch.cuda.is_current_stream_capturing():
            return super().multiply(call, x, out, forward, operand)
        with self.gathers.of(call.layers, backward=call.op is Op.DGRAD) as weights:

            def gathered(layer: int, op: Op, view: View | None, dtype: str) -> Tensor:
                matrix: Any = matrix_of(weights[layer], self.store.manifest[layer].transposes(op), view)
                return cast(matrix, TORCH_DTYPE[dtype])

            return super().multiply(call, x, out, forward, gathered)
