"""The way of one call, as docs/architecture.md tells it: each step is a function that a call enters, in this order."""

import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn

import symbiosis
from symbiosis.executor.ledger import Ledger
from tests.conftest import tiny_llama

MOST = 96  # functions of ours in all, with those that the executor enters to book the call: a new one costs every call
# By these a side goes to sleep, which on a slow machine, beside this recorder, it does in every call.
ASLEEP = ("Reactor._sleep", "Reactor._tell_bells", "Reactor._asked", "LocalPeer.sleeping")
ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"
STEP = re.compile(r"^\d+\. `([\w/]+\.py)` `([\w.]+)`", re.MULTILINE)


class Recorder:
    """The functions of ours that any thread enters, while it is on."""

    def __init__(self) -> None:
        self.on, self.entered = False, list[tuple[str, str]]()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        is_ours = "/symbiosis/" in code.co_filename and not code.co_qualname.startswith(ASLEEP)
        if self.on and event == "call" and is_ours:
            self.entered.append((code.co_filename.rpartition("/symbiosis/")[2], code.co_qualname))

    def one_call(self, layer: nn.Module, x: torch.Tensor, ledger: Ledger) -> list[tuple[str, str]]:
        """Each function once, in the order in which a call first enters them, until the executor has booked it."""
        booked = ledger.batch_sizes[1]
        self.entered.clear()
        self.on = True
        layer(x)
        while ledger.batch_sizes[1] == booked:
            time.sleep(0)
        self.on = False
        return list(dict.fromkeys(self.entered))


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    yield recorder
    sys.setprofile(None)
    threading.setprofile(None)


@pytest.mark.alone
@torch.no_grad()
def test_a_call_goes_the_way_that_is_told(recorder: Recorder, tmp_path: Path) -> None:
    steps = STEP.findall(ARCHITECTURE.read_text().partition("## The way of one call")[2].partition("\n## ")[0])
    assert len(steps) == 18
    with symbiosis.Executor(tiny_llama(), listen=f"local://{tmp_path}/socket") as executor:
        model = symbiosis.wrap(tiny_llama(), executor.endpoint)
        layer, x = model.model.layers[0].mlp.up_proj, torch.randn(1, 64)
        for _ in range(50):  # headers, plans and groups are known from then on
            layer(x)
            time.sleep(1e-3)
        ledger = executor.server.ledger
        shortest = recorder.one_call(layer, x, ledger)
        for _ in range(300):  # what comes now and then makes some longer
            shortest = min(shortest, recorder.one_call(layer, x, ledger), key=len)
            if len(shortest) <= MOST:
                break
    assert [step for step in shortest if step in steps] == steps
    assert len(shortest) <= MOST, "\n".join(map(" ".join, shortest))
