"""Fixtures of the tests whose executor runs in their own process."""

import copy
from collections.abc import Callable

import pytest
from torch import nn

import symbiosis
from tests.realm import start  # noqa: F401


@pytest.fixture
def split(llama: nn.Module, serve: Callable) -> nn.Module:
    return symbiosis.wrap(copy.deepcopy(llama), serve(llama).endpoint)
