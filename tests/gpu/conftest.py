"""What tests of captured steps need of those before them."""

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def nobody_else() -> None:
    """Sessions of earlier tests end now: captured steps begin anew whenever one goes, or joins again."""
    gc.collect()


@pytest.fixture(autouse=True)
def random_numbers_can_be_drawn() -> Iterator[None]:
    """A capture that fails leaves torch unable to draw any outside of graphs, unless that is mended."""
    yield
    if torch.cuda.is_initialized():
        torch.rand(1, device="cuda")
