"""What tests of captured steps need of those before them."""

import gc

import pytest


@pytest.fixture
def nobody_else() -> None:
    """Sessions of earlier tests end now: captured steps begin anew whenever one goes, or joins again."""
    gc.collect()
