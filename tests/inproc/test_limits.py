"""What one tenant may have under way: told at the join, checked before anything is allocated, and how clients live with it."""

import threading
import time
from collections.abc import Callable

import pytest
import torch

from symbiosis.client.session import Session
from symbiosis.errors import CallError, Code
from symbiosis.executor.accounts import ALWAYS_ROOM, Account, ServedSession
from symbiosis.protocol import (
    Bye,
    Call,
    Limits,
    Op,
    decode_reply,
    encode_control,
)
from tests.conftest import tiny_llama
from tests.processes import until
from tests.realm import ROWS, Raw, Reader, Realm, echoes


def account(*readers: Reader, **limits: int) -> Account:
    made = Account(Limits(**limits))
    made.readers.update(readers)  # type: ignore[arg-type]
    return made


def in_flight(account: Account) -> ServedSession:
    """A session of this tenant, whose calls count with those of its others."""
    return ServedSession(1, Reader(), "", None, False, 0.0, account)  # type: ignore[arg-type]


def refusal(account: Account, reader: Reader, held: int = 100, own: int = 0, now: float = 100.0) -> CallError | None:
    try:
        account.check(reader, held, own, now)  # type: ignore[arg-type]
    except CallError as error:
        assert error.code is Code.BUSY and error.retry_s > 0
        return error
    return None


# ---------------------------------------------------------------- the account


def test_calls_in_flight_are_counted_over_all_sessions() -> None:
    one = account(max_tenant_in_flight=2)
    for _ in range(2):
        assert not refusal(one, Reader())
        one.sent(1)
        in_flight(one).begin(100)
    error = refusal(one, Reader())
    assert error and "2 calls in flight" in error.message and "--max-tenant-in-flight" in error.message
    in_flight(one).end(100)
    assert not refusal(one, Reader())


def test_bytes_are_those_of_calls_and_of_replies_that_nobody_reads() -> None:
    slow = Reader(3000, 3000)
    one = account(slow, max_tenant_bytes=10_000)
    one.sent(1)
    in_flight(one).begin(2000)
    assert not refusal(one, Reader(), 2000)
    with pytest.raises(CallError, match="this one takes 10001") as refused:
        one.check(Reader(), 10_001, 0, 100.0)  # type: ignore[arg-type]
    assert refused.value.code is Code.TOO_LARGE
    error = refusal(one, Reader(), 2001)
    assert error and "10000 bytes" in error.message and "--max-tenant-bytes" in error.message
    slow.unread = ()
    assert not refusal(one, Reader(), 8000)


def test_a_session_that_does_not_read_has_few_large_calls() -> None:
    large = 2 * ALWAYS_ROOM
    one = account()
    assert not refusal(one, Reader(large), large)
    assert refusal(one, Reader(large, large), large)
    assert refusal(one, Reader(), large, own=1000)
    assert not refusal(one, Reader(large), 1000), "a small call behind one large reply is usual"
    assert not refusal(one, Reader(*[100_000] * 20), 100_000)
    assert refusal(one, Reader(*[100_000] * 42), 100_000)


def test_a_seconds_worth_of_rows_is_saved_up_and_debts_are_waited_for() -> None:
    one = account(max_tenant_rows_per_s=1000)
    assert not refusal(one, Reader(), now=100.0)
    one.sent(3500)
    in_flight(one).begin(100)
    error = refusal(one, Reader(), now=100.5)
    assert error and error.retry_s == pytest.approx(2.0, abs=0.01)
    assert refusal(one, Reader(), now=100.5 + error.retry_s - 0.01)
    assert not refusal(one, Reader(), now=100.5 + error.retry_s)
    one.sent(1)
    in_flight(one).begin(100)
    assert not refusal(one, Reader(), now=1000.0)
    one.sent(1001)
    in_flight(one).begin(100)
    assert refusal(one, Reader(), now=1000.0), "more than a second's worth was saved up"


# ---------------------------------------------------------------- over the wire


def test_limits_are_told_at_the_join(start: Callable[..., Realm]) -> None:
    realm = start(max_tenant_sessions=3, max_tenant_in_flight=4, max_tenant_bytes=1 << 20, max_tenant_rows_per_s=10**9)
    session = realm.session()
    limits = session.welcome.limits
    assert (limits.max_tenant_sessions, limits.max_tenant_in_flight) == (3, 4)
    assert (limits.max_tenant_bytes, limits.max_tenant_rows_per_s) == (1 << 20, 10**9)
    session.close()


def test_a_tenants_sessions_are_counted_not_those_of_others(start: Callable[..., Realm]) -> None:
    realm = start(max_tenant_sessions=2)
    realm.let_in("bob")
    mine = [realm.session() for _ in range(2)]
    assert all(map(echoes, mine))
    with pytest.raises(CallError, match="a tenant may have 2 sessions") as refused:
        realm.session().call(Op.ECHO, 0, ROWS)
    assert refused.value.code is Code.LIMIT
    other = realm.session("bob")
    assert echoes(other)
    mine.pop().close()
    until(lambda: len(realm.executor.server.sessions) == 2)
    again = realm.session()
    assert echoes(again)
    for session in (*mine, other, again):
        session.close()


def test_without_keys_every_session_is_a_tenant(serve: Callable) -> None:
    executor = serve(tiny_llama(), listen=["tcp://127.0.0.1:0"], max_tenant_sessions=1, max_tenant_in_flight=1)
    sessions = [Session(executor.endpoint) for _ in range(3)]
    assert all(map(echoes, sessions))
    for session in sessions:
        session.close()


def test_a_client_over_its_rate_is_slowed_down_not_failed(
    start: Callable[..., Realm], caplog: pytest.LogCaptureFixture
) -> None:
    realm = start(max_tenant_rows_per_s=200, heartbeat_s=0.4)
    realm.let_in("bob")
    session, other = realm.session(), realm.session("bob")
    begun = time.monotonic()
    for _ in range(2):
        assert torch.equal(session.call(Op.ECHO, 0, torch.ones(250, 4)), torch.ones(250, 4))
    assert echoes(session)
    assert time.monotonic() - begun > 1.4, (
        "500 rows at 200 a second, of which the first 200 are free, before the last that are asked for"
    )
    assert session.stats.slowed_s > 1.4 and session.stats.reconnects == 0
    assert "slows this client down: a tenant may send 200 rows a second" in caplog.text
    begun = time.monotonic()
    assert echoes(other)
    assert other.stats.slowed_s == 0
    assert realm.executor.server.ledger.errors["BUSY"] >= 2
    assert realm.executor.server.ledger.dropped == 0
    session.close()
    other.close()


def test_who_would_wait_longer_than_its_patience_is_told(start: Callable[..., Realm]) -> None:
    realm = start(max_tenant_rows_per_s=10)
    session = realm.session(patience=1.0)
    begun = time.monotonic()
    session.call(Op.ECHO, 0, torch.ones(1000, 4))
    with pytest.raises(CallError, match="10 rows a second: try again in [0-9]+") as refused:
        session.call(Op.ECHO, 0, torch.ones(1, 4))
    assert refused.value.code is Code.BUSY and refused.value.retry_s + time.monotonic() - begun > 98
    assert refused.value.retry_s < 100
    session.close()


def test_many_sessions_share_few_calls_in_flight(start: Callable[..., Realm]) -> None:
    """They wait for each other, and all get on."""
    realm = start(max_tenant_in_flight=1, policy="lockstep")
    sessions = [realm.session() for _ in range(4)]
    right: list[bool] = []

    def work(session: Session) -> None:
        for _ in range(25):
            right.append(echoes(session))

    threads = [threading.Thread(target=work, args=(session,)) for session in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert right == [True] * 100
    until(lambda: realm_is_idle(realm))
    for session in sessions:
        session.close()


def realm_is_idle(realm: Realm) -> bool:
    accounts = realm.executor.server.sessions.accounts.values()
    return [(account.in_flight, account.bytes) for account in accounts] == [(0, 0)]


def test_a_refusal_by_the_wire_says_when_to_try_again(start: Callable[..., Realm]) -> None:
    realm = start(max_tenant_rows_per_s=10)
    raw = Raw.joined(realm.endpoint("alice"))
    raw.send(1, Call(Op.ECHO, 0, "float32", (20, 8)))
    raw.send(2)
    assert {decode_reply(raw.socket.recv_multipart()[0]).seq for _ in range(2)} == {1, 2}
    until(lambda: realm_is_idle(realm))
    raw.send(3)
    reply = decode_reply(raw.socket.recv_multipart()[0])
    assert reply.code is Code.BUSY and 0 < reply.wait_us < 2_200_000
    raw.close()


def test_nothing_is_allocated_for_a_call_that_is_refused(
    start: Callable[..., Realm], monkeypatch: pytest.MonkeyPatch
) -> None:
    realm = start(max_tenant_bytes=100_000)
    session = realm.session(patience=0.0)
    assert echoes(session)
    made: list[int] = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **named: made.append(1) or empty(*args, **named))
    raw = Raw.joined(realm.endpoint("alice"))
    raw.send(1, Call(Op.ECHO, 0, "float32", (20_000, 8)))
    assert decode_reply(raw.socket.recv_multipart()[0]).code is Code.TOO_LARGE
    assert not made
    raw.send(2)
    assert decode_reply(raw.socket.recv_multipart()[0]).code is Code.OK
    assert made
    raw.close()
    session.close()


def test_what_a_client_that_left_had_under_way_is_given_back(start: Callable[..., Realm]) -> None:
    realm = start(policy="lockstep")
    active = realm.session()
    assert torch.equal(active.call(Op.FORWARD, 1, torch.ones(1, 64)), active.call(Op.FORWARD, 1, torch.ones(1, 64)))
    raw = Raw.joined(realm.endpoint("alice"))
    raw.send(1)  # waits for the active one
    until(lambda: not realm_is_idle(realm))
    raw.socket.send(encode_control(Bye()))
    until(lambda: realm_is_idle(realm))
    raw.close()
    active.close()
