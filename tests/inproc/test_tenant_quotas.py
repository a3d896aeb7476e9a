"""Nobody is exempt from limits: observers, figures, all tenants together; and what each has had is told, also after it left."""

import time
from collections.abc import Callable

import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import nn

from symbiosis.cli import top
from symbiosis.client.session import Session
from symbiosis.errors import CallError, Code
from symbiosis.executor.accounts import ALWAYS_ROOM, Account, BytePool, ServedSession
from symbiosis.executor.observe.latest_figures import SNAPSHOTS_PER_S
from symbiosis.executor.observe.prometheus import PrometheusCollector
from symbiosis.executor.sessions import MOST_OBSERVERS
from symbiosis.protocol import SEED_BYTES, Call, Limits, Op, View
from tests.realm import ROWS, Reader, Realm, echoes

# ---------------------------------------------------------------- all tenants together


def test_all_tenants_together_hold_no_more_than_the_executor_may() -> None:
    others = Reader(3 * ALWAYS_ROOM)
    pool = BytePool(10 * ALWAYS_ROOM, lambda: [others])  # type: ignore[list-item]
    first, second = Account(Limits(), pool), Account(Limits(), pool)
    session = ServedSession(1, Reader(), "", None, False, 0.0, first)  # type: ignore[arg-type]
    session.begin(5 * ALWAYS_ROOM)
    second.check(Reader(), 2 * ALWAYS_ROOM, 0, 0.0)  # type: ignore[arg-type]
    with pytest.raises(CallError, match="--max-bytes") as refused:
        second.check(Reader(), 2 * ALWAYS_ROOM + 1, 0, 0.0)  # type: ignore[arg-type]
    assert refused.value.code is Code.BUSY and refused.value.retry_s > 0
    session.begin(20 * ALWAYS_ROOM)
    second.check(Reader(), ALWAYS_ROOM, 0, 0.0)  # type: ignore[arg-type]
    session.end(20 * ALWAYS_ROOM)
    session.end(5 * ALWAYS_ROOM)
    assert pool.bytes == 0


def test_what_a_call_needs_while_it_is_computed_counts() -> None:
    one = Account(Limits(max_tenant_bytes=1000))
    one.check(Reader(), 600, 0, 0.0, scratch=400)  # type: ignore[arg-type]
    with pytest.raises(CallError, match="this one takes 1001"):
        one.check(Reader(), 600, 0, 0.0, scratch=401)  # type: ignore[arg-type]


def test_what_a_tenant_may_have_of_an_executors_memory_is_an_option(start: Callable[..., Realm]) -> None:
    realm = start(max_bytes=1 << 20)
    session = realm.session(patience=0.2)
    assert echoes(session), "some room is always there"
    with pytest.raises(CallError, match="--max-bytes"):
        session.call(Op.ECHO, 0, torch.zeros(ALWAYS_ROOM // 4))
    session.close()


@pytest.mark.parametrize(
    "option", ["max_tenant_rows_per_s", "max_tenant_multiplications_per_s", "max_tenant_bytes_per_s"]
)
def test_a_tenant_over_its_rate_is_told_to_wait(option: str, start: Callable[..., Realm]) -> None:
    realm = start(**{option: 10})
    session = realm.session(patience=0.3)
    x = torch.ones(50, 64)
    session.call(Op.FORWARD, 1, x)
    with pytest.raises(CallError, match=option.replace("_", "-")) as refused:
        session.call(Op.FORWARD, 1, x)
    assert refused.value.code is Code.BUSY and refused.value.retry_s > 1
    session.close()


# ---------------------------------------------------------------- observers


def test_observers_are_counted_and_limited(llama: nn.Module, serve: Callable) -> None:
    executor = serve(llama, max_call_bytes=1 << 20, max_in_flight=1)
    observers = [Session(executor.endpoint, observer=True) for _ in range(MOST_OBSERVERS)]
    for observer in observers:
        top.snapshot(observer)
    with pytest.raises(CallError, match="observers watch") as refused:
        top.snapshot(Session(executor.endpoint, observer=True))
    assert refused.value.code is Code.LIMIT
    client = Session(executor.endpoint)
    assert torch.equal(client.call(Op.ECHO, 0, ROWS), ROWS), "clients are let in all the same"
    with pytest.raises(CallError, match="--max-call-bytes"):
        observers[0].call(Op.ECHO, 0, torch.zeros(1 << 19))
    for session in (*observers, client):
        session.close()


def test_a_tenants_observers_are_sessions_of_it_and_hold_no_more(start: Callable[..., Realm]) -> None:
    realm = start(max_tenant_sessions=2, max_tenant_bytes=100_000)
    observers = [Session(realm.endpoint("alice"), observer=True, patience=0.2) for _ in range(2)]
    for observer in observers:
        observer.call(Op.ECHO, 0, ROWS)
    with pytest.raises(CallError, match="may have 2 sessions"):
        realm.session().call(Op.ECHO, 0, ROWS)
    with pytest.raises(CallError, match="--max-tenant-bytes"):
        observers[0].call(Op.ECHO, 0, torch.zeros(20_000))
    with pytest.raises(CallError, match="figures"):
        observers[0].call(Op.STATS, 0)
    for observer in observers:
        observer.close()


def test_figures_are_made_so_often_and_told_as_often_as_asked(llama: nn.Module, serve: Callable) -> None:
    executor = serve(llama)
    made, snapshot = [], executor.server.snapshot
    executor.server.snapshot = lambda: made.append(1) or snapshot()
    observer = Session(executor.endpoint, observer=True)
    begun = time.monotonic()
    for _ in range(5 * SNAPSHOTS_PER_S):
        assert top.snapshot(observer).uptime_s > 0
    assert len(made) <= SNAPSHOTS_PER_S * (1 + time.monotonic() - begun) + 2
    observer.close()


# ---------------------------------------------------------------- what each has had


def test_usage_outlives_sessions_and_is_told_by_tenant(start: Callable[..., Realm]) -> None:
    realm = start()
    realm.let_in("bob")
    for name, calls in (("alice", 3), ("bob", 1), ("alice", 2)):
        session = realm.session(name)
        for _ in range(calls):
            session.call(Op.FORWARD, 1, torch.ones(10, 64))
        session.close()
    usage = realm.executor.server.sessions.usage
    assert (usage["alice"].calls, usage["bob"].calls) == (5, 1)
    assert (usage["alice"].rows, usage["alice"].bytes) == (50, 5 * usage["bob"].bytes)
    assert usage["alice"].multiplications == 5 * usage["bob"].multiplications >= 50 * 64 * 32
    assert usage["alice"].seconds > 0
    registry = CollectorRegistry()
    registry.register(PrometheusCollector(realm.executor.server.snapshot))
    for name in ("calls", "rows", "multiplications", "bytes", "compute_seconds"):
        assert registry.get_sample_value(f"symbiosis_tenant_{name}_total", {"tenant": "bob"}) > 0  # type: ignore[operator]


def test_without_keys_all_usage_is_one(llama: nn.Module, serve: Callable) -> None:
    executor = serve(llama)
    for _ in range(2):
        session = Session(executor.endpoint)
        session.call(Op.ECHO, 0, ROWS)
        session.close()
    observer = Session(executor.endpoint, observer=True)
    tenants = top.snapshot(observer).tenants
    assert list(tenants) == [""] and tenants[""].calls >= 2 and tenants[""].bytes >= 4 * ROWS.nbytes
    observer.close()


# ---------------------------------------------------------------- one tenant beside another


def test_a_seed_is_expanded_when_its_turn_comes(
    llama: nn.Module, serve: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """... and as far as its turn goes: what was sent is some bytes."""
    from symbiosis.executor.compute import slices

    sizes = []
    grow = slices.keystream
    monkeypatch.setattr(
        slices, "keystream", lambda key, shape, *rest, **more: sizes.append(shape[0]) or grow(key, shape, *rest, **more)
    )
    executor = serve(llama, integers=[8], max_batch_tokens=256)
    session = Session(executor.endpoint)
    layer = next(n for n, layer in enumerate(session.manifest) if layer.kind == "linear")
    width = session.manifest[layer].shape[1]
    seed = torch.arange(SEED_BYTES, dtype=torch.uint8)
    sent = session.send(Call(Op.FORWARD, layer, "int32", (1000, width), seeded=True), (seed,))[0]
    assert sum(sizes) == 1000 and max(sizes) <= 256
    rows = grow(seed.numpy().tobytes(), (1000, width), torch.int32)
    assert torch.equal(sent, session.call(Op.FORWARD, layer, rows))
    session.close()


def test_a_view_of_one_element_is_no_matrix_of_any_size(llama: nn.Module, serve: Callable) -> None:
    session = Session(serve(llama).endpoint)
    with pytest.raises(CallError, match="more than once") as refused:
        session.call(Op.PRODUCT, 1, torch.ones(1, 16_000), view=View((16_000, 16_000), (0, 0), 0))
    assert refused.value.code is Code.BAD_VIEW
    session.close()
