"""A call needs no more memory than its price says, measured in a process that has no other."""

import subprocess
import sys

import msgspec
import pytest

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
from symbiosis.executor.options import Options
from tests.frames import heavy_calls, large_store, payload_of
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
    plan, payload = make_plan(call, store, Options(allow_read=True, integers=(8, 16))), payload_of(call)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = now()
    run(call, payload, plan)
    result.append((str(call), peak() - before, plan.held + plan.scratch))
print(json.dumps(result))
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is told by /proc")
def test_a_call_needs_no_more_memory_than_its_price_says() -> None:
    """Torch's memory is no other's, so what counts is the most that a process had."""
    run = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    for call, taken, said in msgspec.json.decode(run.stdout):
        assert taken <= said + (12 << 20), (call, taken >> 20, said >> 20)  # libraries have working memory, too
