"""The processes of tests on a GPU, and what tests of captured steps need of those before them. Torch is imported where it is used,
as in `tests/conftest.py`."""

import atexit
import gc
import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest


def run_in(environment: dict[str, str], function: Callable, *args: Any, **words: Any) -> None:
    import torch

    assert not torch.cuda._is_in_bad_fork(), "who imports everything must not use CUDA"
    os.environ.clear()
    os.environ.update(environment)  # that of the test, for example where MPS listens
    # torch makes its threads anew after a fork, when it is first asked; two threads of autograd may ask at the same time
    torch.set_num_threads(1)
    function(*args, **words)
    atexit._run_exitfuncs()  # which a process of multiprocessing skips: sessions leave


class Processes:
    """Children that are killed at the end. They are forked from a process that has imported everything and has never used CUDA."""

    def __init__(self) -> None:
        from tests.processes import context

        self.context = context
        self.started: list[Any] = []

    def start(self, function: Callable, where: str, *args: Any, **words: Any) -> tuple[Any, Any]:
        queue = self.context.Queue()
        # raises here, and not in a child that nobody watches
        inspect.signature(function).bind(where, queue, *args, **words)
        given = (dict(os.environ), function, where, queue, *args)
        process = self.context.Process(target=run_in, args=given, kwargs=words, daemon=True)
        process.start()
        self.started.append(process)
        return process, queue

    def end(self) -> None:
        for process in self.started:
            if process.is_alive():
                process.kill()
            process.join(10)


@pytest.fixture
def processes() -> Iterator[Processes]:
    started = Processes()
    yield started
    started.end()


@pytest.fixture
def nobody_else() -> None:
    """Sessions of earlier tests end now: captured steps begin anew whenever one goes, or joins again."""
    gc.collect()


@pytest.fixture(autouse=True)
def random_numbers_can_be_drawn() -> Iterator[None]:
    """A capture that fails leaves torch unable to draw any outside of graphs, unless that is mended."""
    import torch

    yield
    if torch.cuda.is_initialized():
        torch.rand(1, device="cuda")
