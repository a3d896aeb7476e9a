"""Small calls of eager code, each made by one kernel, under MPS."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import symbiosis
from symbiosis.transport.cuda import handshake as cuda_link
from symbiosis.transport.cuda.driver import WRITE_32, MemOp, MemOps
from tests.conftest import tiny_llama, wide_llama
from tests.gpu.conftest import Processes
from tests.gpu.test_gpu_line import WAIT_S, line_of, serve_forever
from tests.gpu.test_gpu_rounds import served, shared_gpu

__all__ = ["shared_gpu"]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BELL, ERROR, REPLY, OVER, VOID = 0, 16, 0, 32, 0xFFFF


class Words:
    """Of a client: two in the host's memory, two on the GPU."""

    def __init__(self) -> None:
        from symbiosis.kernels.gpu import small_call

        self.host = torch.zeros(32, dtype=torch.int32).pin_memory()
        self.device = torch.zeros(64, dtype=torch.int32, device="cuda")
        at = [tensor.data_ptr() + 4 * word for tensor, word in self._where()]
        self.mine, (self.bell, self.reply, self.over, _) = small_call.CallWords(*at, VOID), at

    def _where(self) -> list[tuple[Tensor, int]]:
        return [(self.host, BELL), (self.device, REPLY), (self.device, OVER), (self.host, ERROR)]


def lying(number: int, place: Tensor, outs: list[Tensor]) -> Any:
    from symbiosis.kernels.gpu import small_call

    where = [(tensor.data_ptr(), tensor.nbytes) for tensor in (place, *outs)]
    return small_call.Lies(number, where[0], where[1:])


@pytest.mark.parametrize(("results", "words"), [(1, 1), (2, 1000), (3, 4096), (4, 4097), (2, 16384)])
def test_a_kernel_brings_rows_and_fetches_results(results: int, words: int) -> None:
    from symbiosis.kernels.gpu import small_call

    ours, device = Words(), torch.device("cuda")
    small = small_call.SmallCalls(ours.mine, 60.0, device)
    rows, place = (torch.randint(1 << 40, (words,), device=device) for _ in range(2))
    outs = [torch.randint(1 << 40, (1 + words // (2 + n),), device=device) for n in range(results)]
    targets = [torch.zeros(len(out) + 1, dtype=torch.int64, device=device) for out in outs]
    lies, answering = lying(7, place, outs), torch.cuda.Stream()
    assert small_call.takes(lies)
    make = small.prepared(lies)
    for number in range(3):  # the reply of the call before is no answer
        rows += number
        later = [out + 1 for out in outs]
        torch.cuda.synchronize()
        make(rows.data_ptr(), [target.data_ptr() for target in targets], torch.cuda.current_stream().cuda_stream)
        end = time.monotonic() + 10
        while ours.host[BELL] != 7:
            assert time.monotonic() < end, "the bell did not ring"
        ours.host[BELL] = 0
        assert not torch.cuda.current_stream().query(), "it waits"
        with torch.cuda.stream(answering):
            there = place.cpu()  # nothing but copies: while a stream waits, CUDA loads no kernel
            for out, new in zip(outs, later, strict=True):
                out.copy_(new)
            MemOps([MemOp(WRITE_32, ours.reply, 7)]).enqueue(answering.cuda_stream)
        torch.cuda.synchronize()
        assert torch.equal(there, rows.cpu()), "they were there when the bell rang"
        for target, out in zip(targets, outs, strict=True):
            assert torch.equal(target[:-1], out) and target[-1] == 0
    assert ours.host[ERROR] == 0 and ours.device[OVER] == 0


def test_who_is_never_answered_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from symbiosis.kernels.gpu import small_call

    ours, x = Words(), torch.ones(2, 64, device="cuda")
    make = small_call.SmallCalls(ours.mine, 0.1, torch.device("cuda")).prepared(lying(1, x[0], [x[1]]))
    stream = torch.cuda.current_stream().cuda_stream
    begun = time.monotonic()
    for _ in range(10):  # after the first, nobody is waited for
        make(x.data_ptr(), [x.data_ptr()], stream)
    torch.cuda.synchronize()
    assert small_call.LEAST_S <= time.monotonic() - begun < 2 * small_call.LEAST_S
    assert ours.host[ERROR] == VOID and ours.host[BELL] == 1 and ours.device[OVER] == 1


def test_what_is_large_or_lies_crooked_is_not_taken() -> None:
    from symbiosis.kernels.gpu import small_call

    def takes(*places: tuple[int, int]) -> bool:
        return small_call.takes(small_call.Lies(1, places[0], places[1:]))

    row = (1 << 40, 64)
    assert takes(row, row) and takes(*[row] * (1 + small_call.MOST_RESULTS))
    assert not takes(*[row] * (2 + small_call.MOST_RESULTS)) and not takes(row)
    for place in ((1 << 40, small_call.MOST_BYTES + 8), (1 << 40, 60), (1 << 40, 0), ((1 << 40) + 4, 64)):
        assert not takes(place, row) and not takes(row, place)


def generate(endpoint: str, said: Any, seed: int, turns: int, dtype: torch.dtype = torch.float32) -> None:
    """How many of the logits, with a cache and without, are not the unsplit model's; and whether kernels made the calls."""
    model = {torch.float32: tiny_llama, torch.bfloat16: wide_llama}[dtype]().to("cuda", dtype)
    split = symbiosis.wrap({torch.float32: tiny_llama, torch.bfloat16: wide_llama}[dtype]().to("cuda", dtype), endpoint)
    ids = torch.randint(3, 100, (2, 5), generator=torch.Generator().manual_seed(seed)).cuda()
    wrong = 0
    with torch.no_grad():
        for turn in range(turns):
            x = (ids + turn) % 100
            caches = [None, None]
            for tokens in (x, x[:, :1], x[:, 1:2]):
                outputs = [
                    m(tokens, past_key_values=c, use_cache=True) for m, c in zip((split, model), caches, strict=True)
                ]
                caches = [output.past_key_values for output in outputs]
                wrong += not torch.equal(*(output.logits for output in outputs))
            if turn == 3:
                said.put("begun")
    said.put((wrong, line_of(split)._small is not None, line_of(split).reconnects))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_alone_nothing_differs(dtype: torch.dtype, processes: Processes, tmp_path: Path) -> None:
    name = "llama" if dtype is torch.float32 else "wide"
    _, endpoint = served(processes, tmp_path, "opportunistic", name, dtype)
    _, said = processes.start(generate, endpoint, 1, 20, dtype)
    assert said.get(timeout=WAIT_S) == "begun"
    assert said.get(timeout=WAIT_S) == (0, True, 0)


@pytest.mark.parametrize("how", ["kill", "terminate"])
def test_another_executor_goes_on(how: str, processes: Processes, tmp_path: Path) -> None:
    executor, endpoint = served(processes, tmp_path)
    _, said = processes.start(generate, endpoint, 1, 600)
    assert said.get(timeout=WAIT_S) == "begun"
    for pause in (0.3, 0.2, 0.1):
        time.sleep(pause)
        getattr(executor, how)()
        executor.join(WAIT_S)
        executor, _ = served(processes, tmp_path)
    wrong, by_kernels, reconnects = said.get(timeout=WAIT_S)
    assert (wrong, by_kernels) == (0, True) and reconnects


def ask_a_frozen_executor(endpoint: str, said: Any, executor: int, seconds: float) -> None:
    """For a new shape, in the midst of small calls."""
    model, split = tiny_llama().cuda(), symbiosis.wrap(tiny_llama().cuda(), endpoint)
    ids, wrong = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(1)).cuda(), 0
    with torch.no_grad():
        for tokens in (2, 3, 2):
            if tokens == 3:
                torch.cuda.synchronize()
                os.kill(executor, signal.SIGSTOP)
                threading.Timer(seconds, os.kill, (executor, signal.SIGCONT)).start()
            wrong += not torch.equal(split(ids[:, :tokens]).logits, model(ids[:, :tokens]).logits)
    said.put((wrong, line_of(split)._small is not None, line_of(split).reconnects))


def test_a_slow_executor_is_not_a_lost_one(processes: Processes, tmp_path: Path) -> None:
    executor, endpoint = served(processes, tmp_path)
    begun, seconds = time.monotonic(), cuda_link.JOIN_S + 2
    _, said = processes.start(ask_a_frozen_executor, endpoint, executor.pid, seconds)
    assert said.get(timeout=WAIT_S) == (0, True, 0)
    assert time.monotonic() - begun > seconds


def test_the_executor_says_how(processes: Processes, tmp_path: Path) -> None:
    """`--no-rounds`: it does not want kernels that wait."""
    _, ready = processes.start(serve_without_rounds, f"{tmp_path}/executor.sock")
    endpoint = ready.get(timeout=WAIT_S)
    _, said = processes.start(generate, endpoint, 1, 10)
    assert said.get(timeout=WAIT_S) == "begun"
    assert said.get(timeout=WAIT_S) == (0, False, 0)


def serve_without_rounds(where: str, ready: Any) -> None:
    serve_forever(where, ready, rounds=False)
