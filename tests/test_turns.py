"""Whose message is read next: by tenant, not by connection; and what is kept until then is bounded."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from symbiosis.errors import Code
from symbiosis.transport import turns as module
from symbiosis.transport.turns import Turns
from symbiosis.transport.zeromq import OF_ONE, Peer
from tests.processes import until
from tests.realm import WAIT_S, Raw, Realm

CONNECTIONS, CALLS = 20, 3  # 60 calls: fewer than are read at once of one tenant alone


def waiting(**messages: int) -> Turns[str, str]:
    """So many of each tenant, each of 100 bytes, and each over a connection of its own."""
    turns = Turns[str, str]()
    for tenant, count in messages.items():
        for number in range(count):
            turns.put(tenant, f"{tenant}{number}".encode(), f"{tenant}{number}", 100)
    return turns


def taken(turns: Turns[str, str]) -> list[str]:
    return [turns.take() for _ in range(len(turns))]


def test_everybody_has_a_turn_and_everybodys_messages_keep_their_order() -> None:
    turns = waiting(a=4, b=2, c=1)
    assert taken(turns) == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]
    assert not turns.waiting and not turns.full


def test_who_comes_later_waits_for_one_message_of_each() -> None:
    turns = waiting(a=100)
    assert not turns.full
    assert turns.take() == "a0"
    turns.put("b", b"b", "b0", 100)
    assert taken(turns)[:3] == ["a1", "b0", "a2"]


def test_no_more_is_taken_in_while_much_of_one_connection_waits() -> None:
    turns = waiting(a=3)
    for number in range(module.MOST):
        turns.put("b", b"one", f"b{number}", 100)
    assert not turns.full
    turns.put("b", b"one", "one more", 100)
    assert turns.full
    assert [turns.take() for _ in range(2)] == ["a0", "b0"]
    assert not turns.full


def test_no_more_is_taken_in_while_many_bytes_wait_but_for_one_large_message() -> None:
    turns = Turns[str, str]()
    turns.put("a", b"1", "large", 10 * module.MOST_BYTES)
    assert not turns.full
    turns.put("b", b"2", "small", 1)
    assert turns.full
    assert turns.take() == "large"
    assert not turns.full
    turns.put("a", b"1", "large", 10 * module.MOST_BYTES)
    assert not turns.full


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
        self._listener._take_in()
        return self._come(self._listener._turns)

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
    server, events, reply = realm.executor.server, list[str](), Peer.reply
    arrived = server.arrived

    def arrive(peer: Any, *rest: Any) -> None:
        events.append(f"{peer.tenant} read")
        arrived(peer, *rest)

    def answer(peer: Any, *rest: Any) -> None:
        events.append(f"{peer.tenant} answered")
        reply(peer, *rest)

    server.arrived = arrive  # type: ignore[method-assign]
    monkeypatch.setattr(Peer, "reply", answer)
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


def test_most_of_a_flood_stays_in_the_network(tmp_path: Path) -> None:
    """What was sent is answered in its order, or refused."""
    realm = Realm(tmp_path)
    raw = Raw.joined(realm.endpoint("alice"))
    held = Held(realm, lambda turns: len(turns) == module.MOST + 1)
    with held:
        for number in range(50):
            raw.send(number)
    codes = raw.codes(50)
    held.check()
    assert set(codes) == {Code.OK, Code.LIMIT} and codes.count(Code.OK) >= 8
    raw.close()
    realm.executor.close()
