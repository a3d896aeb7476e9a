"""The kernel that multiplies integers, against its reference, in Triton's interpreter: any CPU will do. For GPUs see test_gpu.py."""

import itertools
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from symbiosis.kernels.integers import product_by_parts

SHAPES = [(1, 64, 64), (3, 7, 5), (2, 1, 1), (33, 150, 70)]


def cases() -> list[tuple[Tensor, Tensor]]:
    """Rows and weights of every kind, these as they lie for forward and for backward."""
    random = torch.Generator().manual_seed(0)
    found = []
    for (rows, inputs, outputs), dtype, digits in itertools.product(SHAPES, (torch.int32, torch.int64), (1, 2)):
        x = torch.randint(0, 256, (rows, inputs * dtype.itemsize), dtype=torch.uint8, generator=random).view(dtype)
        w = torch.randint(-128, 128, (digits, inputs, outputs), dtype=torch.int8, generator=random)
        found += [(x, w), (x, w.transpose(1, 2).contiguous().transpose(1, 2))]
    for dtype, value in itertools.product((torch.int32, torch.int64), (127, -127, -128)):
        lowest = torch.full((2, 200 * dtype.itemsize), -128, dtype=torch.int8).view(dtype)
        found.append((lowest, torch.full((2, 200, 8), value, dtype=torch.int8)))
    return found


def test_products_are_those_of_the_reference() -> None:
    """The interpreter is chosen when Triton is loaded, so it has a process of its own."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-W", "ignore", __file__], env=environment, check=True)


def _compare() -> None:
    _let_numbers_be_indices()
    from symbiosis.kernels.gpu.integer_products import CHOICES, BlockSizes, fused_product

    ways: list[BlockSizes | None] = [None, BlockSizes(64, 64, 128, 4, 2, 8, True, "never")]
    ways += [
        BlockSizes(128, 64, 64, 4, 2, programs, inside, turn)
        for programs, inside, turn in ((1, True, "inside"), (8, False, "inside"), (8, False, "before"))
    ]
    for (x, w), blocks in itertools.product(cases(), ways):
        expected = product_by_parts(x, w)
        assert torch.equal(fused_product(x, w, None, blocks), expected), (x.shape, x.dtype, w.shape, blocks)
        with_gaps = x.new_full((len(x), w.shape[2] + 3), 77)
        fused_product(x.t().contiguous().t(), w, with_gaps[:, :-3], blocks)
        assert torch.equal(with_gaps[:, :-3], expected) and bool((with_gaps[:, -3:] == 77).all())
    assert all(blocks.M % (8 * places) == 0 for places, chosen in CHOICES.items() for _, blocks in chosen)


def _let_numbers_be_indices() -> None:
    """Triton 3.6's interpreter makes integers of numpy's arrays of one element, which numpy 2.4 refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):  # type: ignore[no-untyped-def]
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


if __name__ == "__main__":
    _compare()
