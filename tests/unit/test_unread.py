"""Whose message is read next: by tenant, not by connection; and what is kept until then is bounded."""

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from symbiosis.errors import Code
from symbiosis.protocol import Call, Op
from symbiosis.transport.tcp.intake import JOINED_AT_ONCE, FrameJoiner
from symbiosis.transport.tcp.listener import AT_ONCE, OF_ONE
from symbiosis.transport.tcp.peer import TcpPeer
from symbiosis.transport.tcp.unread import MOST_OF_ONE, Unread
from tests.processes import until
from tests.realm import WAIT_S, Raw, Realm

MOST_BYTES = 1 << 20
LONG = 4 * JOINED_AT_ONCE  # bytes of a call that is read in four parts
CONNECTIONS, CALLS = 20, 3  # 60 calls: fewer than are read at once of one tenant alone


def waiting(**messages: int) -> Unread[str, str]:
    """So many of each tenant, each of 100 bytes, and each over a connection of its own."""
    unread = Unread[str, str](most=8, most_bytes=MOST_BYTES)
    for tenant, count in messages.items():
        for number in range(count):
            unread.put(tenant, f"{tenant}{number}".encode(), f"{tenant}{number}", 100)
    return unread


def take(unread: Unread[str, str]) -> str:
    tenant = unread.next()
    assert tenant is not None
    return unread.take(tenant)


def taken(unread: Unread[str, str]) -> list[str]:
    return [take(unread) for _ in range(len(unread))]


def test_a_message_that_is_given_back_comes_first_when_it_is_its_tenants_turn_again() -> None:
    unread = waiting(a=2, b=1)
    unread.give_back(take(unread))
    assert len(unread) == 3 and unread.holds(b"a0")
    assert taken(unread) == ["b0", "a0", "a1"]
    unread.put("a", b"x", "last", MOST_BYTES)
    unread.give_back(take(unread))
    assert not unread.put("a", b"y", "one more", 1), "its bytes count as long as it waits"
    assert taken(unread) == ["last"] and not unread.waiting


def test_tenants_are_read_one_after_the_other_and_their_messages_keep_their_order() -> None:
    unread = waiting(a=4, b=2, c=1)
    assert taken(unread) == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]
    assert not unread.waiting


def test_who_comes_later_waits_for_one_message_of_each() -> None:
    unread = waiting(a=100)
    assert take(unread) == "a0"
    unread.put("b", b"b", "b0", 100)
    assert taken(unread)[:3] == ["a1", "b0", "a2"]


def test_those_whose_long_messages_were_begun_are_passed_over() -> None:
    unread = waiting(a=2, b=1, c=1)
    assert unread.next(besides={"a", "b"}) == "c" and unread.take("c") == "c0"
    assert unread.next(besides={"a", "b"}) is None
    assert taken(unread) == ["a0", "b0", "a1"]


def test_much_of_one_connection_has_no_room_and_others_have() -> None:
    unread = waiting(a=3)
    assert all(unread.put("b", b"one", f"b{number}", 100) for number in range(8))
    assert not unread.put("b", b"one", "one more", 100)
    assert unread.put("b", b"another", "of another", 100) and unread.put("c", b"c", "c0", 100)
    assert [take(unread) for _ in range(2)] == ["a0", "b0"]
    assert unread.put("b", b"one", "one more", 100)


def test_many_bytes_of_one_tenant_have_no_room_but_for_one_large_message() -> None:
    unread = waiting()
    assert unread.put("a", b"1", "large", 10 * MOST_BYTES)
    assert not unread.put("a", b"2", "small", 1)
    assert unread.put("b", b"3", "large of b", 10 * MOST_BYTES)
    assert take(unread) == "large"
    assert unread.put("a", b"2", "small", 1)
    assert not unread.put("a", b"2", "large", 10 * MOST_BYTES)


def test_very_many_messages_of_one_tenant_have_no_room() -> None:
    """However many connections they came by."""
    unread = waiting(a=MOST_OF_ONE)
    assert not unread.put("a", b"one more", "one more", 100) and unread.put("b", b"b", "b0", 100)
    take(unread)
    assert unread.put("a", b"one more", "one more", 100)


def test_a_message_without_room_leaves_no_empty_queue() -> None:
    """The connection's other messages wait among those of clients that have not joined."""
    unread = Unread[str, str](most=1, most_bytes=MOST_BYTES)
    assert unread.put("strangers", b"1", "hello", 100) and not unread.put("a", b"1", "call", 100)
    assert taken(unread) == ["hello"] and not unread.waiting


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
        self._listener._intake.take_in(AT_ONCE)
        return self._come(self._listener._intake.unread)

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
    held = Held(realm, lambda unread: len(unread) == CONNECTIONS * CALLS + 1)
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
    put, came = Unread.put, list[str]()

    def look(unread: Any, tenant: str, *rest: Any) -> bool:
        came.append(tenant)
        return put(unread, tenant, *rest)

    monkeypatch.setattr(Unread, "put", look)
    held = Held(realm, lambda unread: len(came) == 50 + 1)
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
