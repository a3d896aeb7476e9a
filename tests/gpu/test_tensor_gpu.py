"""An engine over two GPUs, or with two ranks on one: the answers of one process, captured steps, and a rank that dies."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import symbiosis
from symbiosis.executor.model.checkpoint import DEMO_MODEL
from symbiosis.serving import Engine
from symbiosis.serving.tensor_parallel.leading_runner import LeadingRunner

pytestmark = pytest.mark.timeout(200)
TWO = [pytest.mark.multi_gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]
ONE = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device")]
PLACES = [
    pytest.param((("cuda:0", "cuda:1"), False), marks=TWO, id="two-eager"),
    pytest.param((("cuda:0", "cuda:1"), True), marks=TWO, id="two-compiled"),
    pytest.param((("cuda:0", "cuda:0"), False), marks=ONE, id="one-eager"),
]
PROMPT = list(b"def average(numbers):")


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("tensor") / "executor.sock"
    with symbiosis.Executor("demo", listen=(f"local://{path}",)) as executor:
        yield executor.endpoint


@pytest.fixture(scope="module", params=PLACES)
def engine(endpoint: str, request: pytest.FixtureRequest) -> Iterator[Engine]:
    devices, compiles = request.param
    with Engine(
        endpoint, adapters=DEMO_MODEL / "adapters", memory=1 << 25, devices=devices, compiles=compiles
    ) as engine:
        yield engine


def answers(engine: Engine) -> list[tuple[int, ...]]:
    how: dict[str, Any] = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    return [engine.generate(PROMPT, adapter=adapter, **how).tokens for adapter in (None, "python", "shout", "whisper")]


def test_the_answers_are_those_of_a_cpu(engine: Engine, endpoint: str) -> None:
    with Engine(endpoint, adapters=DEMO_MODEL / "adapters", memory=1 << 25) as alone:
        expected = answers(alone)
    for _ in range(3):  # computed, captured, replayed
        assert answers(engine) == expected
    assert engine._served.runner._captured.graphs > 0


def test_requests_go_on_when_a_rank_dies(engine: Engine) -> None:
    expected, served = answers(engine), engine._served
    assert isinstance(served, LeadingRunner)
    began = time.monotonic()
    os.kill(served.rank_pids[0], signal.SIGKILL)
    assert answers(engine) == expected
    assert time.monotonic() - began < 150
