"""Fixtures of the tests whose executor runs in their own process. Torch is imported where it is used, as in `tests/conftest.py`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import symbiosis

if TYPE_CHECKING:
    from torch import nn

    from tests.realm import Realm


@pytest.fixture
def split(llama: nn.Module, serve: Callable) -> nn.Module:
    return symbiosis.wrap(copy.deepcopy(llama), serve(llama).endpoint)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Realm]]:
    """Starts a realm with the options given; it ends with the test."""
    from tests.realm import Realm

    realms: list[Realm] = []

    def run(**options: object) -> Realm:
        realms.append(Realm(tmp_path, **options))  # type: ignore[arg-type]
        return realms[-1]

    yield run
    for realm in realms:
        realm.executor.close()
