"""Whose message is read next: by tenant, not by connection; and what is kept until then is bounded."""

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from symbiosis.errors import Code
from symbiosis.transport.tcp.listener import AT_ONCE, OF_ONE
from symbiosis.transport.tcp.peer import TcpPeer
from symbiosis.transport.tcp.turns import MOST_OF_ONE, Turns
from tests.processes import until
from tests.realm import WAIT_S, Raw, Realm

MOST_BYTES = 1 << 20
CONNECTIONS, CALLS = 20, 3  # 60 calls: fewer than are read at once of one tenant alone


def waiting(**messages: int) -> Turns[str, str]:
    """So many of each tenant, each of 100 bytes, and each over a connection of its own."""
    turns = Turns[str, str](most=8, most_bytes=MOST_BYTES)
    for tenant, count in messages.items():
        for number in range(count):
            turns.put(tenant, f"{tenant}{number}".encode(), f"{tenant}{number}", 100)
    return turns


def taken(turns: Turns[str, str]) -> list[str]:
    return [turns.take() for _ in range(len(turns))]


def test_everybody_has_a_turn_and_everybodys_messages_keep_their_order() -> None:
    turns = waiting(a=4, b=2, c=1)
    assert taken(turns) == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]
    assert not turns.waiting


def test_who_comes_later_waits_for_one_message_of_each() -> None:
    turns = waiting(a=100)
    assert turns.take() == "a0"
    turns.put("b", b"b", "b0", 100)
    assert taken(turns)[:3] == ["a1", "b0", "a2"]


def test_much_of_one_connection_has_no_room_and_others_have() -> None:
    turns = waiting(a=3)
    assert all(turns.put("b", b"one", f"b{number}", 100) for number in range(8))
    assert not turns.put("b", b"one", "one more", 100)
    assert turns.put("b", b"another", "of another", 100) and turns.put("c", b"c", "c0", 100)
    assert [turns.take() for _ in range(2)] == ["a0", "b0"]
    assert turns.put("b", b"one", "one more", 100)


def test_many_bytes_of_one_tenant_have_no_room_but_for_one_large_message() -> None:
    turns = waiting()
    assert turns.put("a", b"1", "large", 10 * MOST_BYTES)
    assert not turns.put("a", b"2", "small", 1)
    assert turns.put("b", b"3", "large of b", 10 * MOST_BYTES)
    assert turns.take() == "large"
    assert turns.put("a", b"2", "small", 1)
    assert not turns.put("a", b"2", "large", 10 * MOST_BYTES)


def test_very_many_messages_of_one_tenant_have_no_room() -> None:
    """However many connections they came by."""
    turns = waiting(a=MOST_OF_ONE)
    assert not turns.put("a", b"one more", "one more", 100) and turns.put("b", b"b", "b0", 100)
    turns.take()
    assert turns.put("a", b"one more", "one more", 100)


def test_a_message_without_room_leaves_no_empty_queue() -> None:
    """Its connection's others wait for another turn, that of who has not joined."""
    turns = Turns[str, str](most=1, most_bytes=MOST_BYTES)
    assert turns.put("strangers", b"1", "hello", 100) and not turns.put("a", b"1", "call", 100)
    assert taken(turns) == ["hello"] and not turns.waiting


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
        return self._come(self._listener._intake.turns)

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
    held = Held(realm, lambda turns: len(turns) == CONNECTIONS * CALLS + 1)
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


def test_a_flood_makes_nobody_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that has come is looked at, however much of it is one connection's; who has sent too much is told so, at once."""
    realm = Realm(tmp_path)
    realm.let_in("mallory")
    flood, alice = Raw.joined(realm.endpoint("mallory")), Raw.joined(realm.endpoint("alice"))
    put, came = Turns.put, list[str]()

    def look(turns: Any, tenant: str, *rest: Any) -> bool:
        came.append(tenant)
        return put(turns, tenant, *rest)

    monkeypatch.setattr(Turns, "put", look)
    held = Held(realm, lambda turns: len(came) == 50 + 1)
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
