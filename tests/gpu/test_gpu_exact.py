"""Clients on a GPU compute what the unsplit model computes there, bit by bit: logits, generated tokens and their logits, adapter gradients.

One executor process for each architecture, which serves it in each dtype. All are started at the same time, and only those that are
needed: `pytest tests/gpu/test_gpu_exact.py -k "gemma or phi3-"`. Nothing is excepted: alone, a client's rows are multiplied by the
same product from the same strides, and sequences are so short that no kernel of attention adds in an order of its own. (On a GPU
transformers decodes by copies of the weights of experts, which a split model does not have. The unsplit one is told not to.)
"""

import copy
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import symbiosis
from scripts.compat_models import Stage, build, forward, generate, step
from symbiosis.client.weights.remote_weight import remote_weights
from symbiosis.client.wrap import DECODES
from tests.gpu.conftest import Processes
from tests.gpu.test_gpu_line import WAIT_S

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt2", "phi", "phi3", "mixtral")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TURNS = 4  # first single calls, then groups, then what the executor has made graphs of


@lru_cache
def built(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A small model on the CPU, the same in every process, and its inputs."""
    return build("causal", name)


def serve_all(folder: str, ready: Any, name: str) -> None:
    with ExitStack() as stack:
        for dtype in DTYPES:
            model = copy.deepcopy(built(name)[0]).to("cuda", DTYPES[dtype])
            stack.enter_context(symbiosis.Executor(model, listen=[f"local://{folder}/{name}-{dtype}.sock"]))
        ready.put(True)
        while os.getppid() != 1:
            time.sleep(0.1)


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the executors listen that the chosen tests need."""
    folder, started = tmp_path_factory.mktemp("executors"), Processes()
    items = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    names = dict.fromkeys(item.callspec.params["name"] for item in items)  # type: ignore[attr-defined]
    for _, ready in [started.start(serve_all, str(folder), name) for name in names]:
        assert ready.get(timeout=WAIT_S)
    yield folder
    started.end()


@pytest.mark.parametrize("stage", [generate, step], ids=lambda stage: stage.__name__)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_split_equals_unsplit(name: str, dtype: str, stage: Stage, folder: Path) -> None:
    model, inputs = built(name)
    plain = copy.deepcopy(model).to("cuda", DTYPES[dtype])
    inputs = {key: value.cuda() for key, value in inputs.items()}
    split = symbiosis.wrap(copy.deepcopy(plain), f"local://{folder}/{name}-{dtype}.sock")
    session = next(remote_weights(split)).handle.session
    setattr(plain, DECODES, nullcontext)
    try:
        expected = forward(plain, inputs)
        for turn in range(TURNS):
            assert_same(forward(split, inputs), expected, f"turn {turn}")
        assert_same(stage(split, inputs), stage(plain, inputs), stage.__name__)
        assert session.lines and session.stats.calls
        assert not session.stats.round_trip_s, "a call went through the host's memory"
    finally:
        session.close()


def assert_same(got: list[Tensor], expected: list[Tensor], what: str) -> None:
    assert len(got) == len(expected)
    for number, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert one.is_cuda and one.isfinite().all()
        assert torch.equal(one, other), f"{what}, tensor {number}: off by {(one - other).abs().max().item():.1e}"
