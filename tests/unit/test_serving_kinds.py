"""What is read off an adapter's weights."""

import pytest
import torch

from symbiosis.serving.lora.adapter_kinds import _scaled


@pytest.mark.parametrize("scaling", [2.0, 0.25, -1.0, 1e6, 1.5, 0.0, 2.0**-20, 2.0**20])
@pytest.mark.parametrize("own", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scaling_rounds_once(own: torch.dtype, dtype: torch.dtype, scaling: float) -> None:
    """Whether or not it is done in float32: also where numbers become infinite, or too small for all their digits."""
    # some seeds make a number of float8 infinite, and 0 times that is not equal to itself
    generator = torch.Generator().manual_seed(1)
    exponents = torch.randint(-24, 15, (64, 8), generator=generator)
    numbers = (torch.randn(64, 8, generator=generator) * 2.0**exponents).to(own)
    assert torch.equal(_scaled(numbers, scaling, dtype).to(dtype), (numbers.float() * scaling).to(dtype))
