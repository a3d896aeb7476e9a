"""Whose message is read next: by tenant, not by connection; and what is kept until then is bounded."""

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from symbiosis.errors import Code
from symbiosis.protocol import Call, Limits, Op
from symbiosis.transport.reactor import Reactor
from symbiosis.transport.tcp.call_frames import JOINED_AT_ONCE, FrameJoiner, Message
from symbiosis.transport.tcp.listener import AT_ONCE, OF_ONE
from symbiosis.transport.tcp.peer import TcpPeer
from symbiosis.transport.tcp.tenant_queues import MOST_OF_ONE, TenantQueues
from tests.processes import until
from tests.realm import WAIT_S, Raw, Realm

MOST_BYTES = 1 << 20
LONG = 4 * JOINED_AT_ONCE  # bytes of a call that is read in four parts
CONNECTIONS, CALLS = 20, 3  # 60 calls: fewer than are read at once of one tenant alone


def message(connection: bytes, text: str, nbytes: int = 100) -> Message:
    made = Message()
    made += [zmq.Frame(connection), zmq.Frame(text.encode())]
    made.nbytes = nbytes
    return made


def queues(most: int = 8, **messages: int) -> TenantQueues:
    """So many of each tenant, each of 100 bytes, and each over a connection of its own."""
    limits = Limits(max_in_flight=most, max_tenant_bytes=MOST_BYTES)
    made = TenantQueues(None, Reactor(), limits, str, print, encrypted=False)
    for tenant, count in messages.items():
        for number in range(count):
            made.put(tenant, message(f"{tenant}{number}".encode(), f"{tenant}{number}"))
    return made


def take(made: TenantQueues, tenant: str | bytes | None = None) -> str:
    tenant = tenant or made.next()
    assert tenant is not None
    text = made.first(tenant)[1].bytes.decode()
    made.remove_first(tenant)
    return text


def taken(made: TenantQueues) -> list[str]:
    return [take(made) for _ in range(len(made))]


def test_a_message_that_was_begun_comes_first_when_it_is_its_tenants_turn_again() -> None:
    made = queues(a=2, b=1)
    made.first("a")
    assert len(made) == 3 and made.holds(b"a0")
    assert taken(made) == ["b0", "a0", "a1"]
    made.put("a", message(b"x", "last", MOST_BYTES))
    made.first("a")
    assert not made.put("a", message(b"y", "one more", 1)), "its bytes count as long as it waits"
    assert taken(made) == ["last"] and not made.waiting


def test_tenants_are_read_one_after_the_other_and_their_messages_keep_their_order() -> None:
    made = queues(a=4, b=2, c=1)
    assert taken(made) == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]
    assert not made.waiting


def test_who_comes_later_waits_for_one_message_of_each() -> None:
    made = queues(a=100)
    assert take(made) == "a0"
    made.put("b", message(b"b", "b0"))
    assert taken(made)[:3] == ["a1", "b0", "a2"]


def test_those_whose_long_messages_were_begun_are_passed_over() -> None:
    made = queues(a=2, b=1, c=1)
    assert made.next(besides={"a", "b"}) == "c" and take(made, "c") == "c0"
    assert made.next(besides={"a", "b"}) is None
    assert taken(made) == ["a0", "b0", "a1"]


def test_much_of_one_connection_has_no_room_and_others_have() -> None:
    made = queues(a=3)
    assert all(made.put("b", message(b"one", f"b{number}")) for number in range(8))
    assert not made.put("b", message(b"one", "one more"))
    assert made.put("b", message(b"another", "of another")) and made.put("c", message(b"c", "c0"))
    assert [take(made) for _ in range(2)] == ["a0", "b0"]
    assert made.put("b", message(b"one", "one more"))


def test_many_bytes_of_one_tenant_have_no_room_but_for_one_large_message() -> None:
    made = queues()
    assert made.put("a", message(b"1", "large", 10 * MOST_BYTES))
    assert not made.put("a", message(b"2", "small", 1))
    assert made.put("b", message(b"3", "large of b", 10 * MOST_BYTES))
    assert take(made) == "large"
    assert made.put("a", message(b"2", "small", 1))
    assert not made.put("a", message(b"2", "large", 10 * MOST_BYTES))


def test_very_many_messages_of_one_tenant_have_no_room() -> None:
    """However many connections they came by."""
    made = queues(a=MOST_OF_ONE)
    assert not made.put("a", message(b"one more", "one more")) and made.put("b", message(b"b", "b0"))
    take(made)
    assert made.put("a", message(b"one more", "one more"))


def test_a_message_without_room_leaves_no_empty_queue() -> None:
    """The connection's other messages wait among those of clients that have not joined."""
    made = queues(most=1)
    assert made.put("strangers", message(b"1", "hello")) and not made.put("a", message(b"1", "call"))
    assert taken(made) == ["hello"] and not made.waiting


class Held:
    """The executor's thread does nothing until `come` has taken in all that was sent while it was held."""

    def __init__(self, realm: Realm, come: Callable[[Any], bool]) -> None:
        self._held, self._sent, self._problems = threading.Event(), threading.Event(), list[BaseException]()
        (self._listener,) = realm.executor.server.listeners
        self._come = come
        realm.executor.server.reactor.call_soon(self._hold)

    def _hold(self) -> None:
        self._held.set()
        try:
            assert self._sent.wait(WAIT_S)
            until(self._all_came, "all messages")
        except BaseException as error:
            self._problems.append(error)

    def _all_came(self) -> bool:
        self._listener._queues.take_in(AT_ONCE)
        return self._come(self._listener._queues)

    def __enter__(self) -> None:
        assert self._held.wait(WAIT_S)

    def __exit__(self, *_: object) -> None:
        self._sent.set()

    def check(self) -> None:
        assert not self._problems


def test_one_call_is_answered_before_anothers_many_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mallory's calls, over many connections within their limits, have all come before alice's one."""
    realm = Realm(tmp_path, policy="opportunistic")
    realm.let_in("mallory")
    many = [Raw.joined(realm.endpoint("mallory")) for _ in range(CONNECTIONS)]
    alice = Raw.joined(realm.endpoint("alice"))
    server, events, reply = realm.executor.server, list[str](), TcpPeer.reply
    arrived = server.dispatch.arrived

    def arrive(peer: Any, *rest: Any) -> None:
        events.append(f"{peer.tenant} read")
        arrived(peer, *rest)

    def answer(peer: Any, *rest: Any) -> None:
        events.append(f"{peer.tenant} answered")
        reply(peer, *rest)

    server.dispatch.arrived = arrive  # type: ignore[method-assign]
    monkeypatch.setattr(TcpPeer, "reply", answer)
    held = Held(realm, lambda queues: len(queues) == CONNECTIONS * CALLS + 1)
    with held:
        for number in range(CALLS):
            for raw in many:
                raw.send(number)
        alice.send(0)
    assert alice.codes(1) == [Code.OK]
    for raw in many:
        assert raw.codes(CALLS) == [Code.OK] * CALLS
    held.check()
    before = events[: events.index("alice answered")]
    assert before.count("mallory read") <= 2 + OF_ONE, before
    assert events.count("mallory answered") == CONNECTIONS * CALLS
    for raw in (alice, *many):
        raw.close()
    realm.executor.close()


def test_a_call_is_computed_before_more_of_anothers_long_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alice's call comes while the first part of mallory's is read."""
    realm = Realm(tmp_path)
    realm.let_in("mallory")
    mallory, alice = Raw.joined(realm.endpoint("mallory")), Raw.joined(realm.endpoint("alice"))
    socket = realm.executor.server.listeners[0]._socket  # type: ignore[attr-defined]
    events, some, reply = list[str](), FrameJoiner.some, TcpPeer.reply

    def join(joiner: FrameJoiner) -> bool:
        if not events:
            alice.send(0)
            until(lambda: socket.getsockopt(zmq.EVENTS) & zmq.POLLIN, "alice's call")
        events.append("a part")
        return some(joiner)

    def answer(peer: TcpPeer, *rest: Any) -> None:
        events.append(str(peer.tenant))
        reply(peer, *rest)

    monkeypatch.setattr(FrameJoiner, "some", join)
    monkeypatch.setattr(TcpPeer, "reply", answer)
    mallory.send(0, Call(Op.ECHO, 0, "float32", (LONG // 4, 1)))
    assert mallory.codes(1) == alice.codes(1) == [Code.OK]
    assert events == ["a part", "alice", *["a part"] * (LONG // JOINED_AT_ONCE - 1), "mallory"]
    for raw in (alice, mallory):
        raw.close()
    realm.executor.close()


def test_a_flood_makes_nobody_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that has come is looked at, however much of it is one connection's; who has sent too much is told so, at once."""
    realm = Realm(tmp_path)
    realm.let_in("mallory")
    flood, alice = Raw.joined(realm.endpoint("mallory")), Raw.joined(realm.endpoint("alice"))
    put, came = TenantQueues.put, list[str]()

    def look(queues: Any, tenant: str, *rest: Any) -> bool:
        came.append(tenant)
        return put(queues, tenant, *rest)

    monkeypatch.setattr(TenantQueues, "put", look)
    held = Held(realm, lambda queues: len(came) == 50 + 1)
    with held:
        for number in range(50):
            flood.send(number)
        alice.send(0)
    assert alice.codes(1) == [Code.OK]
    codes = flood.codes(50)
    held.check()
    assert came.count("alice") == 1
    assert Counter(codes) == {Code.OK: 8, Code.BUSY: 42}
    assert realm.executor.server.ledger.errors["BUSY"] == 42
    flood.close()
    alice.close()
    realm.executor.close()
