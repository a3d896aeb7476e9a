"""The bytes of a tensor, however it lies in memory."""

import pytest
import torch

from symbiosis.transport.tensors import bytes_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (0, 4)])
def test_an_expanded_number_has_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The gradient of a sum is one number with strides of 0, and torch calls it contiguous where it has one element."""
    assert bytes(bytes_of(torch.ones((), dtype=dtype).expand(shape))) == bytes(bytes_of(torch.ones(shape, dtype=dtype)))
