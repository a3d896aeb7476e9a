"""A call needs no more memory than its price says, measured in a process that has no other."""

import subprocess
import sys

import msgspec
import pytest
import torch
from torch import nn

from symbiosis.executor.model.store import Store
from symbiosis.protocol import Call, Op, View

MEMORY = """
import gc, json, sys
import torch
from pathlib import Path
from symbiosis.executor.calls.call_plan import make_plan
from symbiosis.executor.compute.batch_runner import BatchRunner
from symbiosis.executor.scheduling.queue import Batch, Item, Slice
from symbiosis.executor.call_kinds import HostCall
from symbiosis.transport.inproc import InprocPeer
from symbiosis.transport.tensors import TORCH_DTYPE
from tests.process.test_price_memory import heavy_calls, large_store
from tests.unit.test_price import OPTIONS, payload_of
torch.set_grad_enabled(False)
torch.set_num_threads(1)
store = large_store()
engine = BatchRunner(store, lambda *_: None, lambda *_: None)

def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) << 10

def now():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmRSS")).split()[1]) << 10

def run(call, payload, plan):
    out = torch.empty(plan.shape, dtype=TORCH_DTYPE[call.dtype])
    work = HostCall(InprocPeer(), 1, call, payload, out, plan, finite=call.dtype[:3] != "int" and bool(payload) and call.op.name != "LOOKUP")
    item = Item(1, plan.key, plan.rows, 0, 0.0, work)
    for turn in range(plan.turns):
        cells = plan.grains[0][1]
        first, last = (cells * n // plan.turns for n in (turn, turn + 1))
        engine.compute(Batch(plan.key, [Slice(item, 0, plan.rows)], 0.0, cells, first, last))
        assert work.error is None, work.error

result = []
for call in heavy_calls():
    plan, payload = make_plan(call, store, OPTIONS), payload_of(call)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = now()
    run(call, payload, plan)
    result.append((str(call), peak() - before, plan.held + plan.scratch))
print(json.dumps(result))
"""
LARGE_K, LARGE_N = 1024, 6000


def large_store() -> Store:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(LARGE_K, LARGE_N, dtype=torch.bfloat16)
            self.narrow = nn.Linear(64, LARGE_N, dtype=torch.bfloat16)
            self.experts = nn.ModuleList()
            self.embedding = nn.Embedding(6000, 1024, dtype=torch.bfloat16)

    class LargeExperts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.zeros(8, LARGE_K, 1024, dtype=torch.bfloat16))

    model = Model()
    model.experts = LargeExperts()  # type: ignore[assignment]
    return Store(model, serve=["*"], integers=(8, 16))


def heavy_calls() -> list[Call]:
    """Each needs more memory than its payload and its reply."""
    store = large_store()
    number = {layer.name: number for number, layer in enumerate(store.manifest)}
    linear, experts, embedding = number["linear"], number["experts.up"], number["embedding"]
    odd = View((LARGE_N // 2, LARGE_K // 2), (2 * LARGE_K, 2), 0)  # no library multiplies by that as it lies there
    return [
        Call(Op.FORWARD, linear, "float32", (2000, LARGE_K), bias=True),
        Call(Op.FORWARD, linear, "float64", (10, LARGE_K)),
        Call(Op.DGRAD, number["narrow"], "bfloat16", (2000, LARGE_N)),  # few CPUs are fast at that
        Call(Op.FORWARD, linear, "int32", (1000, LARGE_K), seeded=True),
        Call(Op.FORWARD, linear, "int64", (500, LARGE_K)),
        Call(Op.PRODUCT, linear, "bfloat16", (100, LARGE_N // 2), view=odd),
        Call(Op.PRODUCT, experts, "float32", (8, 200, LARGE_K)),
        Call(Op.PRODUCT, experts, "float64", (8, 10, LARGE_K), view=View((8, LARGE_K, 1024), (0, 1024, 1), 0)),
        Call(Op.LEFT, linear, "float64", (LARGE_K, 50), view=View((LARGE_N, LARGE_K), (LARGE_K, 1), 0)),
        Call(Op.GROUPED, experts, "float32", (3000, LARGE_K), groups=8),
        Call(Op.LOOKUP, embedding, "float64", (6000,)),
        Call(Op.NORMS, linear, "float64"),
        Call(Op.READ, linear, "float64"),
        Call(Op.ECHO, 0, "float32", (4000, 1000)),
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is told by /proc")
def test_a_call_needs_no_more_memory_than_its_price_says() -> None:
    """Torch's memory is no other's, so what counts is the most that a process had."""
    run = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    for call, taken, said in msgspec.json.decode(run.stdout):
        assert taken <= said + (12 << 20), (call, taken >> 20, said >> 20)  # libraries have working memory, too
