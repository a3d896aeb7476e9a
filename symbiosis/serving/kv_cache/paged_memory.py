"""The memory behind the pool: one tensor of equal pages, for keys and values and for the rows of adapters."""

import math
import mmap
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from symbiosis.errors import ConfigError
from symbiosis.serving.kv_cache.page_pool import PagePool
from symbiosis.serving.scheduler.scheduler_output import BLOCK


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one layer remembers of a token."""

    heads: int
    key: int
    value: int
    window: int | None = None  # how many tokens a row sees, itself included; None: all

    @property
    def key_elements(self) -> int:
        return self.heads * self.key

    @property
    def value_elements(self) -> int:
        return self.heads * self.value


def page_elements(layers: tuple[KvShape, ...]) -> int:
    """Return how many numbers a page has.

    >>> page_elements((KvShape(heads=2, key=8, value=8),))
    512
    """
    kinds = set(layers)
    unit = math.lcm(*(n for kind in kinds for n in (kind.key_elements, kind.value_elements)))
    return max(_up(_values_at(kind) + BLOCK * kind.value_elements, unit) for kind in kinds)


class PagedMemory:
    """A page holds the keys of 16 tokens of one layer, and then their values: one row of the same length for each token. So the whole
    memory is a table of such rows, and one number finds a token's row, whatever rows the layer has.

    >>> arena = PagedMemory((KvShape(heads=2, key=8, value=8),), memory=1 << 16)
    >>> arena.keys[0].shape, arena.key_rows(0, 1)
    (torch.Size([1024, 16]), 32)
    """

    def __init__(
        self,
        layers: tuple[KvShape, ...],
        memory: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layers = layers
        self.page_elements = page_elements(layers)
        pages = memory // (self.page_elements * dtype.itemsize)
        if pages < len(layers):
            least = len(layers) * self.page_elements * dtype.itemsize
            raise ConfigError(
                f"memory={memory} bytes do not hold the keys and values of {BLOCK} tokens, which take {least}: give the server more"
            )
        self.pool = PagePool(pages)
        self.flat = _zeros(pages * self.page_elements, dtype, torch.device(device))
        # for each layer, the whole memory as rows of its keys, and of its values
        self.keys = tuple(self.flat.view(-1, layer.key_elements) for layer in layers)
        self.values = tuple(self.flat.view(-1, layer.value_elements) for layer in layers)
        first, second = (
            [[of(layer, page) for layer in range(len(layers))] for of in (self.key_rows, self.value_rows)]
            for page in (0, 1)
        )
        self._first_rows = torch.tensor(first).unsqueeze(-1)  # [keys and values, layers, 1]
        self._rows_of_page = torch.tensor(second).unsqueeze(-1) - self._first_rows

    @property
    def page_bytes(self) -> int:
        return self.page_elements * self.flat.element_size()

    def key_rows(self, layer: int, page: int) -> int:
        """Return the row of a page's first key."""
        return page * (self.page_elements // self.layers[layer].key_elements)

    def value_rows(self, layer: int, page: int) -> int:
        of = self.layers[layer]
        return (page * self.page_elements + _values_at(of)) // of.value_elements

    def values_at(self, layer: int) -> int:
        """Return where in a page the values begin, in elements."""
        return _values_at(self.layers[layer])

    def rows(self, pages: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
        """Return which rows of the keys and of the values belong to tokens, [layers, tokens], given their pages, [layers, tokens], and
        their places in them."""
        keys, values = self._first_rows + pages.unsqueeze(0) * self._rows_of_page + inside
        return keys.to(self.flat.device), values.to(self.flat.device)


def _values_at(of: KvShape) -> int:
    """Return where in a page the values begin: at a multiple of their length."""
    return _up(BLOCK * of.key_elements, of.value_elements)


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _zeros(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros. On a CPU the system provides memory only when it is first written, so what is never used costs nothing."""
    if device.type != "cpu":
        return torch.zeros(elements, dtype=dtype, device=device)
    memory = mmap.mmap(-1, elements * dtype.itemsize)
    with suppress(AttributeError, OSError):  # large pages halve the time of attention, where the system has them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)
