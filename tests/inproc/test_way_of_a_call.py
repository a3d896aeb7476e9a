"""The ways of one call and of one gradient, as docs/architecture.md tells them: each step is a function that is entered, in this order."""

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch
from peft import LoraConfig, get_peft_model
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
    """The functions of ours that any thread enters, or the `thread` asked for, while it is on."""

    def __init__(self) -> None:
        self.on, self.entered = False, list[tuple[str, str]]()
        self.thread: int | None = None

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        is_ours = "/symbiosis/" in code.co_filename and not code.co_qualname.startswith(ASLEEP)
        if self.on and event == "call" and is_ours and self.thread in (None, threading.get_ident()):
            self.entered.append((code.co_filename.rpartition("/symbiosis/")[2], code.co_qualname))

    def run(self, do: Callable[[], object]) -> list[tuple[str, str]]:
        """The functions that it enters in this thread, in their order."""
        self.entered.clear()
        self.thread = threading.get_ident()
        self.on = True
        do()
        self.on = False
        return list(self.entered)

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


def steps_of(section: str) -> list[tuple[str, str]]:
    return STEP.findall(ARCHITECTURE.read_text().partition(f"## {section}")[2].partition("\n## ")[0])


@pytest.mark.parametrize("share", [False, True], ids=["called", "mapped"])
def test_a_gradient_goes_the_way_that_is_told(recorder: Recorder, tmp_path: Path, share: bool) -> None:
    steps = steps_of("The way of one gradient")
    assert len(steps) == 11
    left_out = [] if share else [("client/connection/reconnect.py", "Reconnecting._map")]
    base, adapter = tiny_llama(), LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    with symbiosis.Executor(tiny_llama(), listen=f"local://{tmp_path}/socket", share_weights=True) as executor:
        wrapped = recorder.run(lambda: symbiosis.wrap(base, executor.endpoint, share=share))
        assert in_order([step for step in steps[:7] if step not in left_out], wrapped)
        model = get_peft_model(base, adapter)
        layer, x = base.model.layers[0].self_attn.q_proj, torch.randn(2, 64, requires_grad=True)
        model.train()
        forward = recorder.run(lambda: layer(x).sum())
        backward = recorder.run(layer(x).sum().backward)
    assert in_order(steps[7:8] if share else steps[7:9], forward)
    assert backward == [] if share else in_order(steps[9:], backward)
    assert all(matrix.grad is not None for matrix in (layer.lora_A.default.weight, layer.lora_B.default.weight))


def in_order(steps: list[tuple[str, str]], entered: list[tuple[str, str]]) -> bool:
    """Whether each step is entered after the one before."""
    rest = iter(entered)
    return all(step in rest for step in steps)


@pytest.mark.alone
@torch.no_grad()
def test_a_call_goes_the_way_that_is_told(recorder: Recorder, tmp_path: Path) -> None:
    steps = steps_of("The way of one call")
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
