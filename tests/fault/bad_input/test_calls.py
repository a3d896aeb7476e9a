"""Wrong calls, and joins that cannot be: each is told what is wrong, and nobody else notices."""

import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import symbiosis
from symbiosis import transport
from symbiosis.client.session import Session
from symbiosis.errors import CallError, Code, ConfigError, ExecutorUnavailable, WrapError
from symbiosis.executor.model.load import load_model
from symbiosis.protocol import (
    VERSION,
    Call,
    Hello,
    Op,
    View,
)
from tests.conftest import tiny_llama
from tests.fault.bad_input.raw import LIMITS, MODEL, WAIT_S, WIDTH, ask, rows, spoilt
from tests.processes import both_transports, until

WRONG_CALLS = {
    "unknown layer": (Call(Op.FORWARD, 10_000, "float32", (5, WIDTH)), rows(5), Code.UNKNOWN_LAYER, "no layer number"),
    "unserved layer": (Call(Op.FORWARD, 0, "float32", (5, WIDTH)), rows(5), Code.UNKNOWN_LAYER, "not served"),
    "wrong width": (Call(Op.FORWARD, 1, "float32", (5, 65)), rows(5, 65), Code.BAD_SHAPE, "rows of 64 values, not 65"),
    "wrong dtype": (
        Call(Op.FORWARD, 1, "uint8", (5, WIDTH)), rows(5, dtype=torch.uint8), Code.BAD_DTYPE, "not uint8",
    ),
    "integers that are not served": (
        Call(Op.FORWARD, 1, "int32", (5, WIDTH)), rows(5, dtype=torch.int32), Code.BAD_DTYPE, "--integers 8",
    ),
    "integers for another product": (
        Call(Op.PRODUCT, 1, "int64", (5, WIDTH)), rows(5, dtype=torch.int64), Code.BAD_DTYPE, "floating-point",
    ),
    "a seed for floating point": (
        Call(Op.FORWARD, 1, "float32", (5, WIDTH), seeded=True), rows(1, 32, torch.uint8), Code.BAD_DTYPE, "a seed stands",
    ),
    "a seed of too many rows": (
        Call(Op.FORWARD, 1, "int32", (40_001, WIDTH), seeded=True), rows(1, 32, torch.uint8), Code.TOO_LARGE, "--max-rows",
    ),
    "NaN": (Call(Op.FORWARD, 1, "float32", (5, WIDTH)), spoilt(float("nan")), Code.NON_FINITE, "--non-finite pass"),
    "infinity": (Call(Op.FORWARD, 1, "float32", (5, WIDTH)), spoilt(float("inf")), Code.NON_FINITE, "set_detect_anom"),
    "NaN among many rows": (
        Call(Op.FORWARD, 1, "float32", (9_000, WIDTH)), spoilt(float("nan"), 9_000), Code.NON_FINITE, "--non-finite pass",
    ),
    "too many rows": (
        Call(Op.ECHO, 0, "uint8", (40_001, 1)), rows(40_001, 1, torch.uint8), Code.TOO_LARGE, "raise --max-rows",
    ),
    "a view out of bounds": (
        Call(Op.PRODUCT, 1, "float32", (5, WIDTH), view=View((64, 64), (64, 1), 1)), rows(5), Code.BAD_VIEW, "beyond",
    ),
    "a view of 2^124 elements": (
        Call(Op.PRODUCT, 1, "float32", (5, WIDTH), view=View((64, 2**62, 2**62), (0, 0, 0), 0)), rows(5),
        Code.BAD_VIEW, "exceeds",
    ),
    "a read": (Call(Op.READ, 1, "float32"), None, Code.READ_DENIED, "--allow-read"),
}  # fmt: skip


@both_transports
@pytest.mark.parametrize("what", WRONG_CALLS)
def test_a_wrong_call_is_refused_and_the_session_goes_on(executor: symbiosis.Executor, what: str) -> None:
    call, x, code, text = WRONG_CALLS[what]
    payload = () if x is None else (x,)
    reply, message = ask(executor.endpoint, call, *payload)
    assert reply.code is code
    assert text in message.decode()
    connection = transport.connect(executor.endpoint, Hello(client="wrong, then right"), WAIT_S)
    for number in range(1, 20):
        assert connection.call(number, call, payload, WAIT_S)[0].code is code
    right, (result,) = connection.call(99, Call(Op.ECHO, 0, "float32", (5, WIDTH)), (rows(5),), WAIT_S)
    connection.close()
    assert right.code is Code.OK and torch.equal(result, rows(5))


@both_transports
def test_a_session_checks_the_limits_before_it_sends(executor: symbiosis.Executor) -> None:
    """Over tcp a frame beyond the limit would end in silence."""
    session = Session(executor.endpoint, patience=1.0)
    for x in (rows(40_001), torch.zeros(1, (LIMITS["max_call_bytes"] >> 2) + 2000)):
        with pytest.raises(CallError, match="send smaller batches, or raise --max-rows / --max-call-bytes") as error:
            session.call(Op.ECHO, 0, x)
        assert error.value.code is Code.TOO_LARGE
    most = torch.arange(float(LIMITS["max_call_bytes"] >> 2)).view(-1, 512)
    assert torch.equal(session.call(Op.ECHO, 0, most), most)
    assert session.stats.reconnects == 0
    session.close()


@both_transports
def test_a_call_of_no_rows_has_an_answer_of_no_rows(executor: symbiosis.Executor) -> None:
    for call, shape in (
        (Call(Op.FORWARD, 1, "float32", (0, WIDTH)), (0, 64)),
        (Call(Op.DGRAD, 1, "float32", (0, 64)), (0, WIDTH)),
        (Call(Op.ECHO, 0, "float32", (0,)), (0,)),
    ):
        reply, result = ask(executor.endpoint, call, torch.zeros(call.shape))
        assert (reply.code, reply.shape, result) == (Code.OK, shape, b"")


@both_transports
def test_another_protocol_version_is_refused_with_both_named(executor: symbiosis.Executor) -> None:
    with pytest.raises(CallError, match=rf"protocol 99.*protocol {VERSION}.*same release") as error:
        transport.connect(executor.endpoint, Hello(version=99), WAIT_S)
    assert error.value.code is Code.BAD_VERSION


def test_rows_of_gpus_are_refused_by_an_executor_without_one() -> None:
    with symbiosis.Executor(tiny_llama(), listen="tcp://127.0.0.1:0") as executor:
        with pytest.raises(CallError, match="by NCCL: it computes on the CPU") as error:
            transport.connect(executor.endpoint, Hello(device="GPU-1", nccl=22809), WAIT_S)
        assert error.value.code is Code.UNKNOWN_OP
        transport.connect(executor.endpoint, Hello(), WAIT_S).close()


@both_transports
def test_a_client_of_another_model_is_refused(executor: symbiosis.Executor) -> None:
    with pytest.raises(CallError, match="another model.*same checkpoint") as error:
        _ = Session(executor.endpoint, fingerprint="0" * 64).welcome
    assert error.value.code is Code.WRONG_MODEL


@both_transports
def test_an_executor_that_comes_back_with_another_model_is_refused(scheme: str, start: Callable) -> None:
    first = start(scheme)
    session = Session(first.endpoint)
    assert torch.equal(session.call(Op.ECHO, 0, rows(1)), rows(1))
    first.close()
    other = symbiosis.Executor(load_model("demo"), listen=[first.endpoint])
    try:
        with pytest.raises(CallError, match="another model") as error:
            session.call(Op.ECHO, 0, rows(1))
        assert error.value.code is Code.WRONG_MODEL
    finally:
        session.close()
        other.close()


@both_transports
def test_more_sessions_than_allowed_are_refused_until_one_leaves(executor: symbiosis.Executor) -> None:
    sessions = [transport.connect(executor.endpoint, Hello(), WAIT_S) for _ in range(LIMITS["max_sessions"] - 1)]
    with pytest.raises(CallError, match="all 6 sessions are taken: raise --max-sessions") as error:
        transport.connect(executor.endpoint, Hello(), WAIT_S)
    assert error.value.code is Code.LIMIT
    sessions.pop().close()
    until(lambda: len(executor.server.sessions) < LIMITS["max_sessions"])
    sessions.append(transport.connect(executor.endpoint, Hello(), WAIT_S))
    for session in sessions:
        session.close()


@pytest.mark.parametrize("endpoint", ["inproc://nobody", "local://{}/nobody.sock", "tcp://127.0.0.1:{}"])
def test_nobody_there_is_said_with_endpoint_and_remedy(endpoint: str, tmp_path: Path) -> None:
    with socket.socket() as closed:  # bound and not listening: nobody can answer there
        closed.bind(("127.0.0.1", 0))
        endpoint = endpoint.format(tmp_path if "local" in endpoint else closed.getsockname()[1])
        model, before = tiny_llama(), set(map(type, MODEL.modules()))
        begun = time.monotonic()
        with pytest.raises(ExecutorUnavailable) as error:
            symbiosis.wrap(model, endpoint, patience=1.0)
        assert time.monotonic() - begun < 40
        assert f"no executor at {endpoint}" in str(error.value)
        remedy = (
            "symbiosis-executor MODEL --listen {}"
            if "inproc" not in endpoint
            else "symbiosis.Executor(model, listen='{}')"
        )
        assert remedy.format(endpoint) in str(error.value)
        assert ("symbiosis-executor" in str(error.value)) == ("inproc" not in endpoint)
        assert set(map(type, model.modules())) == before


@pytest.mark.parametrize("url", ["", "executor", "local://", "tcp:/127.0.0.1:1"])
def test_what_is_no_endpoint_is_refused_with_examples(url: str) -> None:
    with pytest.raises(ConfigError, match="is not an endpoint: write inproc://NAME, local:///PATH/TO/SOCKET or tcp"):
        transport.connect(url, Hello(), WAIT_S)


def test_a_web_page_is_no_endpoint() -> None:
    with pytest.raises(
        ConfigError, match="is a web page.*write the URL of its --listen, local:///PATH/TO/SOCKET or tcp"
    ):
        Session("http://127.0.0.1:1")


@pytest.mark.parametrize(
    "url", ["tcp://127.0.0.1:99999", "tcp://127.0.0.1", "tcp://127.0.0.1:-1", "tcp://host:x?key=y"]
)
def test_what_is_no_port_is_refused_not_taken_for_another(url: str) -> None:
    for attempt in (lambda: transport.connect(url, Hello(), WAIT_S), lambda: symbiosis.Executor(MODEL, listen=url)):
        with pytest.raises(ConfigError, match="with a port from 0 to 65535"):
            attempt()


def test_a_wrong_timeout_and_what_is_no_model_are_refused(start: Callable) -> None:
    endpoint = start("tcp").endpoint
    with pytest.raises(ConfigError, match="timeout must be positive, not -1"):
        symbiosis.wrap(tiny_llama(), endpoint, timeout=-1)
    with pytest.raises(WrapError, match="wrap takes a model, not 'demo': load it with"):
        symbiosis.wrap("demo", endpoint)  # type: ignore[type-var]


@both_transports
def test_a_failure_in_the_product_is_its_own_calls_alone(
    executor: symbiosis.Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memory for one slice of a divided call: one refusal, and the session counts no call in flight."""
    server = executor.server
    operand, layer = server.store.operand, 2
    failures = []

    def fail_once(number: int, *rest: object) -> Tensor:
        if number == layer and not failures:
            failures.append(number)
            raise MemoryError
        return operand(number, *rest)

    monkeypatch.setattr(server.store, "operand", fail_once)
    monkeypatch.setattr(server.batcher.rules, "max_rows", 16)
    connection = transport.connect(executor.endpoint, Hello(client="big"), WAIT_S)
    call = Call(Op.FORWARD, layer, "float32", (60, WIDTH))
    reply, (text,) = connection.call(1, call, (rows(60),), WAIT_S)
    assert reply.code is Code.RESOURCE and b"send fewer rows" in bytes(text.numpy())
    session = next(s for s in server.sessions.values() if s.client == "big")
    for number in range(2, 5):
        assert connection.call(number, call, (rows(60),), WAIT_S)[0].code is Code.OK
    until(lambda: session.in_flight == 0)
    connection.close()
