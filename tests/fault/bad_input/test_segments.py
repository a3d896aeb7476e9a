"""Raw shared memory over local://: headers, control messages and bells that no client of ours would write."""

import contextlib
import os
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

import symbiosis
from symbiosis.client.session import Session
from symbiosis.errors import CallError, Code
from symbiosis.protocol import (
    CALL_SIZE,
    LONGEST_TEXT,
    REPLY_SIZE,
    VERSION,
    Call,
    Grow,
    Grown,
    Hello,
    Op,
    Refusal,
    Reply,
    decode_from_executor,
    decode_reply,
    encode_call,
    encode_control,
)
from symbiosis.transport.local.peer import FIRST_SLAB
from symbiosis.transport.local.segment import (
    CALL_AT,
    CALL_BELL_AT,
    CLIENT_SLEEPS_AT,
    PAYLOAD_AT,
    REPLY_AT,
    reply_at,
)
from tests import tally
from tests.fault.bad_input.raw import ECHO, FORWARD, MODEL, WIDTH, RawLocal, by_the_thousand, header, only_local, rows
from tests.processes import WAIT_S, until


@pytest.fixture
def raw(executor: symbiosis.Executor) -> Iterator[RawLocal]:
    raw = RawLocal(executor.endpoint).join()
    raw.ring(encode_call(ECHO, 1), bytes(64))
    assert raw.answer()[0] == Reply(1, Code.OK, "float32", (2, 8), 1, *raw_times(raw))
    yield raw
    raw.close()


def raw_times(raw: RawLocal) -> tuple[int, int]:
    reply = decode_reply(raw.memory[REPLY_AT : REPLY_AT + REPLY_SIZE])
    return reply.wait_us, reply.compute_us


@only_local
@pytest.mark.parametrize(
    ("head", "code", "text"),
    [
        (bytes(CALL_SIZE), Code.BAD_FRAME, b"not a Symbiosis message"),
        (b"\xff" * CALL_SIZE, Code.BAD_FRAME, b"not a Symbiosis message"),
        (
            header(at=4, put=struct.pack("<H", VERSION + 1)),
            Code.BAD_VERSION,
            b"version %d, this side %d" % (VERSION + 1, VERSION),
        ),
        (header(Call(Op.ECHO, 0, "float32", (2**40,))), Code.TOO_LARGE, b"do not fit the session's segment"),
        (header(Call(Op.ECHO, 0, "uint8", (FIRST_SLAB - PAYLOAD_AT,))), Code.TOO_LARGE, b"do not fit"),
    ],
)
def test_a_wrong_header_in_shared_memory_is_refused(
    executor: symbiosis.Executor, raw: RawLocal, head: bytes, code: Code, text: bytes
) -> None:
    raw.ring(head)
    reply, message = raw.answer()
    assert reply.code is code
    assert text in message
    raw.ring(encode_call(ECHO, 2), bytes(range(64)))
    assert raw.answer(reply_at(ECHO))[1] == bytes(range(64))


@pytest.mark.fault
@only_local
@by_the_thousand
def test_random_headers_in_shared_memory_harm_nobody(executor: symbiosis.Executor, raw: RawLocal, times: int) -> None:
    chance = random.Random(times)
    for _ in range(times):
        head = bytearray(encode_call(chance.choice((ECHO, FORWARD)), 1))
        for _ in range(chance.randrange(1, 4)):
            head[chance.randrange(len(head))] = chance.randrange(256)
        raw.ring(bytes(head))
        raw.answer()
    tally.done[tally.RUNG] += times


@only_local
@pytest.mark.parametrize(
    "message",
    [
        b"\xc1",
        b"x" * 4096,
        encode_control(Hello()),
        encode_control(Grow(0)),
        encode_control(Grow(-1)),
        encode_control(Grow(100)),
        encode_control(Grow(1 << 40)),
        encode_control(Refusal(1, "no")),
    ],
)
def test_a_wrong_control_message_ends_that_connection_only(
    executor: symbiosis.Executor, raw: RawLocal, message: bytes
) -> None:
    raw.socket.send(message)
    assert raw.is_dropped()
    until(lambda: not any(s.client == "raw" for s in executor.server.sessions.values()))


@only_local
def test_a_segment_grows_to_the_limit_and_no_further(executor: symbiosis.Executor, raw: RawLocal) -> None:
    raw.socket.send(encode_control(Grow(FIRST_SLAB + 1)))
    message, (slab,), _, _ = socket.recv_fds(raw.socket, 4096, 1)
    grown = decode_from_executor(message)
    assert isinstance(grown, Grown) and grown.nbytes == os.fstat(slab).st_size == 2 * FIRST_SLAB
    with pytest.raises(PermissionError):
        os.ftruncate(slab, 0)  # sealed: a client cannot pull memory from under the executor
    os.close(slab)
    raw.socket.send(encode_control(Grow(1 << 30)))
    refused = decode_from_executor(raw.socket.recv(4096))
    assert isinstance(refused, Refusal) and refused.code == Code.TOO_LARGE


@only_local
def test_a_call_before_the_reply_to_the_last_ends_that_connection_only(scheme: str, start: Callable) -> None:
    executor = start(scheme, policy="lockstep")
    first = RawLocal(executor.endpoint).join()
    other = RawLocal(executor.endpoint).join()
    other.ring(encode_call(FORWARD, 1), bytes(4 * WIDTH))
    other.answer(reply_at(FORWARD))
    first.ring(encode_call(ECHO, 1), bytes(64))  # waits: the other is active and has not called
    until(lambda: len(executor.server.batcher) == 1)
    first.ring(encode_call(Call(Op.ECHO, 0, "uint8", (1 << 20,)), 2))
    assert first.is_dropped()
    other.ring(encode_call(ECHO, 2), bytes(64))
    assert other.answer()[0].seq == 2
    first.close()
    other.close()


@only_local
@pytest.mark.parametrize(("changed", "code"), [((-(2**40), 2**40), Code.BAD_SHAPE), ((7, 5), Code.OK)])
def test_ids_that_change_while_their_call_waits_are_checked_when_they_are_used(
    scheme: str, changed: tuple[int, int], code: Code, start: Callable
) -> None:
    """The executor looks rows up by its own copy of what it has checked."""
    executor = start(scheme, policy="lockstep", serve=["*"])
    number = {layer.name: n for n, layer in enumerate(executor.server.store.manifest)}["model.embed_tokens"]
    first, other = RawLocal(executor.endpoint).join(), RawLocal(executor.endpoint).join()
    other.ring(encode_call(FORWARD, 1), bytes(4 * WIDTH))
    other.answer(reply_at(FORWARD))
    lookup = Call(Op.LOOKUP, number, "float32", (2,))
    first.ring(encode_call(lookup, 1), struct.pack("<2q", 5, 7))
    until(lambda: len(executor.server.batcher) == 1)
    first.memory[PAYLOAD_AT : PAYLOAD_AT + 16] = struct.pack("<2q", *changed)
    other.ring(encode_call(ECHO, 2), bytes(64))
    reply, result = first.answer(reply_at(lookup))
    assert reply.code is code
    if code is Code.OK:
        assert result == bytes(MODEL.model.embed_tokens.weight[list(changed)].detach().numpy())
    first.close()
    other.close()


@only_local
def test_no_descriptor_of_a_client_can_make_the_executor_wait(executor: symbiosis.Executor, raw: RawLocal) -> None:
    """Its bells are made to block whoever writes to them, and filled."""
    for bell in raw.bells:
        with contextlib.suppress(OSError):
            os.eventfd_write(bell, 2**64 - 2)
        os.set_blocking(bell, True)
    raw.memory[CALL_AT : CALL_AT + CALL_SIZE] = encode_call(ECHO, 2)
    raw.memory[CLIENT_SLEEPS_AT] = 1
    struct.pack_into("<Q", raw.memory, CALL_BELL_AT, 2)
    other = Session(executor.endpoint)
    until(lambda: decode_reply(raw.memory[REPLY_AT : REPLY_AT + REPLY_SIZE]).seq == 2)
    assert torch.equal(other.call(Op.ECHO, 0, rows(1)), rows(1))
    other.close()


@only_local
@pytest.mark.parametrize("copies", [1, 3])
def test_a_descriptor_that_takes_long_to_close_holds_nobody_up(executor: symbiosis.Executor, copies: int) -> None:
    """A socket that lingers, with more to send than its other end reads. Ours is closed first, so the executor's is the last."""
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()) as slow:
        slow.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while slow.send(bytes(1 << 20)):
                pass
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 2 * int(WAIT_S)))
        slow.setblocking(True)
        stands, go_on = threading.Event(), threading.Event()
        executor.server.reactor.call_soon(lambda: stands.set() or go_on.wait(WAIT_S))
        assert stands.wait(WAIT_S)
        raw = RawLocal(executor.endpoint)
        socket.send_fds(raw.socket, [encode_control(Hello(client="slow"))], [slow.fileno()] * copies)
        slow.close()
        go_on.set()
        other = Session(executor.endpoint)
        assert raw.is_dropped()
        assert torch.equal(other.call(Op.ECHO, 0, rows(1)), rows(1))
        other.close()
        raw.close()


@only_local
@pytest.mark.parametrize("before_the_end", [0, 1, 63, 64, 65, 200, LONGEST_TEXT, LONGEST_TEXT + 64])
def test_calls_that_just_fill_the_segment_are_answered(executor: symbiosis.Executor, before_the_end: int) -> None:
    """... with results, and with refusals, whose text needs room, too."""
    session = Session(executor.endpoint)
    data = torch.randint(0, 255, ((FIRST_SLAB - PAYLOAD_AT - before_the_end) // 256, 256), dtype=torch.uint8)
    tail = torch.zeros(FIRST_SLAB - PAYLOAD_AT - before_the_end - data.numel(), dtype=torch.uint8)
    whole = torch.cat([data.reshape(-1), tail])[None]
    with pytest.raises(CallError, match="floating.point"):
        session.call(Op.FORWARD, 1, whole)
    assert torch.equal(session.call(Op.ECHO, 0, whole), whole)
    session.close()


@only_local
def test_connections_that_never_join_take_nobodys_place(executor: symbiosis.Executor) -> None:
    idle = [RawLocal(executor.endpoint) for _ in range(60)]
    session = Session(executor.endpoint)
    assert torch.equal(session.call(Op.ECHO, 0, rows(1)), rows(1))
    session.close()
    for connection in idle:
        connection.close()
