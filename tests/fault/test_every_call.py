"""Calls of every op, right ones and ones that no program makes, over every transport: each is answered, or refused with a code.

Nobody else notices: all the while an innocent client gets the answers that it got before. The long form sends a million.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

import symbiosis
from symbiosis.client.session import Session
from symbiosis.errors import Code, ProtocolError
from symbiosis.executor.loop import ExecutorLoop
from symbiosis.executor.model.store import Store
from symbiosis.executor.options import Options
from symbiosis.protocol import (
    MAGIC_REPLY,
    Call,
    Done,
    Forget,
    Hello,
    Op,
    Refusal,
    Register,
    Registered,
    Segment,
    call_body,
    decode_from_executor,
    decode_reply,
)
from symbiosis.transport import inproc
from symbiosis.transport.cuda.words import BELL, CURRENT
from symbiosis.transport.tensors import split_payload
from tests import tally
from tests.fault.bad_input.raw import RawLocal
from tests.frames import IN, Calls, EveryKind, header, only_used
from tests.gpu.test_gpu_control import NBYTES, Peer, memory  # noqa: F401  (a fixture)
from tests.realm import Raw

LIMITS = {"max_rows": 64, "max_call_bytes": 8192, "heartbeat_s": 600.0, "allow_read": True, "integers": [8]}
MOST = 1 << 16  # bytes of a payload that is sent
X = torch.arange(2.0 * IN).view(2, IN)
often = pytest.mark.parametrize(
    "times", [400, pytest.param(250_000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]
)
pytestmark = pytest.mark.fault


@pytest.fixture
def executor(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[symbiosis.Executor]:
    monkeypatch.setattr("symbiosis.transport.tcp.listener.REFUSALS", 10**9)
    with symbiosis.Executor(EveryKind(), listen=[url], serve=["*"], policy="immediate", **LIMITS) as executor:
        yield executor


class Innocent:
    """Asks for the same again and again."""

    def __init__(self, executor: symbiosis.Executor) -> None:
        self._session = Session(executor.endpoint)
        self._layer = [layer.name for layer in self._session.manifest].index("linear")
        own = EveryKind().linear
        self._y = linear(X, own.weight, own.bias).detach()

    def goes_on(self) -> None:
        assert torch.equal(self._session.call(Op.FORWARD, self._layer, X, bias=True), self._y)
        assert self._session.stats.reconnects == 0

    def close(self) -> None:
        self._session.close()


class ByInproc:
    """Whoever is in the same program can hand over anything; what is no header cannot come so."""

    def __init__(self, executor: symbiosis.Executor) -> None:
        self._connection = inproc.connect(executor.endpoint.removeprefix("inproc://"), Hello(client="fuzz"), 10.0)

    def ask(self, body: bytes, call: Call, payload: bytes) -> Code:
        try:
            tensors = split_payload(
                call, torch.frombuffer(bytearray(payload or b" "), dtype=torch.uint8)[: len(payload)]
            )
        except ProtocolError as error:
            return error.code
        connection = self._connection
        connection._listener.post(connection._peer, (1, call, tensors))
        answer: Any = connection._next(10.0)
        return answer[0].code

    def close(self) -> None:
        self._connection.close()


class ByLocal:
    def __init__(self, executor: symbiosis.Executor) -> None:
        self._raw = RawLocal(executor.endpoint).join()

    def ask(self, body: bytes, call: Call, payload: bytes) -> Code:
        self._raw.ring(header(body, self._raw.rung + 1), payload)
        return self._raw.answer()[0].code

    def close(self) -> None:
        self._raw.close()


class ByTcp:
    def __init__(self, executor: symbiosis.Executor) -> None:
        self._raw = Raw.joined(executor.endpoint)

    def ask(self, body: bytes, call: Call, payload: bytes) -> Code:
        ends = payload[len(payload) - 4 * call.groups :] if len(call.parts) > 1 and len(payload) == call.nbytes else b""
        rows = payload[: call.parts[0]] if call.parts and len(payload) == call.nbytes else payload
        frames = [header(body, 1), *([ends] if len(call.parts) > 1 else []), *([rows] if call.parts else [])]
        self._raw.socket.send_multipart(frames)
        head = self._raw.socket.recv_multipart()[0]
        if head[:4] == MAGIC_REPLY:
            return decode_reply(head).code
        refusal = decode_from_executor(head)
        assert isinstance(refusal, Refusal)
        return Code(refusal.code)

    def close(self) -> None:
        self._raw.close()


WAYS = {"inproc": ByInproc, "local": ByLocal, "tcp": ByTcp}


def frames(calls: Calls, changed: bool = True) -> Iterator[tuple[bytes, Call, bytes]]:
    """Headers, the calls that they seem to be, and payloads: every other call is a right one."""
    for number in itertools.count():
        call = calls.right() if number % 2 else calls.spoilt()
        body = calls.body(call) if changed and not number % 2 else call_body(call)
        yield body, call, calls.payload(call.nbytes) if call.nbytes <= MOST else b""


def judge(call: Call, body: bytes, code: Code) -> None:
    """What must be so of any answer."""
    assert code is not Code.INTERNAL, call
    if body == call_body(call) and only_used(call) != call:
        assert code is not Code.OK, call


@often
def test_every_call_is_answered_or_refused(url: str, executor: symbiosis.Executor, times: int) -> None:
    innocent, way = Innocent(executor), WAYS[url.partition(":")[0]](executor)
    calls, codes = Calls(executor.server.store.manifest, times), Counter[Code]()
    sent = frames(calls, changed="inproc" not in url)
    for number in range(times):
        body, call, payload = next(sent)
        code = way.ask(body, call, payload)
        judge(call, body, code)
        codes[code] += 1
        if number % 50 == 0:
            innocent.goes_on()
    innocent.goes_on()
    assert codes[Code.OK] > times // 4 and len(codes) > 6, codes
    assert executor._thread.is_alive() and executor.server._mistakes == 0
    way.close()
    innocent.close()
    tally.done[tally.CALLS] += times


# ---------------------------------------------------------------- calls that a GPU makes


class GpuPeer(Peer):
    """The executor's end of a GPU's connection, at a server that computes on the CPU."""

    def __init__(self, server: ExecutorLoop, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.server, self._inbox, self._gone = server, server.dispatch, False
        self._words.memory = bytearray(4096)
        self.session: Any = None
        server.dispatch.joined(self, Hello(client="a GPU"))
        self.refused: list[Code] = []
        assert isinstance(self.ask(Segment(0, NBYTES)), Done)
        self._looking = True

    def _ring(self) -> None:
        """What the stream does."""

    def reply(self, reply: Any, result: Tensor) -> None:
        self.refused += [reply.code] if reply.code else []
        super().reply(reply, result)

    def made(self, body: bytes, number: int) -> Code:
        """Register the call, and make it."""
        answer = self.ask(Register(number, body, 0, 512))
        if isinstance(answer, Refusal):
            return Code(answer.code)
        assert isinstance(answer, Registered)
        self.refused = []
        for _ in range(2):
            self.words[BELL] = number
            self.look()
            self.server._step()
        assert self.words[BELL] == 0 and self.words[CURRENT] == number
        assert not isinstance(self.ask(Forget((number,))), Refusal)
        return self.refused[0] if self.refused else Code.OK


@often
def test_every_call_of_a_gpu_is_made_or_refused(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as no GPU is needed for it."""
    server = ExecutorLoop(Store(EveryKind(), ["*"], [8]), Options(policy="immediate", **{**LIMITS, "integers": (8,)}))
    monkeypatch.setattr(server.gpu, "forget", lambda works: None)  # waits for streams
    calls, codes, innocent, mean = Calls(server.store.manifest, times), Counter[Code](), *(
        GpuPeer(server, monkeypatch) for _ in range(2)
    )  # fmt: skip
    linear_layer = [layer.name for layer in server.store.manifest].index("linear")
    good = call_body(Call(Op.FORWARD, linear_layer, "float32", (2, IN)))
    sent = frames(calls)
    with torch.no_grad():
        for number in range(1, times + 1):
            body, call, _ = next(sent)
            code = mean.made(body, number)
            judge(call, body, code)
            codes[code] += 1
            if number % 50 == 0:
                assert innocent.made(good, number) is Code.OK
    assert codes[Code.OK] > times // 5 and len(codes) > 5, codes
    assert not mean.dropped and not innocent.dropped and server._mistakes == 0
    assert not mean._calls and not mean._remote
    mean.close()
    innocent.close()
    tally.done[tally.CALLS] += times


# ---------------------------------------------------------------- those that were found


@pytest.mark.parametrize("op", [Op.NORMS, Op.READ, Op.STATS])
def test_groups_of_an_op_that_has_none_are_refused(op: Op, executor: symbiosis.Executor) -> None:
    """Over local:// this ended the executor."""
    innocent, way = Innocent(executor), WAYS[executor.endpoint.partition(":")[0]](executor)
    call = Call(op, 0, "float32", groups=1)
    assert way.ask(call_body(call), call, b"") is Code.UNKNOWN_OP
    innocent.goes_on()
    way.close()
    innocent.close()


def test_figures_and_ids_cannot_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids that no CPU has checked break a GPU for everybody."""
    server = ExecutorLoop(Store(EveryKind(), ["*"]), Options(policy="immediate"))
    peer = GpuPeer(server, monkeypatch)
    embedding = [layer.name for layer in server.store.manifest].index("embedding")
    for call in (Call(Op.STATS, 0, "float32"), Call(Op.LOOKUP, embedding, "float32", (3,))):
        assert peer.made(call_body(call), 1) is Code.UNKNOWN_OP
    peer.close()
