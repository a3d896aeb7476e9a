"""Poisoned calls among those of innocent clients: every one has its answer or its refusal, and nobody else's bits change.

Weights and rows are small multiples of 1/8, so that every sum is exact: whoever is in the same product, an innocent's rows
must come back with the very same bits.
"""

import struct
import threading
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import zmq
from torch import Tensor

import symbiosis
from symbiosis.client.session import Session
from symbiosis.errors import Code
from symbiosis.protocol import Call, Hello, Op, decode_reply, encode_call, encode_control
from tests import tally
from tests.conftest import exact, tiny_llama
from tests.processes import WAIT_S, layer_number, until

pytestmark = pytest.mark.fault
LAYER = "model.layers.0.mlp.up_proj"
WIDTH = 64
INNOCENTS = 3
Poison = tuple[Call, list[bytes], Code]  # a call, what comes with it, and the answer


def rows(value: float, dtype: torch.dtype = torch.float32, width: int = WIDTH) -> bytes:
    """Four rows, `value` in the midst of the second one."""
    x = torch.ones(4, width)
    x[1, 30] = value
    return x.to(dtype).view(torch.uint8).numpy().tobytes()


def poisons(layer: int) -> dict[str, Poison]:
    """... where what is not finite is refused."""
    good = Call(Op.FORWARD, layer, "float32", (4, WIDTH))
    wide = Call(Op.FORWARD, layer, "float32", (4, WIDTH + 1))
    whole = Call(Op.FORWARD, layer, "int32", (4, WIDTH))
    half = Call(Op.FORWARD, layer, "bfloat16", (4, WIDTH))
    unknown = Call(Op.FORWARD, 9999, "float32", (4, WIDTH))
    return {
        "NaN": (good, [rows(float("nan"))], Code.NON_FINITE),
        "another NaN": (good, [rows(1.0)[:-4] + struct.pack("<I", 0xFFC12345)], Code.NON_FINITE),
        "infinity": (good, [rows(float("-inf"))], Code.NON_FINITE),
        "denormal": (good, [rows(1e-42)], Code.OK),
        "the largest": (good, [rows(3.4e38)], Code.OK),
        "wrong width": (wide, [rows(1.0, width=WIDTH + 1)], Code.BAD_SHAPE),
        "no floats": (whole, [rows(1.0, torch.int32)], Code.BAD_DTYPE),
        "other floats": (half, [rows(1.0, torch.bfloat16)], Code.OK),
        "truncated": (good, [rows(1.0)[:-1]], Code.BAD_FRAME),
        "too long": (good, [rows(1.0) + b"\0"], Code.BAD_FRAME),
        "nothing": (good, [], Code.BAD_FRAME),
        "no such layer": (unknown, [rows(1.0)], Code.UNKNOWN_LAYER),
    }


class Innocent(threading.Thread):
    """Calls until told to stop, each with rows of its own, and compares every bit."""

    def __init__(self, endpoint: str, weight: Tensor, seed: int) -> None:
        super().__init__()
        self.session, self.calls, self.problem = Session(endpoint), 0, ""
        self._layer = layer_number(self.session, LAYER)
        self._weight, self._seed = weight, seed
        self.enough = threading.Event()

    def run(self) -> None:
        generator = torch.Generator().manual_seed(self._seed)
        try:
            while not self.enough.is_set() and not self.problem:
                x = torch.randint(-8, 9, (5, WIDTH), generator=generator) / 8
                if not torch.equal(self.session.call(Op.FORWARD, self._layer, x), x @ self._weight.t()):
                    self.problem = f"call {self.calls} has a wrong answer"
                self.calls += 1
        except Exception as error:
            self.problem = repr(error)
        finally:
            self.session.close()


def poison(endpoint: str, kinds: dict[str, Poison], times: int) -> tuple[Counter, int]:
    """Every kind, `times` times: how each was answered, and how many of the calls shared a product with others."""
    answers: Counter = Counter()
    shared = 0
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVTIMEO, int(1000 * WAIT_S))
        dealer.connect(endpoint)
        dealer.send(encode_control(Hello(client="poisoner")))
        dealer.recv()
        for number in range(times):
            for what, (call, payload, _) in kinds.items():
                dealer.send_multipart([encode_call(call, number + 1), *payload])
                reply = decode_reply(dealer.recv_multipart()[0])
                answers[what, reply.code] += 1
                tally.done[tally.POISON] += 1
                shared += reply.code is Code.OK and reply.batch > 1
    return answers, shared


@pytest.mark.parametrize("times", [60, pytest.param(25_000, marks=(pytest.mark.soak, pytest.mark.timeout(3600)))])
@pytest.mark.parametrize("non_finite", ["refuse", "pass"])
def test_poison_reaches_nobody_else(
    serve: Callable, non_finite: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the provider lets NaN and infinity in, so that they stand in the same product as the innocents' rows."""
    # else the poisoner is hung up on
    monkeypatch.setattr("symbiosis.transport.tcp.listener.REFUSALS", 10**6)
    model = exact(tiny_llama())
    weight: Tensor = model.get_submodule(LAYER).weight.detach()  # type: ignore[assignment]
    executor: symbiosis.Executor = serve(model, listen=["tcp://127.0.0.1:0"], policy="lockstep", non_finite=non_finite)
    innocents = [Innocent(executor.endpoint, weight, seed) for seed in range(INNOCENTS)]
    kinds = poisons(layer_number(innocents[0].session, LAYER))
    for innocent in innocents:
        innocent.start()
    try:
        answers, shared = poison(executor.endpoint, kinds, times)
        reached = [innocent.calls + 3 for innocent in innocents]
        until(lambda: all(i.problem or i.calls > n for i, n in zip(innocents, reached, strict=True)), "more calls")
    finally:
        for innocent in innocents:
            innocent.enough.set()
        for innocent in innocents:
            innocent.join(WAIT_S)
    assert not [innocent.problem for innocent in innocents if innocent.problem]
    passed = {Code.NON_FINITE: Code.OK} if non_finite == "pass" else {}
    assert answers == {(what, passed.get(code, code)): times for what, (_, _, code) in kinds.items()}
    assert shared >= times  # else the innocents' rows were never next to poison


def test_a_programs_own_denormal_numbers_stay(serve: Callable) -> None:
    """An executor in the same process flushes those of its own threads only."""
    executor = serve(tiny_llama())
    session = Session(executor.endpoint)
    tiny = torch.full((4, WIDTH), 1e-40)
    answer = session.call(Op.FORWARD, layer_number(session, LAYER), tiny)
    session.close()
    assert not answer.any() and (tiny * 1.0).all()
