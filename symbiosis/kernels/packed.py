"""Packed weights: how codes and scales stand for a matrix, and how it is made whole.

In every format a value is `float32(code) * scale`, rounded once to the dtype of the rows that it multiplies. So products are those of the whole
matrix, bit for bit, whoever makes it whole. A weight is whole a piece at a time: no second matrix is held in float32.

Shapes: R rows (all dimensions but the last), K columns, as the layer holds them.
"""

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from math import prod
from typing import Self

import torch
from torch import Tensor

from symbiosis.base.sizes import cells
from symbiosis.kernels import with_triton

PIECE = 1 << 20  # values that are float32 at a time, on a CPU
PIECE_ON_GPU = 1 << 26
ALL = slice(None)
CODES = (
    "codes",
)  # the part that is the same wherever a weight is packed: of packed scales a few differ from device to device
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
RUN = 32  # values of mxfp4 that have one exponent
Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight of some `shape`, as tensors (`parts`) and what their `format` says of them."""

    shape: Shape
    format: str
    source: str = field(
        default="", kw_only=True
    )  # the digest of the whole weight that it was packed of, if that is known

    @property
    def parts(self) -> dict[str, Tensor]:
        """The tensors that hold the weight, by name."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    @property
    def nbytes(self) -> int:
        """The bytes of all parts."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def device(self) -> torch.device:
        return next(iter(self.parts.values())).device

    def with_parts(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return this weight with each part changed: moved, or copied."""
        return replace(self, **{name: change(part) for name, part in self.parts.items()})  # type: ignore[arg-type]

    def whole(self, dtype: torch.dtype, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        """Return the matrix, or some rows and columns of it, as they lie in memory for those rows; a stack has the rows of its matrices one below
        the other.

        >>> weight = ScaledWeight((2, 2), "int8", torch.tensor([[1, 2], [3, 4]], dtype=torch.int8), torch.tensor([[0.5], [2.0]]), (1, 2))
        >>> weight.whole(torch.float32).tolist(), weight.whole(torch.float32, slice(1, 2), slice(1, 2)).tolist()
        ([[0.5, 1.0], [6.0, 8.0]], [[8.0]])
        """
        K = self.shape[-1]
        first, last, _ = rows.indices(prod(self.shape[:-1]))
        left, right, _ = columns.indices(K)
        whole = torch.empty(last - first, K, dtype=dtype, device=self.device)[:, left:right]
        if whole.is_cuda and _filled(self, whole, first, left):
            return whole
        step = max(1, (PIECE_ON_GPU if whole.is_cuda else PIECE) // max(1, K))
        for begin in range(first, last, step):
            end = min(last, begin + step)
            whole[begin - first : end - first] = self._values(begin, end, left, right)
        return whole

    def rows(self, dtype: torch.dtype, index: Tensor) -> Tensor:
        """Return rows of the matrix by their numbers."""
        if index.is_cuda:
            found = torch.empty(index.numel(), self.shape[-1], dtype=dtype, device=self.device)
            if _filled(self, found, numbers=index.reshape(-1)):
                return found.view(*index.shape, self.shape[-1])
        wanted, places = index.reshape(-1).unique(return_inverse=True)
        each = [self.whole(dtype, slice(row, row + 1)) for row in wanted.tolist()]
        none = torch.empty(0, self.shape[-1], dtype=dtype, device=self.device)
        return torch.cat([none, *each])[places].view(*index.shape, self.shape[-1])

    @abstractmethod
    def _values(self, first: int, last: int, left: int, right: int) -> Tensor:
        """Return some rows and columns in float32."""

    @property
    @abstractmethod
    def scales(self) -> Tensor:
        """The scales, which tell whether the weight is damaged."""

    def stacked(self, others: Sequence["PackedWeight"]) -> "PackedWeight":
        """Return a stack of this weight and others."""
        raise NotImplementedError(
            f"weights in the format {self.format} are not stacked: serve this model in another format"
        )

    def joined(self, others: Sequence["PackedWeight"]) -> "PackedWeight":
        """Return a weight with the outputs of this one, and below them those of others, in each matrix of a stack."""
        raise NotImplementedError(
            f"weights in the format {self.format} are not joined: serve this model in another format"
        )

    def digest(self, only: Sequence[str] = ()) -> str:
        """Return the SHA-256 of everything that makes the weight: format, shape, numbers, and the bytes of all parts; or `only` of its format, shape
        and these parts."""
        parts = {name: part for name, part in self.parts.items() if not only or name in only}
        numbers = [getattr(self, one.name) for one in fields(self) if one.name not in (*self.parts, "source")]
        sha = hashlib.sha256(repr(numbers[:2] if only else numbers).encode())
        for name, part in parts.items():
            sha.update(f"|{name}|{tuple(part.shape)}|{part.dtype}|".encode())
            sha.update(part.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)
        return sha.hexdigest()

    def problem(self) -> str | None:
        """Return what is wrong with the scales, if anything is."""
        scales = self.scales
        if not torch.isfinite(scales).all():
            return "some of its scales are NaN or infinite"
        if scales.numel() and not scales.any():
            return "all of its scales are 0"
        return None


@dataclass(frozen=True, eq=False)
class ScaledWeight(PackedWeight):
    """Codes of 8 bits, integers or floats, with a scale for each block of so many rows and columns."""

    codes: Tensor  # of the weight's shape
    scale: Tensor  # a row and a column for each block
    block: tuple[int, int]

    def __post_init__(self) -> None:
        if self.codes.element_size() != 1:
            raise ValueError(f"codes of {self.codes.dtype} are not of 8 bits")
        rows, columns = self.block
        wanted = (*self.shape[:-2], -(-self.shape[-2] // rows), -(-self.shape[-1] // columns))
        if tuple(self.codes.shape) != self.shape or tuple(self.scale.shape) != wanted:
            raise ValueError(
                f"codes of {tuple(self.codes.shape)} and scales of {tuple(self.scale.shape)} do not make a weight of {self.shape} in blocks "
                f"of {self.block}: scales of {wanted} would"
            )

    @property
    def scales(self) -> Tensor:
        return self.scale

    def _values(self, first: int, last: int, left: int, right: int) -> Tensor:
        values = self.codes.view(-1, self.shape[-1])[first:last, left:right].float()
        scale = self.scale.view(-1, self.scale.shape[-1])
        if self.block[0] == 1:
            scale = scale[first:last]
        else:
            rows, of_each = torch.arange(first, last, device=scale.device), self.shape[-2]
            scale = scale[rows // of_each * self.scale.shape[-2] + rows % of_each // self.block[0]]
        if scale.shape[-1] > 1:
            scale = scale[:, torch.arange(left, right, device=scale.device) // self.block[1]]
        return values.mul_(scale.float())

    def stacked(self, others: Sequence[PackedWeight]) -> "ScaledWeight":
        all_of = [self, *(one for one in others if isinstance(one, ScaledWeight))]
        shape = (len(all_of), *self.shape)
        codes, scale = (torch.stack([getattr(one, name) for one in all_of]) for name in ("codes", "scale"))
        return ScaledWeight(shape, self.format, codes, scale, self.block)

    def joined(self, others: Sequence[PackedWeight]) -> "ScaledWeight":
        all_of = [self, *(one for one in others if isinstance(one, ScaledWeight))]
        if any(one.shape[-2] % self.block[0] for one in all_of[:-1]):
            raise NotImplementedError(f"blocks of {self.block[0]} rows do not end where a weight of {self.shape} does")
        codes, scale = (torch.cat([getattr(one, name) for one in all_of], -2) for name in ("codes", "scale"))
        return ScaledWeight(tuple(codes.shape), self.format, codes, scale, self.block)


@dataclass(frozen=True, eq=False)
class TableWeight(PackedWeight):
    """Codes of 4 bits, two in a byte, the high ones first, that stand for the values of a table; each run of `blocksize` values has a scale.
    Runs go on from row to row. The scales may be packed themselves, by 256, as bitsandbytes does it."""

    codes: Tensor
    table: Tensor
    blocksize: int
    absmax: Tensor
    nested_absmax: Tensor | None = None
    nested_table: Tensor | None = None
    nested_blocksize: int = 256
    offset: float = 0.0

    def __post_init__(self) -> None:
        if (values := cells(self.shape)) is None:
            raise ValueError("its shape is no weight's")
        blocks = -(-values // self.blocksize)
        nested = -(-blocks // self.nested_blocksize)
        if self.codes.numel() != -(-values // 2) or self.absmax.numel() != blocks or len(self.table) != 16:
            raise ValueError(
                f"{self.codes.numel()} bytes with {self.absmax.numel()} scales do not make a weight of {self.shape} in runs of {self.blocksize}"
            )
        if self.nested_absmax is not None and self.nested_absmax.numel() != nested:
            raise ValueError(f"{blocks} packed scales need {nested} scales, and there are {self.nested_absmax.numel()}")

    @property
    def scales(self) -> Tensor:
        return self._absmax(0, self.absmax.numel())

    def _absmax(self, first: int, last: int) -> Tensor:
        """Return some scales in float32."""
        absmax = self.absmax.view(-1)[first:last]
        if self.nested_absmax is None or self.nested_table is None:
            return absmax.float()
        which = torch.arange(first, last, device=absmax.device) // self.nested_blocksize
        return self.nested_table[absmax.long()].mul_(self.nested_absmax[which]).add_(self.offset)

    def _values(self, first: int, last: int, left: int, right: int) -> Tensor:
        K = self.shape[-1]
        begin, end = first * K, last * K
        from_block = begin // self.blocksize
        pairs = _pairs(self.table)[self.codes.view(-1)[begin // 2 : -(-end // 2)].long()]
        values = pairs.view(-1)[begin % 2 :][: end - begin]
        absmax = self._absmax(from_block, -(-end // self.blocksize)).repeat_interleave(self.blocksize)
        values = values * absmax[begin - from_block * self.blocksize :][: end - begin]
        return values.view(-1, K)[:, left:right]


@dataclass(frozen=True, eq=False)
class GroupedWeight(PackedWeight):
    """Integers of 4 bits, two in a byte, the low ones first, less a zero point, with a scale for each group of a row's columns."""

    codes: Tensor  # (.., N, K / 2)
    scale: Tensor  # (.., N, groups)
    zero: Tensor  # the same, of bytes
    group: Tensor  # of each column

    def __post_init__(self) -> None:
        *stack, K = self.shape
        wanted = (*stack, -(-K // 2))
        if (
            tuple(self.codes.shape) != wanted
            or self.scale.shape != self.zero.shape
            or self.scale.shape[:-1] != (*stack,)
        ):
            raise ValueError(
                f"codes of {tuple(self.codes.shape)}, scales of {tuple(self.scale.shape)} and zeros of {tuple(self.zero.shape)} do not make a "
                f"weight of {self.shape}"
            )
        if (
            tuple(self.group.shape) != (K,)
            or int(self.group.max()) >= self.scale.shape[-1]
            or int(self.group.min()) < 0
        ):
            raise ValueError(f"{self.group.numel()} columns are said to be in groups, of which there are {self.scale.shape[-1]}, and {K} columns are there")  # fmt: skip

    @property
    def scales(self) -> Tensor:
        return self.scale

    def _values(self, first: int, last: int, left: int, right: int) -> Tensor:
        groups = self.scale.shape[-1]
        of_column = self.group[left:right].long()
        codes = self.codes.view(-1, self.codes.shape[-1])[first:last, left // 2 : -(-right // 2)]
        values = torch.stack([codes & 15, codes >> 4], -1).view(last - first, -1)[:, left % 2 :][:, : right - left]
        zero = self.zero.view(-1, groups)[first:last].float()[:, of_column]
        return values.float().sub_(zero).mul_(self.scale.view(-1, groups)[first:last].float()[:, of_column])

    def stacked(self, others: Sequence[PackedWeight]) -> "GroupedWeight":
        all_of = [self, *(one for one in others if isinstance(one, GroupedWeight))]
        if any(not torch.equal(one.group, self.group) for one in all_of):
            raise NotImplementedError("experts whose columns are in different orders are not stacked")
        codes, scale, zero = (
            torch.stack([getattr(one, name) for one in all_of]) for name in ("codes", "scale", "zero")
        )
        return GroupedWeight((len(all_of), *self.shape), self.format, codes, scale, zero, self.group)

    def joined(self, others: Sequence[PackedWeight]) -> "GroupedWeight":
        all_of = [self, *(one for one in others if isinstance(one, GroupedWeight))]
        if any(not torch.equal(one.group, self.group) for one in all_of):
            raise NotImplementedError("weights whose columns are in different orders are not joined")
        codes, scale, zero = (
            torch.cat([getattr(one, name) for one in all_of], -2) for name in ("codes", "scale", "zero")
        )
        return GroupedWeight((*codes.shape[:-1], self.shape[-1]), self.format, codes, scale, zero, self.group)


@dataclass(frozen=True, eq=False)
class MicroscaledWeight(PackedWeight):
    """Floats of 4 bits (mxfp4), two in a byte, the low ones first, with a power of 2 for each 32 of them. They lie by outputs, and the layer holds
    a stack of matrices by inputs."""

    codes: Tensor  # (E, N, K / 2), of a weight (E, K, N)
    exponents: Tensor  # (E, N, K / 32), less 127

    def __post_init__(self) -> None:
        E, K, N = self.shape
        if tuple(self.codes.shape) != (E, N, K // 2) or tuple(self.exponents.shape) != (E, N, K // RUN) or K % RUN:
            raise ValueError(
                f"codes of {tuple(self.codes.shape)} and exponents of {tuple(self.exponents.shape)} do not make a weight of {self.shape}"
            )

    @property
    def scales(self) -> Tensor:
        return _powers(self.exponents)

    def _values(self, first: int, last: int, left: int, right: int) -> Tensor:
        _, K, _ = self.shape
        found = torch.empty(last - first, right - left, device=self.device)
        for expert in range(first // K, -(-last // K)):
            begin, end = max(first, expert * K) - expert * K, min(last, expert * K + K) - expert * K
            pairs = self.codes[expert, left:right, begin // 2 : -(-end // 2)]
            codes = torch.stack([pairs & 15, pairs >> 4], -1).view(right - left, -1)[:, begin % 2 :][:, : end - begin]
            run = torch.arange(begin, end, device=self.device) // RUN
            values = (
                torch.tensor(FP4, device=self.device)[codes.long()]
                * _powers(self.exponents[expert, left:right])[:, run]
            )
            found[expert * K + begin - first : expert * K + end - first] = values.t()
        return found


def _filled(weight: PackedWeight, whole: Tensor, first: int = 0, left: int = 0, numbers: Tensor | None = None) -> bool:
    """Make a weight whole by a kernel of GPUs, if there is one."""
    kernels = with_triton("gpu.whole")
    return kernels is not None and bool(kernels.fill(weight, whole, first, left, numbers))


def _powers(exponents: Tensor) -> Tensor:
    """Return the powers of 2 of which these bytes are the exponents in float32, as they are in mxfp4 (255 is none)."""
    return (exponents.to(torch.int32) << 23).view(torch.float32)


def _pairs(table: Tensor) -> Tensor:
    """Return the two values of each byte."""
    byte = torch.arange(256, device=table.device)
    return torch.stack([table[byte >> 4], table[byte & 15]], 1)
