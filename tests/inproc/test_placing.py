"""Where a model lives that nobody gave a device, and what is said of a GPU that is not used; GPUs are names here (tests/gpu has real ones)."""

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import symbiosis
from symbiosis.client import model_device
from symbiosis.client.session import Session
from symbiosis.protocol import Welcome
from tests.conftest import tiny_llama

OURS = ["GPU-a", "GPU-b"]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What this program sees."""
    seen = list(OURS)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(seen))
    monkeypatch.setattr(model_device, "device_name", lambda device: seen[device.index])
    return seen


@pytest.fixture
def welcome(serve: Callable) -> Welcome:
    session = Session(serve(tiny_llama()).endpoint)
    told = session.welcome
    session.close()
    return told


@pytest.mark.parametrize("endpoint", ["local:///x.sock", "inproc://x", "tcp://127.0.0.1:7000"])
def test_it_is_on_the_gpu_of_the_executor(endpoint: str, gpus: list[str], welcome: Welcome, caplog: Any) -> None:
    for index, name in enumerate(OURS):
        assert model_device.place_beside(replace(welcome, gpu=name), endpoint) == torch.device("cuda", index)
    assert not caplog.records


@pytest.mark.parametrize(
    ("gpu", "endpoint", "told"),
    [
        ("GPU-hidden", "local:///x.sock", "does not see.*device='cpu'"),
        ("GPU-far", "tcp://far:7000", "is not used.*device='cuda'.*another host"),
        ("", "local:///x.sock", "is not used.*a CPU"),
    ],
)
def test_a_gpu_that_is_not_used_is_told_of(
    gpu: str, endpoint: str, told: str, gpus: list[str], welcome: Welcome, caplog: Any
) -> None:
    assert model_device.place_beside(replace(welcome, gpu=gpu), endpoint) == torch.device("cpu")
    (record,) = caplog.records
    assert re.search(told, record.getMessage())


def test_without_a_gpu_there_is_nothing_to_say(welcome: Welcome, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for gpu, endpoint in (("", "local:///x.sock"), ("GPU-far", "tcp://far:7000")):
        assert model_device.place_beside(replace(welcome, gpu=gpu), endpoint) == torch.device("cpu")
    assert not caplog.records
    model_device.place_beside(replace(welcome, gpu="GPU-hidden"), "local:///x.sock")
    assert "does not see" in caplog.text


def test_who_says_a_device_gets_it(serve: Callable, gpus: list[str], caplog: Any) -> None:
    model = symbiosis.from_executor(serve(tiny_llama()).endpoint, device="cpu")
    assert model.device == torch.device("cpu") and "GPU" not in caplog.text


def test_an_executor_of_a_model_in_hand_says_why_it_shares_nothing(tmp_path: Any, caplog: Any) -> None:
    url = f"local://{tmp_path}/a.sock"
    for model, words, says in (
        (tiny_llama(), {}, True),
        (tiny_llama(), {"share_weights": False}, False),
        (tiny_llama(), {"share_weights": True}, False),
        ("demo", {}, False),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING), symbiosis.Executor(model, listen=[url], **words) as executor:
            assert ("share_weights=True" in caplog.text) == says
            assert bool(executor.server.store.files) == (words.get("share_weights", model == "demo"))
