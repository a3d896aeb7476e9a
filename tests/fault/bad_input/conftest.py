"""An executor over a real socket, with an innocent client beside it: its results must stay right, bit for bit, whatever others send."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import symbiosis
from tests.conftest import tiny_llama
from tests.fault.bad_input.raw import LIMITS, MODEL
from tests.processes import Bystander


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., symbiosis.Executor]]:
    running: list[symbiosis.Executor] = []

    def run(scheme: str, **options: object) -> symbiosis.Executor:
        url = f"local://{tmp_path}/executor.sock" if scheme == "local" else "tcp://127.0.0.1:0"
        chosen = {"policy": "immediate", **LIMITS, **options}
        running.append(symbiosis.Executor(tiny_llama(), **{"listen": [url], **chosen}))
        return running[-1]

    yield run
    for executor in running:
        executor.close()


@pytest.fixture
def scheme() -> str:
    """The transport; tests say which."""
    raise NotImplementedError


@pytest.fixture
def executor(scheme: str, start: Callable) -> Iterator[symbiosis.Executor]:
    """An executor at an endpoint of the test's `scheme`, with an innocent client that must be unharmed at the end."""
    executor = start(scheme)
    with Bystander(executor.endpoint, MODEL) as innocent:
        yield executor
        innocent.goes_on()
