"""Adapters that a program has published lie in memory of their own on the device, in the dtype in which they are trained, and not in pages:
one copy of the trainer's parameters is all that a version costs."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from symbiosis.errors import AdapterError
from symbiosis.kernels.adapter_rows import MatrixPiece, PlacedAdapter
from symbiosis.serving.lora.adapter_cache import NAMES, RowRun
from symbiosis.serving.lora.adapter_kinds import Part

NOT_FINITE = "it has numbers that are infinite or not numbers: its training has diverged"


def held_dtype(trained: torch.dtype, base: torch.dtype) -> torch.dtype:
    """Return in which dtype an adapter is held: that in which it is trained, if rows can be multiplied by it.

    >>> held_dtype(torch.float32, torch.bfloat16), held_dtype(torch.bfloat16, torch.bfloat16)
    (torch.float32, torch.bfloat16)
    """
    return base if trained == base or base.itemsize >= torch.float32.itemsize else torch.float32


def scales_of(parts: Mapping[str, Part], scales: Mapping[str, float]) -> list[float]:
    """Return by what each matrix is multiplied: only `up` is."""
    return [scales.get(name, 1.0) if t is part.up else 1.0 for name, part in parts.items() for t in part.tensors]


def hold(
    parts: Mapping[str, Part], scales: Mapping[str, float], dtype: torch.dtype, device: torch.device
) -> dict[str, Part]:
    """Return a copy of an adapter's matrices, in one piece of memory. Raises `AdapterError` if they are not finite."""
    matrices = [matrix for part in parts.values() for matrix in part.tensors]
    flat = torch.empty(sum(map(Tensor.numel, matrices)), dtype=dtype, device=device)
    runs, at = [], 0
    for number, matrix in enumerate(matrices):
        runs.append(RowRun(number, 0, len(matrix), 0, matrix.shape[1], 0, at))
        at += matrix.numel()
    copy_pieces(flat, runs, matrices, scales_of(parts, scales), at)
    check_held(flat)
    values = iter(flat[run.offset : run.offset + run.rows * run.width].view(run.rows, run.width) for run in runs)
    return {
        layer: Part(**{name: next(values) for name in NAMES if getattr(part, name) is not None})
        for layer, part in parts.items()
    }


def placed_whole(parts: Mapping[str, Part]) -> dict[str, PlacedAdapter]:
    """Return where parts lie that are used where they are."""
    placed = {}
    for layer, part in parts.items():
        words = {name: (MatrixPiece(0, 0, t),) for name in NAMES if (t := getattr(part, name)) is not None}
        placed[layer] = PlacedAdapter(rank=0 if part.down is None else len(part.down), **words)
    return placed


def copy_pieces(
    flat: Tensor, runs: Sequence[RowRun], matrices: Sequence[Tensor], scales: Sequence[float], page: int
) -> None:
    """Copy pieces of matrices to their places in pages of so many elements, scaled."""
    for run in runs:
        begin = run.page * page + run.offset
        to = flat[begin : begin + run.rows * run.width].view(run.rows, run.width)
        to.copy_(matrices[run.matrix][run.row : run.row + run.rows, run.column : run.column + run.width])
        if scales[run.matrix] != 1.0:
            to.mul_(scales[run.matrix])


def check_held(values: Tensor) -> None:
    if not bool(torch.stack(torch.aminmax(values)).isfinite().all()):
        raise AdapterError(NOT_FINITE)
